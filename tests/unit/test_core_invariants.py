"""Every invariant must be able to break: each is shown a state that it has to refuse, beside one that it accepts."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from shared.ids import BlockId, RequestId, WorkerId
from shared.paging.block_hash import BlockHash
from shared.paging.pool import BlockPool
from shared.scheduling import invariants
from shared.scheduling.invariants import InvariantBroken
from shared.scheduling.limits import Limits
from shared.scheduling.orders import ORDERS
from shared.scheduling.request import Phase, Request
from shared.scheduling.state import State, WorkerView
from shared.scheduling.step import Admission, Slice, Step

NAME = BlockHash(b"n" * 16)
EMPTY = Step((), (), (), ())


def request(name: str, arrival_ms: int = 0, **facts: int) -> Request:
    return Request(RequestId(name), 1, (arrival_ms, 0), 4, 4, **facts)  # type: ignore[arg-type]  # counts alone here


def running(blocks: int = 4, *tables: int) -> WorkerView:
    """A worker with blocks of 2 and one running request for each table length."""
    view = WorkerView(WorkerId("w"), BlockPool(blocks, 2), 1000)
    for number, length in enumerate(tables):
        one = request(f"r{number}", number)
        one.move(Phase.RUNNING)
        one.blocks = list(view.pool.allocate(length) or ())
        view.running.append(one)
    return view


def refused(number: int, check: Callable[[], None]) -> None:
    with pytest.raises(InvariantBroken, match=f"^invariant {number}: (?!None$).*[a-z]"):
        check()


def test_1_leaving_twice() -> None:
    invariants.leaves_once([(RequestId("r"), 1), (RequestId("r"), 2)])
    refused(1, lambda: invariants.leaves_once([(RequestId("r"), 1), (RequestId("r"), 1)]))


def lose(pool: BlockPool) -> None:
    pool._blank.popitem()


def list_twice(pool: BlockPool) -> None:
    pool._cached[next(iter(pool._blank))] = None


def swap_for_a_held_one(pool: BlockPool, held: BlockId) -> None:
    pool._blank.popitem()
    pool._blank[held] = None


def cache_without_a_name(pool: BlockPool) -> None:
    pool._cached[pool._blank.popitem()[0]] = None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda view: lose(view.pool),
        lambda view: list_twice(view.pool),
        lambda view: swap_for_a_held_one(view.pool, view.running[0].blocks[0]),
        lambda view: cache_without_a_name(view.pool),
        lambda view: view.running[0].blocks.pop(),  # held by nobody's table
        lambda view: view.running[0].blocks.append(BlockId(0)),  # in a table, and free
        lambda view: view.pool.release(view.running[0].blocks),
        lambda view: view.pool.hold(view.running[0].blocks),  # one reference too many
    ],
)
def test_2_a_block_that_is_lost_or_counted_wrongly(spoil: Callable[[WorkerView], object]) -> None:
    view = running(5, 2, 1)
    invariants.blocks_are_conserved(view)
    spoil(view)
    refused(2, lambda: invariants.blocks_are_conserved(view))


def test_2_a_table_of_one_who_does_not_run() -> None:
    state = State(ORDERS["fcfs"]())
    waiting = state.requests[RequestId("r")] = request("r")
    invariants.nobody_else_holds_blocks(state)
    waiting.blocks = [BlockId(0)]
    refused(2, lambda: invariants.nobody_else_holds_blocks(state))


def test_3_a_block_in_two_tables_whose_content_nobody_knows() -> None:
    view = running(4, 1, 1)
    shared = view.running[0].blocks[0]
    view.running[1].blocks.insert(0, shared)
    refused(3, lambda: invariants.blocks_have_one_writer(view))
    view.pool.name(shared, view.pool.stamp(shared), NAME)
    invariants.blocks_have_one_writer(view)
    view.running[1].blocks.append(shared)
    refused(3, lambda: invariants.blocks_have_one_writer(view))


@pytest.mark.parametrize(
    ("start", "count", "writes_it"), [(0, 2, True), (1, 1, True), (2, 2, False), (1, 2, True), (0, 4, True)]
)
def test_3_a_slice_that_writes_what_can_be_found(start: int, count: int, *, writes_it: bool) -> None:
    view = running(4, 2)
    first = view.running[0].blocks[0]
    view.pool.name(first, view.pool.stamp(first), NAME)
    step = replace(EMPTY, slices=(Slice(RequestId("r0"), start, count, (), samples=False, decodes=False),))
    if writes_it:
        refused(3, lambda: invariants.named_blocks_are_only_read(step, view))
    else:
        invariants.named_blocks_are_only_read(step, view)


def test_3_a_table_that_is_too_short() -> None:
    view = running(4, 2)
    view.running[0].computed = 4
    invariants.tables_hold_what_is_computed(view)
    view.running[0].computed = 5
    refused(3, lambda: invariants.tables_hold_what_is_computed(view))


def sliced(*counts: int) -> Step:
    return replace(
        EMPTY,
        slices=tuple(
            Slice(RequestId(f"r{number}"), 0, count, (), samples=False, decodes=False)
            for number, count in enumerate(counts)
        ),
    )


def test_4_too_many_tokens_requests_or_seats() -> None:
    view, limits = running(9, 1, 1), Limits(8, 2)
    invariants.plan_keeps_limits(sliced(4, 4), view, limits)
    refused(4, lambda: invariants.plan_keeps_limits(sliced(4, 5), view, limits))
    refused(4, lambda: invariants.plan_keeps_limits(sliced(1, 1, 1), view, limits))
    refused(4, lambda: invariants.plan_keeps_limits(sliced(0), view, limits))
    one = sliced(1).slices[0]
    refused(4, lambda: invariants.plan_keeps_limits(replace(EMPTY, slices=(one, one)), view, limits))
    refused(4, lambda: invariants.plan_keeps_limits(EMPTY, running(9, 1, 1, 1), limits))
    invariants.plan_keeps_limits(EMPTY, running(9, 1, 1, 1), replace(limits, stages=2))


def test_5_one_who_stalls_with_a_block_for_its_next_token() -> None:
    view = running(4, 2)
    view.running[0].computed = 3
    refused(5, lambda: invariants.nobody_stalls(EMPTY, view.running, view))
    invariants.nobody_stalls(sliced(1), view.running, view)
    view.running[0].computed = 4  # and no block for a fifth
    invariants.nobody_stalls(EMPTY, view.running, view)


def test_6_a_gap_and_a_repeat() -> None:
    invariants.tokens_in_order(3, 3)
    refused(6, lambda: invariants.tokens_in_order(3, 4))
    refused(6, lambda: invariants.tokens_in_order(3, 2))


def test_7_an_empty_plan_while_somebody_could_be_fed() -> None:
    view, limits = running(4, 2), Limits(8, 2)
    refused(7, lambda: invariants.no_idle_plan(EMPTY, view, limits))
    invariants.no_idle_plan(sliced(1), view, limits)
    view.in_flight.append(sliced(1))
    refused(7, lambda: invariants.no_idle_plan(EMPTY, view, limits))
    invariants.no_idle_plan(EMPTY, view, replace(limits, stages=2))
    one = view.running[0]
    view.in_flight.clear()
    one.computed = 3  # one token is missing
    refused(7, lambda: invariants.no_idle_plan(EMPTY, view, limits))
    one.computed = 4
    invariants.no_idle_plan(EMPTY, view, limits)
    one.output_tokens = 4  # the last one by max_tokens needs not be fed
    invariants.no_idle_plan(EMPTY, view, limits)


def test_8_other_plans() -> None:
    invariants.same_plans([sliced(1)], [sliced(1)])
    refused(8, lambda: invariants.same_plans([sliced(1)], [sliced(2)]))


def test_9_a_fourth_preemption() -> None:
    state = State(ORDERS["fcfs"]())
    one = state.requests[RequestId("r")] = request("r", preemptions=3)
    invariants.preemptions_are_bounded(state)
    one.preemptions = 4
    refused(9, lambda: invariants.preemptions_are_bounded(state))


def test_9_overtaking_is_seen_and_only_a_long_prompt_may_be_passed_over() -> None:
    view, state = running(9), State(ORDERS["fcfs"]())
    early, late = request("early", 1), request("late", 2)
    state.requests = {each.id: each for each in (early, late)}
    state.line.add(early)
    step = replace(EMPTY, admitted=(Admission(late.id, (), is_new=True),))
    pairs = invariants.overtaken(step, view, state)
    assert pairs == [(late, early)]
    refused(9, lambda: invariants.nobody_overtakes(pairs, lambda _: False))
    invariants.nobody_overtakes(pairs, lambda request: request is early)
    early.worker = WorkerId("another")
    assert invariants.overtaken(step, view, state) == []
    early.worker, early.max_tokens = view.id, 1000  # larger than this worker
    assert invariants.overtaken(step, view, state) == []


@pytest.mark.parametrize(
    ("late_ms", "priority", "is_in_time"),
    [
        (37_000, 2, True),
        (37_001, 2, False),
        (67_000, 1, True),
        (67_001, 1, False),
        (97_000, 0, True),
        (7_001, 3, False),
    ],
)
def test_9_a_step_of_priority_is_worth_the_time_of_aging(late_ms: int, priority: int, *, is_in_time: bool) -> None:
    late, early = request("late", late_ms, priority=priority), request("early", 7_000, priority=3)
    if is_in_time:
        invariants.only_the_urgent_overtake([(late, early)], lambda _: False)
    else:
        refused(9, lambda: invariants.only_the_urgent_overtake([(late, early)], lambda request: request is late))
        invariants.only_the_urgent_overtake([(late, early)], lambda request: request is early)


def test_9_eight_newcomers_and_never_the_oldest() -> None:
    invariants.the_oldest_has_its_turn([False] * 7 + [True] + [False] * 7)
    refused(9, lambda: invariants.the_oldest_has_its_turn([True] + [False] * 8))


def test_10_a_later_arrival_that_ran_more_often() -> None:
    pool = [request("late", 2), request("early", 1)]
    invariants.first_come_first_served({RequestId("early"): 2, RequestId("late"): 2}, pool)
    refused(10, lambda: invariants.first_come_first_served({RequestId("late"): 1}, pool))
