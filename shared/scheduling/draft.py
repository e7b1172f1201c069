"""A step while it is being filled: the one ledger through which a policy spends tokens and blocks."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.ids import BlockId, RequestId
from shared.paging.reservation import Reservation
from shared.scheduling.limits import Limits, TokenBudget
from shared.scheduling.line import place
from shared.scheduling.request import Phase, Request
from shared.scheduling.state import State, WorkerView
from shared.scheduling.step import Admission, Slice, Step


@dataclass(slots=True, eq=False)
class Draft:
    """One step of one worker in the making. What a policy gives here is taken from budget and pool at once."""

    state: State
    worker: WorkerView
    limits: Limits
    reservation: Reservation
    budget: TokenBudget = field(init=False)
    slices: list[Slice] = field(init=False, default_factory=list)
    admitted: list[Admission] = field(init=False, default_factory=list)
    preempted: list[RequestId] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.budget = TokenBudget(self.limits.max_num_batched_tokens)

    @property
    def previous_prefilled(self) -> bool:
        """True if this worker's step before this one computed any part of a prompt."""
        return self.worker.previous is not None and self.worker.previous.prefills

    def running(self) -> list[Request]:
        """Return who runs as the step begins, in queue order; one preempted meanwhile is passed over by `extend`."""
        return list(self.worker.running)

    def waiting(self) -> Iterator[Request]:
        """Yield in queue order those who might run here: not resident elsewhere, not larger than this worker."""
        for request in list(self.state.line):
            if request.worker in (None, self.worker.id) and self.worker.can_ever_hold(request):
                yield request

    def extend(self, request: Request) -> None:
        """Give a running request what it misses, as far as the budget goes.

        If blocks run out, the last in queue order gives way. The first never does: it waits for a block instead.
        """
        if request.phase is not Phase.RUNNING or not self.budget.left:
            return
        count = min(request.missing_tokens, self.budget.left)
        lacking = self.worker.pool.blocks_for(request.computed + count) - len(request.blocks)
        if lacking > 0 and not self._make_room(request, lacking):
            return
        blocks = self.worker.pool.allocate(max(0, lacking))
        if blocks is None:
            raise AssertionError("room was made and is gone")
        request.blocks.extend(blocks)
        self._feed(request, blocks)

    def admit(self, request: Request, *, whole: bool = False) -> bool:
        """Let a waiting request begin; False if it cannot now, and then nobody behind it may (no overtaking).

        ``whole``: only if everything it misses fits into what is left of the budget.
        """
        if not self._has_place_for(request, whole=whole):
            return False
        blocks = self.worker.pool.allocate(self._blocks_at_admission(request))
        if blocks is None:
            return False
        is_new = request.worker is None
        self.state.line.remove(request)
        self.worker.admit(request)
        request.blocks.extend(blocks)
        self.admitted.append(Admission(request.id, blocks, is_new))
        # The table of a new request travels with its admission, that of a preempted one with its slice.
        self._feed(request, () if is_new else blocks)
        return True

    def finish(self, released: tuple[RequestId, ...]) -> Step:
        """Return the step as it stands."""
        return Step(tuple(self.slices), tuple(self.admitted), tuple(self.preempted), released)

    def _has_place_for(self, request: Request, *, whole: bool) -> bool:
        enough = request.missing_tokens if whole else 1
        return (
            not self.preempted  # who just gave way must not be overtaken with its own memory
            and not request.slices_in_flight  # preempted, and its last results are not read: its tokens are not known
            and len(self.worker.running) < self.limits.max_num_seqs
            and self.budget.left >= enough
        )

    def _blocks_at_admission(self, request: Request) -> int:
        footprint = request.footprint
        tokens = footprint.most_tokens if request.is_protected else self.reservation(footprint)
        return self.worker.pool.blocks_for(tokens)

    def _make_room(self, request: Request, blocks: int) -> bool:
        """Preempt from the end of the queue order until there is room; False if the request itself must wait."""
        while self.worker.pool.free < blocks:
            behind = (other for other in reversed(self.worker.running) if place(other) >= place(request))
            victim = next((other for other in behind if not other.is_protected), None)
            if victim is None or victim is self.worker.running[0]:
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        self.worker.take_back(victim)
        victim.move(Phase.WAITING)
        victim.computed = 0
        victim.preemptions += 1
        self.state.line.add(victim)
        self.state.preemptions += 1
        self.preempted.append(victim.id)

    def _feed(self, request: Request, new_blocks: tuple[BlockId, ...]) -> None:
        decodes = request.is_decoding
        start, count = request.computed, self.budget.take(request.missing_tokens)
        samples = count == request.missing_tokens
        self.slices.append(Slice(request.id, start, count, new_blocks, samples, decodes))
        request.computed += count
        request.output_tokens += samples
        request.slices_in_flight += 1
