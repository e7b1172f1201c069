"""The invariants of the scheduler, by number. Each raises `InvariantBroken` with what it found; tests call them all.

1   A request leaves exactly once.
2   Blocks are conserved: free + held + cached = total; a block's holders equal the number of tables that name it.
3   A block that someone can read is written by one request only: who shares one, or finds one, only reads it.
4   A plan never exceeds its token budget, ``max_num_seqs`` or the blocks there are.
5   Stall-free (``sarathi``): who decodes and is neither preempted, without a block, nor wholly in flight is in every
    plan.
6   Tokens of a request arrive in order, without gap or repeat.
7   No plan is empty while a running request has something to compute.
8   Same events, same plans.
9   Nobody waits for ever: preemptions of a request are bounded by three, and overtaking by the queue order. ``fcfs``:
    only a long prompt is passed over, while another long one is computed. ``priority``: by those that come within
    ``AGING`` for each step of priority between them. ``fair``: each eighth admission goes to who came first.
10  Iteration-level FCFS: an earlier arrival has run at least as many iterations while both are in the pool.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from shared.ids import BlockId, RequestId
from shared.scheduling.limits import PREEMPTIONS_AT_MOST, Limits
from shared.scheduling.orders.fair import OLDEST_EVERY
from shared.scheduling.orders.fixed import AGING_MS
from shared.scheduling.request import Phase, Request
from shared.scheduling.state import State, WorkerView
from shared.scheduling.step import Step


class InvariantBroken(AssertionError):
    """A bug in the scheduling core."""


def _require(holds: bool, number: int, found: str) -> None:
    if not holds:
        raise InvariantBroken(f"invariant {number}: {found}")


def leaves_once(departures: Iterable[tuple[RequestId, int]]) -> None:
    """1: no attempt of a request leaves twice."""
    twice = [departure for departure, times in Counter(departures).items() if times > 1]
    _require(not twice, 1, f"{twice} left more than once")


def blocks_are_conserved(worker: WorkerView) -> None:
    """2: every block is blank, cached or held, and has as many holders as there are tables that name it."""
    pool = worker.pool
    tables = Counter(block for request in worker.running for block in request.blocks)
    free = pool.free_blocks()
    wrong = [block for block in range(pool.blocks) if pool.holders(BlockId(block)) != tables[BlockId(block)]]
    _require(not wrong, 2, f"blocks {wrong} have other holders than tables")
    _require(len(tables) + len(free) == pool.blocks, 2, f"{len(tables)} held, {len(free)} free of {pool.blocks}")
    _require(len(tables) == pool.used, 2, f"{len(tables)} held, {pool.used} used")
    _require(free.isdisjoint(tables), 2, "a block is free and held")
    _require(sum(map(pool.is_named, free)) == pool.cached, 2, f"{pool.cached} cached are not the free ones with a name")


def nobody_else_holds_blocks(state: State) -> None:
    """2: who does not run has no table."""
    holders = [
        request.id for request in state.requests.values() if request.blocks and request.phase is not Phase.RUNNING
    ]
    _require(not holders, 2, f"{holders} do not run and hold blocks")


def blocks_have_one_writer(worker: WorkerView) -> None:
    """3: a block in two tables has a name, which only full blocks have, and no table has a block twice."""
    tables = Counter(block for request in worker.running for block in set(request.blocks))
    shared = [block for block, times in tables.items() if times > 1 and not worker.pool.is_named(block)]
    _require(not shared, 3, f"blocks {shared} are in two tables, and nobody knows their content")
    double = [r.id for r in worker.running if len(set(r.blocks)) != len(r.blocks)]
    _require(not double, 3, f"tables of {double} have a block twice")


def named_blocks_are_only_read(step: Step, worker: WorkerView) -> None:
    """3: no slice of a plan just made writes into a block that can be found by its content."""
    tables = {request.id: request.blocks for request in worker.running}
    size = worker.pool.block_tokens
    written = {
        block
        for slice_ in step.slices
        for block in tables[slice_.request][slice_.start // size : -(-(slice_.start + slice_.count) // size)]
    }
    named = [block for block in sorted(written) if worker.pool.is_named(block)]
    _require(not named, 3, f"blocks {named} have a name and are written")


def tables_hold_what_is_computed(worker: WorkerView) -> None:
    """3: every computed position has its place in the request's own table."""
    short = [r.id for r in worker.running if len(r.blocks) < worker.pool.blocks_for(r.computed)]
    _require(not short, 3, f"tables of {short} are too short")


def plan_keeps_limits(step: Step, worker: WorkerView, limits: Limits) -> None:
    """4: tokens, requests and blocks of a plan are within their bounds, and no request is in it twice."""
    _require(step.tokens <= limits.max_num_batched_tokens, 4, f"{step.tokens} tokens in one step")
    _require(all(slice_.count > 0 for slice_ in step.slices), 4, "an empty slice")
    _require(len({slice_.request for slice_ in step.slices}) == len(step.slices), 4, "a request is in the plan twice")
    _require(len(step.slices) <= limits.max_num_seqs, 4, f"{len(step.slices)} requests in one step")
    seats = limits.max_num_seqs * limits.stages
    _require(len(worker.running) <= seats, 4, f"{len(worker.running)} requests hold blocks")


def nobody_stalls(step: Step, ran_before: Sequence[Request], worker: WorkerView) -> None:
    """5: who was decoding before the plan was made is in it, unless it left, was preempted or found no block."""
    fed = {slice_.request for slice_ in step.slices}
    stalled = [
        request.id
        for request in ran_before
        if request in worker.running and request.id not in fed and has_block_for_next(request, worker)
    ]
    _require(not stalled, 5, f"{stalled} stall")


def has_block_for_next(request: Request, worker: WorkerView) -> bool:
    """Return whether the next token of a running request needs no further block."""
    return worker.pool.blocks_for(request.computed + 1) <= len(request.blocks)


def tokens_in_order(have: int, first_index: int) -> None:
    """6: the next tokens of a request begin where the last ones ended."""
    _require(have == first_index, 6, f"has {have} tokens, got index {first_index}")


def no_idle_plan(step: Step, worker: WorkerView, limits: Limits) -> None:
    """7: if somebody who runs could be fed, somebody is fed. With several stages, plans in flight may be waited for."""
    could = [request.id for request in worker.running if request.missing_tokens > 0 and not request.is_complete]
    waits = limits.stages > 1 and bool(worker.in_flight)
    _require(bool(step.slices) or waits or not could, 7, f"nothing is fed while {could} run")


def same_plans(one: Sequence[Step], other: Sequence[Step]) -> None:
    """8: two runs over the same events made the same plans."""
    _require(one == other, 8, "the same events made other plans")


def preemptions_are_bounded(state: State) -> None:
    """9: nobody is preempted more often than three times. A new leader counts from the start."""
    beyond = [request.id for request in state.requests.values() if request.preemptions > PREEMPTIONS_AT_MOST]
    _require(not beyond, 9, f"{beyond} were preempted too often")


def overtaken(step: Step, worker: WorkerView, state: State) -> list[tuple[Request, Request]]:
    """Return who was admitted by a plan just made, each with everyone who came first, might run here, and still waits.

    Who is preempted and whose last results have not been read is not counted: nobody may be admitted then.
    """
    waiting = [r for r in state.line if r.worker in {None, worker.id} and worker.can_ever_hold(r)]
    admitted = [state.requests[admission.request] for admission in step.admitted]
    return [(late, early) for late in admitted for early in waiting if early.arrival < late.arrival]


def nobody_overtakes(pairs: Iterable[tuple[Request, Request]], is_passed_over: Callable[[Request], bool]) -> None:
    """9 (``fcfs``): who waits while a later one is admitted is a long prompt whose share others have taken."""
    wrong = [(late.id, early.id) for late, early in pairs if not is_passed_over(early)]
    _require(not wrong, 9, f"overtook, and was overtaken: {wrong}")


def only_the_urgent_overtake(
    pairs: Iterable[tuple[Request, Request]], is_passed_over: Callable[[Request], bool]
) -> None:
    """9 (``priority``): who overtakes is more urgent, and came within the time that its urgency is worth."""
    wrong = [
        (late.id, early.id)
        for late, early in pairs
        if late.arrival[0] - early.arrival[0] > AGING_MS * (early.priority - late.priority)
        and not is_passed_over(early)
    ]
    _require(not wrong, 9, f"overtook too late, and was overtaken: {wrong}")


def the_oldest_has_its_turn(newcomers_were_oldest: Sequence[bool]) -> None:
    """9 (``fair``): among any eight newcomers admitted one after the other is one who came before all who waited."""
    since = 0
    for was_oldest in newcomers_were_oldest:
        since = 0 if was_oldest else since + 1
        _require(since < OLDEST_EVERY, 9, f"{since} newcomers were admitted, and never the oldest")


def first_come_first_served(iterations: Mapping[RequestId, int], in_pool: Sequence[Request]) -> None:
    """10: along the order of arrival the number of iterations never grows."""
    counts = [iterations.get(request.id, 0) for request in sorted(in_pool, key=lambda request: request.arrival)]
    _require(counts == sorted(counts, reverse=True), 10, f"iterations by arrival are {counts}")
