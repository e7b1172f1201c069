"""The planner beside its policies: what a step may take, what results and take-overs change."""

import pytest

from shared.ids import BlockId, RequestId, WorkerId
from shared.paging.block_hash import BlockHash
from shared.paging.pool import BlockPool
from shared.paging.reservation import KV_MANAGERS
from shared.scheduling.limits import Limits
from shared.scheduling.planner import Outcome, Planner
from shared.scheduling.policies import POLICIES
from shared.scheduling.request import Request
from shared.scheduling.state import WorkerView
from tests.harness import Bench

W = WorkerId("w")
WHOLE = [name for name, policy in POLICIES.items() if not policy.cuts_prompts]


def planner_of(policy: str = "sarathi", *, longest: int = 1000, block: int = 4, **limits: int) -> Planner:
    planner = Planner(POLICIES[policy], Limits(64, 8, **limits), KV_MANAGERS["paged"])
    planner.add_worker(WorkerView(W, BlockPool(1000, block), longest))
    return planner


def request(name: str, prompt: int = 4, max_tokens: int = 9) -> Request:
    return Request(RequestId(name), 1, (0, ord(name[0])), prompt, max_tokens)


# -- whole prompts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", WHOLE)
def test_a_prompt_that_does_not_fit_beside_another_waits_and_is_never_cut(policy: str) -> None:
    """A budget of 100 (the longest served): 60 leave 40, and the second prompt has 60."""
    bench = Bench(policy, budget=64, max_model_len=100)
    for name in "ab":
        bench.arrive(name, 60, 1)
    assert bench.iterate() == {"a": 60}
    assert {"b": 60} in bench.iterate_times(2)


@pytest.mark.parametrize("policy", WHOLE)
def test_the_longest_prompt_is_taken_whole_though_its_length_is_no_multiple_of_a_tile(policy: str) -> None:
    """110 take three tiles of 50: a budget of 120 would be cut to 100."""
    bench = Bench(policy, budget=64, max_model_len=110, tile_tokens=50)
    bench.arrive("longest", 109, 1)
    assert bench.iterate() == {"longest": 109}


@pytest.mark.parametrize("policy", POLICIES)
def test_when_the_last_worker_has_gone_no_length_is_served_and_a_new_worker_is_measured(policy: str) -> None:
    planner = planner_of(policy)
    planner.submit(request("r"))
    planner.drop_worker(W)
    assert planner.state.length_served == 0
    planner.add_worker(WorkerView(W, BlockPool(10, 4), 24))
    assert planner.state.length_served == 24
    assert planner.next_step(W).tokens == 4


# -- results ------------------------------------------------------------------------------------------------------


def test_news_of_one_who_has_left_does_not_hide_the_end_of_those_behind_it() -> None:
    planner = planner_of()
    for name in "ab":
        planner.submit(request(name))
    assert [slice_.request for slice_ in planner.next_step(W).slices] == ["a", "b"]
    planner.end(RequestId("a"))
    ended = planner.settle(W, [Outcome(RequestId("a"), 1, ended=True), Outcome(RequestId("b"), 1, ended=True)])
    assert ended == ("b",)
    assert not planner.state.requests


def test_a_plan_that_only_releases_is_not_the_one_that_fed_somebody_last() -> None:
    planner = planner_of("chunked-only")
    planner.submit(request("a"))
    fed = planner.next_step(W)
    planner.end(RequestId("a"))
    assert planner.next_step(W).released == ("a",)
    assert planner.state.workers[W].previous is fed


def test_slices_in_flight_are_counted_until_their_results_are_read() -> None:
    planner = planner_of()
    one = request("a")
    planner.submit(one)
    counts = []
    for _ in range(3):
        planner.next_step(W)
        counts.append(one.slices_in_flight)
    for _ in range(3):
        planner.settle(W, [Outcome(one.id, 1, ended=False)])
        counts.append(one.slices_in_flight)
    assert counts == [1, 2, 3, 2, 1, 0]


# -- memory -------------------------------------------------------------------------------------------------------


def test_the_last_gives_way_itself_if_it_is_the_one_that_finds_no_block() -> None:
    """Four blocks of 4: a has 6 tokens in two, b 8 in two, and wants a third."""
    bench = Bench("sarathi", blocks=4, block=4)
    bench.arrive("a", 6, 9)
    bench.arrive("b", 8, 6)
    bench.iterate()
    assert bench.iterate() == {"a": 1}
    assert bench.steps[-1].preempted == ("b",)
    assert bench.waiting() == ["b"]


def test_the_first_waits_when_nobody_may_give_way_for_it() -> None:
    planner = planner_of(block=4)
    worker = planner.state.workers[W]
    one, protected = request("a", 4), request("b", 4, 4)
    protected.preemptions = 3
    planner.submit(one)
    planner.submit(protected)
    planner.next_step(W)
    hog = worker.pool.allocate(worker.pool.free)
    assert hog is not None
    step = planner.next_step(W)
    assert [slice_.request for slice_ in step.slices] == ["b"]
    assert (step.preempted, planner.state.preemptions) == ((), 0)
    worker.pool.release(hog)
    assert [slice_.request for slice_ in planner.next_step(W).slices] == ["a", "b"]


def test_preemptions_are_added_up() -> None:
    """Six blocks of 4, three requests of two, each of which wants a third at the same time."""
    bench = Bench("sarathi", blocks=6, block=4)
    for name in "abc":
        bench.arrive(name, 8, 9)
    bench.iterate_times(2)
    assert bench.steps[-1].preempted == ("c",)
    bench.run_dry()
    assert bench.planner.state.preemptions == sum(len(step.preempted) for step in bench.steps) > 1


@pytest.mark.parametrize(("preemptions", "fed"), [(2, {"a": 1, "r": 4}), (3, {"a": 1})])
def test_who_was_preempted_three_times_begins_only_with_all_that_it_may_need(
    preemptions: int, fed: dict[str, int]
) -> None:
    """Ten blocks of 4, of which a holds six: r needs one block now and five in the end."""
    bench = Bench("sarathi", blocks=10, block=4)
    bench.arrive("a", 22, 9)
    bench.iterate()
    bench.arrive("r", 4, 16).preemptions = preemptions
    assert bench.iterate() == fed


# -- several workers ----------------------------------------------------------------------------------------------


def test_a_worker_passes_over_who_is_too_long_for_it_or_resident_elsewhere() -> None:
    planner = planner_of()
    planner.add_worker(WorkerView(WorkerId("small"), BlockPool(5, 4), 1000))
    planner.submit(request("a long one", 30))
    elsewhere = request("b")
    planner.adopt(planner.state.workers[W], elsewhere)
    planner.submit(request("c"))
    assert [slice_.request for slice_ in planner.next_step(WorkerId("small")).slices] == ["c"]
    assert [slice_.request for slice_ in planner.next_step(W).slices] == ["a long one", "b"]


# -- take-over ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("computed", "is_possible"), [(3, False), (4, True), (7, True)])
def test_a_resident_that_would_write_into_what_others_may_read_is_not_taken_over(
    computed: int, *, is_possible: bool
) -> None:
    planner = planner_of()
    worker = planner.state.workers[W]
    (named,) = worker.pool.allocate(1) or ()
    worker.pool.name(named, worker.pool.stamp(named), BlockHash(b"n" * 16))
    resident = request("r", 8)
    resident.computed, resident.blocks = computed, [named, BlockId(1)]
    if is_possible:
        planner.adopt(worker, resident)
        assert worker.running == [resident]
    else:
        with pytest.raises(ValueError, match="would write"):
            planner.adopt(worker, resident)
        assert not planner.state.requests
