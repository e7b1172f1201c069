"""What the planner returns: one step of one worker, frozen."""

from dataclasses import dataclass, field

from shared.ids import BlockId, RequestId
from shared.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Admission:
    """A request begins, or begins again, on this worker with this table."""

    request: RequestId
    blocks: tuple[BlockId, ...]
    is_new: bool
    """False for one that was preempted here: the worker still knows its tokens."""
    start: int = 0
    """Positions whose keys and values were found in the first blocks: they are not computed again."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Feed ``count`` tokens from ``start``. ``samples``: it reaches the last token known, so one is drawn."""

    request: RequestId
    start: int
    count: int
    new_blocks: tuple[BlockId, ...]
    samples: bool
    decodes: bool
    """The request's prompt was computed before, and this is its one next token."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A block that a slice fills up: when the step has run, its content has a name."""

    request: Request
    index: int
    """Its place in the request's table."""
    block: BlockId
    stamp: int
    """Of the block when it was written: another one later means that it has been given away."""


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration. ``released`` are forgotten by the worker, ``preempted`` lose their table and keep their tokens."""

    slices: tuple[Slice, ...]
    admitted: tuple[Admission, ...]
    preempted: tuple[RequestId, ...]
    released: tuple[RequestId, ...]
    fills: tuple[Fill, ...] = field(default=(), compare=False, repr=False)

    @property
    def tokens(self) -> int:
        """Tokens that the step feeds."""
        return sum(slice_.count for slice_ in self.slices)

    @property
    def prefills(self) -> bool:
        """True if it computes any part of a prompt."""
        return any(not slice_.decodes for slice_ in self.slices)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to tell the worker."""
        return not (self.slices or self.preempted or self.released)
