"""The invariants of the scheduler, by number. Each raises `InvariantBroken` with what it found; tests call them all.

1   A request leaves exactly once.
2   Blocks are conserved: free + held = total, and a held block has one holder.
3   A block that someone can read is written by one request only.
4   A plan never exceeds its token budget, ``max_num_seqs`` or the blocks there are.
5   Stall-free (``sarathi``): who runs and is neither preempted nor without a block is in every plan.
6   Tokens of a request arrive in order, without gap or repeat.
7   No plan is empty while a running request has something to compute.
8   Same events, same plans.
9   Preemptions of a request are bounded by three.
10  Iteration-level FCFS: an earlier arrival has run at least as many iterations while both are in the pool.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from shared.ids import RequestId
from shared.scheduling.limits import PREEMPTIONS_AT_MOST, Limits
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
    """2: free and held blocks are all blocks, and nobody else holds one."""
    held = [block for request in worker.running for block in request.blocks]
    _require(len(held) + worker.pool.free == worker.pool.blocks, 2, f"{len(held)} held, {worker.pool.free} free")
    _require(worker.pool.free_blocks().isdisjoint(held), 2, "a block is free and held")


def nobody_else_holds_blocks(state: State) -> None:
    """2: who does not run has no table."""
    holders = [
        request.id for request in state.requests.values() if request.blocks and request.phase is not Phase.RUNNING
    ]
    _require(not holders, 2, f"{holders} do not run and hold blocks")


def blocks_have_one_writer(worker: WorkerView) -> None:
    """3: no block is in two tables."""
    shared = [b for b, n in Counter(block for request in worker.running for block in request.blocks).items() if n > 1]
    _require(not shared, 3, f"blocks {shared} are in two tables")


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
    _require(len(worker.running) <= limits.max_num_seqs, 4, f"{len(worker.running)} requests hold blocks")


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


def no_idle_plan(step: Step, worker: WorkerView) -> None:
    """7: if somebody who runs could be fed, somebody is fed."""
    could = [request.id for request in worker.running if request.missing_tokens > 0 and not request.is_complete]
    _require(bool(step.slices) or not could, 7, f"nothing is fed while {could} run")


def same_plans(one: Sequence[Step], other: Sequence[Step]) -> None:
    """8: two runs over the same events made the same plans."""
    _require(one == other, 8, "the same events made other plans")


def preemptions_are_bounded(state: State) -> None:
    """9: nobody is preempted more often than three times."""
    beyond = [request.id for request in state.requests.values() if request.preemptions > PREEMPTIONS_AT_MOST]
    _require(not beyond, 9, f"{beyond} were preempted too often")


def first_come_first_served(iterations: Mapping[RequestId, int], in_pool: Sequence[Request]) -> None:
    """10: along the order of arrival the number of iterations never grows."""
    counts = [iterations.get(request.id, 0) for request in sorted(in_pool, key=lambda request: request.arrival)]
    _require(counts == sorted(counts, reverse=True), 10, f"iterations by arrival are {counts}")
