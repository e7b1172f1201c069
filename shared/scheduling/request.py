"""A request as the planner sees it: counts of tokens and a table of blocks. There is no text and no token id here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from shared.ids import BlockId, RequestId, WorkerId
from shared.paging.block_hash import Prefix
from shared.paging.reservation import Footprint
from shared.scheduling.limits import PREEMPTIONS_AT_MOST


class Phase(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"
    """Its last token by ``max_tokens`` is in a published plan: it holds no block, its result has not been read."""
    FINISHED = "finished"


ALLOWED: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        Phase.WAITING: frozenset({Phase.RUNNING, Phase.FINISHED}),
        Phase.RUNNING: frozenset({Phase.WAITING, Phase.LEAVING, Phase.FINISHED}),  # WAITING again = preempted
        Phase.LEAVING: frozenset({Phase.FINISHED}),
        Phase.FINISHED: frozenset(),
    }
)


@dataclass(slots=True, eq=False)
class Request:
    """A request in the pool. ``computed`` tokens have keys and values, or will have when the published plans have run.

    ``output_tokens`` likewise counts tokens that published plans will sample. ``arrival`` orders the waiting line.
    """

    id: RequestId
    attempt: int
    arrival: tuple[int, int]
    prompt_tokens: int
    max_tokens: int
    output_tokens: int = 0
    priority: int = 0
    """Smaller is more urgent; only the ``priority`` order reads it."""
    tenant: str = ""
    """Whose request it is; only the ``fair`` order reads it."""
    prefix: Prefix | None = None
    """What its blocks contain; None if nothing of it is ever shared."""
    shares_with: RequestId | None = None
    """The sibling that computes the prompt of both."""
    scores_prompt: bool = False
    """Every token of its prompt has to be computed until its first token is drawn: something is told of each."""
    has_drawn: bool = False
    """A result has said that a token was drawn: its whole prompt has been computed, and can be found."""
    computed: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    worker: WorkerId | None = None
    """Where it is resident; it never changes within an attempt."""
    preemptions: int = 0
    slices_in_flight: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and answer so far: what ``computed`` must catch up with."""
        return self.prompt_tokens + self.output_tokens

    @property
    def missing_tokens(self) -> int:
        """Tokens that must still be fed before the next one can be sampled."""
        return self.total_tokens - self.computed

    @property
    def is_decoding(self) -> bool:
        """True if its prompt is computed and one token is to be fed."""
        return self.computed >= self.prompt_tokens and self.missing_tokens == 1

    @property
    def is_complete(self) -> bool:
        """True if its last token by ``max_tokens`` has been sampled, or will be by a published plan."""
        return self.output_tokens >= self.max_tokens

    @property
    def is_protected(self) -> bool:
        """True if it has been preempted as often as anybody may be."""
        return self.preemptions >= PREEMPTIONS_AT_MOST

    @property
    def finds_prefix(self) -> bool:
        """True if it may begin with blocks that others have computed."""
        return self.prefix is not None and not (self.scores_prompt and not self.output_tokens)

    @property
    def footprint(self) -> Footprint:
        """Positions it needs now and at most."""
        return Footprint(self.total_tokens, self.prompt_tokens + self.max_tokens)

    def move(self, phase: Phase) -> None:
        """Change the phase. Raises ValueError for a move that the table does not have."""
        if phase not in ALLOWED[self.phase]:
            raise ValueError(f"{self.id} cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase
