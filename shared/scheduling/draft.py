"""A step while it is being filled: the one ledger through which a policy spends tokens and blocks."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from shared.ids import BlockId, RequestId
from shared.paging.reservation import KvManager
from shared.scheduling.giving_way import may_give_way, victims_for
from shared.scheduling.limits import Limits, TokenBudget
from shared.scheduling.memory import Memory
from shared.scheduling.orders.port import Place
from shared.scheduling.request import Phase, Request
from shared.scheduling.state import State, WorkerView
from shared.scheduling.step import Admission, Fill, Slice, Step


@dataclass(slots=True, eq=False)
class Draft:
    """One step of one worker in the making. What a policy gives here is taken from budget and pool at once."""

    state: State
    worker: WorkerView
    limits: Limits
    kv: KvManager
    budget: TokenBudget = field(init=False)
    _memory: Memory = field(init=False)
    _slices: dict[RequestId, Slice] = field(init=False, default_factory=dict)
    _fills: list[Fill] = field(init=False, default_factory=list)
    _admitted: list[Admission] = field(init=False, default_factory=list)
    _preempted: list[RequestId] = field(init=False, default_factory=list)
    _invited: Request | None = field(init=False, default=None)
    """More urgent than some who run: until it is admitted, nobody else gets what it needs."""
    _set_aside: int = field(init=False, default=0)
    """Unheld blocks that it needs, with those of its beginning: should one be evicted, another takes its place."""
    _passed_over: bool = field(init=False, default=False)
    """Somebody was offered a place and left waiting: whoever is admitted now overtakes."""

    def __post_init__(self) -> None:
        self.budget = TokenBudget(self.limits.step_tokens)
        self._memory = Memory(self.worker.pool, self.kv)
        self.state.line.sort(self.worker.running)

    # -- what a policy sees -------------------------------------------------------------------------------------

    @property
    def previous_prefilled(self) -> bool:
        """True if this worker's step before this one computed any part of a prompt."""
        return self.worker.previous is not None and self.worker.previous.prefills

    @property
    def invited(self) -> Request | None:
        """Who waits and is more urgent than some who run: it is to be admitted before anybody else's prompt is fed."""
        return self._invited

    @property
    def is_full(self) -> bool:
        """True if nobody more can be admitted: no tokens or no seats are left."""
        return not self.budget.left or not self._has_free_seat()

    @property
    def feeds_anybody(self) -> bool:
        """True as soon as somebody has been fed."""
        return bool(self._slices)

    def running(self) -> list[Request]:
        """Return who runs as the step begins, in queue order; one preempted meanwhile is passed over by `extend`.

        With several stages, those are left out whose last slice is still in flight: batches are disjoint.
        """
        if self.limits.stages == 1:
            return self.worker.running.copy()
        return [request for request in self.worker.running if not request.slices_in_flight]

    def waiting(self) -> Iterator[Request]:
        """Yield in queue order those who might run here, while anybody can be admitted."""
        if self.is_full:
            return  # before the line is walked at all
        for request in self._in_line():
            yield request
            self._passed_over |= request.phase is Phase.WAITING
            if self.is_full:
                return

    def _in_line(self) -> Iterator[Request]:
        """Yield who is neither resident elsewhere, nor larger than this worker, nor better off a little later."""
        for request in self.state.line:
            is_elsewhere = request.worker not in (None, self.worker.id)
            if is_elsewhere or not self.worker.can_ever_hold(request) or self._will_find_its_prompt(request):
                continue
            yield request

    def _will_find_its_prompt(self, request: Request) -> bool:
        """Return whether a sibling is about to compute what the request would find then, block by block."""
        if request.shares_with is None or not request.finds_prefix or not self.kv.is_on_demand:
            return False
        sibling = self.state.requests.get(request.shares_with)
        has_full_blocks = request.prompt_tokens > self.worker.pool.block_tokens
        if not has_full_blocks or sibling is None or sibling.has_drawn:
            return False
        return sibling.worker in {None, self.worker.id}  # what another worker computes is not found here

    def misses_more_than(self, tokens: int, request: Request) -> bool:
        """Return whether it would have to be fed more than so many before it samples, if it began here now."""
        if request.phase is Phase.RUNNING:
            return request.missing_tokens > tokens
        return self._memory.misses_more_than(tokens, request)

    # -- what a policy does -------------------------------------------------------------------------------------

    def make_way(self, *, whole: bool = False) -> None:
        """Let the least urgent of the running give way, if the next in line is more urgent and finds no place.

        Only under a queue order that takes places, and if no other worker has a place for it. What it needs is kept for
        it, from those who run as well.
        ``whole``: only if all that it misses fits into the step beside a token for each of those who go on.
        """
        if not self.state.line.takes_places:
            return
        head = next(self._in_line(), None)
        if head is None or head.slices_in_flight:
            return
        order, running = self.state.line, self.worker.running
        seats_lacking = len(running) + 1 - self._seats
        victims = victims_for(head, running, self._memory, order, seats_lacking=seats_lacking)
        if victims is None or (victims and self._has_place_elsewhere(head)):
            return
        if whole and self.misses_more_than(self.budget.left - self._going_on(victims), head):
            return
        takes_a_place = any(may_give_way(other, head, order) for other in reversed(running))  # as every victim may
        for victim in victims:
            self._preempt(victim)
        if takes_a_place:
            found = self._memory.found(head)
            self._invited = head
            self._set_aside = self._memory.new_blocks(head, found) + self._memory.unheld(found)

    def extend(self, request: Request, at_most: int | None = None) -> None:
        """Give a running request what it misses, as far as the budget goes; ``at_most`` so many tokens.

        May be called again to give it more. If blocks run out, the last in queue order gives way. The first never
        does: it waits for a block instead.
        """
        left = self.budget.left if at_most is None else min(at_most, self.budget.left)
        count = min(request.missing_tokens, left)
        if request.phase is not Phase.RUNNING or not count or not self._has_row_for(request):
            return
        lacking = self.worker.pool.blocks_for(request.computed + count) - len(request.blocks)
        if lacking <= 0:
            self._feed(request, count, ())
        elif self._make_room(request, lacking):
            blocks = self.worker.pool.allocate(lacking)
            if blocks is None:
                raise AssertionError("room was made and is gone")
            request.blocks.extend(blocks)
            self._feed(request, count, blocks)

    def admit(self, request: Request, *, whole: bool = False, at_most: int | None = None) -> bool:
        """Let a waiting request begin; False if it cannot now, and then nobody behind it may (no overtaking).

        ``whole``: only if everything it misses fits into what is left of the budget. ``at_most``: feed no more.
        """
        found = self._memory.found(request)
        count = self._first_slice(request, found, whole=whole, at_most=at_most)
        beside = 0 if request is self._invited else len(self.worker.running)
        if not count or not self._has_seat_for(request) or self._memory.lacking(request, found, beside) > 0:
            return False
        is_new = request.worker is None
        self.state.line.remove(request)
        self.worker.pool.hold(found)  # before anything is allocated, which might evict them
        new = self.worker.pool.allocate(self._memory.new_blocks(request, found))
        if new is None:
            raise AssertionError("there was room, and it is gone")
        self.state.admit(self.worker, request)
        request.blocks.extend(found + new)
        request.computed = len(found) * self.worker.pool.block_tokens
        self._admitted.append(Admission(request.id, found + new, is_new, request.computed))
        self._count_admission(request, is_new=is_new)
        # The table of a new request travels with its admission, that of a preempted one with its slice.
        self._feed(request, count, () if is_new else found + new)
        return True

    def finish(self, released: tuple[RequestId, ...]) -> Step:
        """Return the step as it stands."""
        sampling = [slice_.request for slice_ in self._slices.values() if slice_.samples]
        self.state.line.charge_output([self.state.requests[request] for request in sampling])
        slices = tuple(self._slices.values())
        return Step(slices, tuple(self._admitted), tuple(self._preempted), released, tuple(self._fills))

    # -- admission ----------------------------------------------------------------------------------------------

    def _first_slice(self, request: Request, found: tuple[BlockId, ...], *, whole: bool, at_most: int | None) -> int:
        missing = request.missing_tokens - len(found) * self.worker.pool.block_tokens
        if whole and missing > self.budget.left:
            return 0
        return min(missing, self.budget.left, missing if at_most is None else at_most)

    def _has_seat_for(self, request: Request) -> bool:
        is_kept_for_another = (self._preempted or self._invited is not None) and request is not self._invited
        return (
            not is_kept_for_another  # who just gave way must not be overtaken with its own memory
            and not request.slices_in_flight  # preempted, and its last results are not read: its tokens are not known
            and self._has_free_seat()
        )

    def _has_free_seat(self) -> bool:
        return len(self.worker.running) < self._seats and len(self._slices) < self.limits.max_num_seqs

    @property
    def _seats(self) -> int:
        return self.limits.max_num_seqs * self.limits.stages

    def _has_place_elsewhere(self, request: Request) -> bool:
        """Return whether another worker has a seat and the memory: there it joins the next step, at nobody's cost."""
        if request.worker is not None:
            return False
        others = (worker for worker in self.state.workers.values() if worker is not self.worker)
        return any(self._has_place_on(other, request) for other in others if len(other.running) < self._seats)

    def _has_place_on(self, worker: WorkerView, request: Request) -> bool:
        memory = Memory(worker.pool, self.kv)
        lacking = memory.lacking(request, memory.found(request), len(worker.running))
        return worker.can_ever_hold(request) and lacking <= 0

    def _has_row_for(self, request: Request) -> bool:
        """Return whether the step takes one more: of several stages all may be waiting to be fed at once."""
        return request.id in self._slices or len(self._slices) < self.limits.max_num_seqs

    def _count_admission(self, request: Request, *, is_new: bool) -> None:
        if request is self._invited:
            self._invited, self._set_aside = None, 0
        if not is_new:
            return
        self.state.line.charge_prompt(request, request.missing_tokens, overtakes=self._passed_over)
        if request.finds_prefix and self.kv.is_on_demand:
            self.state.prefix_queries += request.total_tokens
            self.state.prefix_hits += request.computed

    # -- giving way ---------------------------------------------------------------------------------------------

    def _going_on(self, victims: list[Request]) -> int:
        fed = self.running()
        return len(fed) - sum(victim in fed for victim in victims)

    def _place(self, request: Request) -> Place:
        return self.state.line.place(request)

    def _make_room(self, request: Request, blocks: int) -> bool:
        """Preempt from the end of the queue order until there is room; False if the request itself must wait."""
        while self.worker.pool.free - self._set_aside < blocks:
            behind = (other for other in reversed(self.worker.running) if self._place(other) >= self._place(request))
            victim = next((o for o in behind if not o.is_protected and o.id not in self._slices), None)
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
        self._preempted.append(victim.id)

    # -- feeding ------------------------------------------------------------------------------------------------

    def _feed(self, request: Request, count: int, new_blocks: tuple[BlockId, ...]) -> None:
        begun = self._slices.get(request.id)
        decodes = request.is_decoding
        start, count = request.computed, self.budget.take(count)
        samples = count == request.missing_tokens
        if begun is None:
            self._slices[request.id] = Slice(request.id, start, count, new_blocks, samples, decodes)
            request.slices_in_flight += 1
        else:
            more = begun.new_blocks + new_blocks
            self._slices[request.id] = replace(begun, count=begun.count + count, new_blocks=more, samples=samples)
        request.computed += count
        request.output_tokens += samples
        size = self.worker.pool.block_tokens
        full = range(start // size, request.computed // size)
        if full and request.prefix is not None and self.kv.is_on_demand:
            self._note_fills(request, full)

    def _note_fills(self, request: Request, indices: range) -> None:
        for index in indices:
            block = request.blocks[index]
            self._fills.append(Fill(request, index, block, self.worker.pool.stamp(block)))
