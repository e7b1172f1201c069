"""Order ``priority`` takes places: seats and memory of the less urgent, by hand-computed numbers."""

import pytest

from shared.ids import BlockId, RequestId, WorkerId
from shared.paging.pool import BlockPool
from shared.scheduling.request import Request
from shared.scheduling.state import WorkerView
from tests.harness import Bench

TAKING = ["orca", "prefill-first", "hybrid-only", "sarathi"]


def running(policy: str, priorities: dict[str, int], *, seqs: int = 8, blocks: int = 1000, prompt: int = 4) -> Bench:
    """Everybody decodes; none has ended when the test begins."""
    bench = Bench(policy, seqs=seqs, order="priority", blocks=blocks, block=4, kv="paged")
    for name, priority in priorities.items():
        bench.arrive(name, prompt, 20, priority=priority)
    bench.iterate()
    assert bench.running() == sorted(priorities, key=lambda name: (priorities[name], name))
    return bench


@pytest.mark.parametrize("policy", TAKING)
def test_the_least_urgent_gives_its_seat_to_one_who_is_more_urgent_in_the_same_plan(policy: str) -> None:
    bench = running(policy, {"a": 1, "b": 2, "c": 2}, seqs=3)
    bench.arrive("urgent", 4, 9, priority=0)
    assert "urgent" in bench.iterate()
    assert bench.steps[-1].preempted == ("c",)
    assert bench.running() == ["urgent", "a", "b"]
    assert bench.waiting() == ["c"]


@pytest.mark.parametrize("policy", TAKING)
def test_no_inversion_at_max_num_seqs_whoever_comes(policy: str) -> None:
    bench = running(policy, {"a": 5, "b": 5}, seqs=2)
    for number, priority in enumerate((4, 3, 2, 1)):
        bench.arrive(f"p{priority}", 4, 50, priority=priority)
        bench.iterate_times(2)
        worst_running = max(request.priority for request in bench.worker.running)
        best_waiting = min(request.priority for request in bench.planner.state.line)
        assert worst_running <= best_waiting, f"after arrival {number}"
    assert bench.running() == ["p1", "p2"]


@pytest.mark.parametrize("policy", TAKING)
def test_nobody_gives_way_to_one_who_is_not_more_urgent(policy: str) -> None:
    bench = running(policy, {"a": 1, "b": 1}, seqs=2)
    bench.arrive("same", 4, 9, priority=1)
    bench.arrive("less", 4, 9, priority=2)
    bench.iterate_times(5)
    assert all(step.preempted == () for step in bench.steps)


def test_one_who_has_waited_long_is_not_displaced_by_a_step_of_priority() -> None:
    bench = Bench("sarathi", seqs=1, order="priority")
    bench.arrive("patient", 4, 50, priority=1, at_ms=0)
    bench.iterate()
    bench.arrive("urgent, late", 4, 9, priority=0, at_ms=30_001)
    bench.iterate_times(3)
    assert bench.running() == ["patient"]
    bench.arrive("more urgent, late", 4, 9, priority=-1, at_ms=30_002)
    bench.iterate()
    assert bench.running() == ["more urgent, late"]


def test_free_seats_and_memory_are_taken_first_and_nobody_gives_way() -> None:
    bench = running("sarathi", {"a": 5, "b": 5}, seqs=3)
    bench.arrive("urgent", 4, 9, priority=0)
    assert set(bench.iterate()) == {"a", "b", "urgent"}
    assert bench.steps[-1].preempted == ()


@pytest.mark.parametrize(("prompt", "victims"), [(28, ()), (32, ("c",)), (36, ("c", "b")), (39, ("c", "b", "a"))])
def test_each_block_beyond_the_free_ones_costs_one_victim_the_least_urgent_first(
    prompt: int, victims: tuple[str, ...]
) -> None:
    """Ten blocks of 4; three requests hold one each and need no second one in this step, so 7 are free."""
    bench = running("sarathi", {"a": 1, "b": 2, "c": 3}, blocks=10, prompt=1)
    bench.arrive("urgent", prompt, 1, priority=0)
    bench.plan()
    assert bench.steps[-1].preempted == victims
    assert "urgent" in bench.running()


def test_what_the_urgent_one_needs_is_kept_for_it_from_those_who_run() -> None:
    """Of 7 free blocks it needs 6. Three requests want a second block each in this very step: a has the one left, and b
    the one of c, which gives way.
    """
    bench = running("sarathi", {"a": 1, "b": 2, "c": 3}, blocks=10)
    bench.arrive("urgent", 24, 4, priority=0)
    assert bench.iterate() == {"a": 1, "b": 1, "urgent": 24}
    assert bench.steps[-1].preempted == ("c",)


def test_the_watermark_does_not_keep_out_one_for_whom_somebody_gave_way() -> None:
    """200 blocks of 1, of which two are to stay free: 188 and 2 fit when b's 10 have come to the 180 that are free.

    Then a takes one for its next token. The urgent one joins all the same, else b would have left for nothing.
    """
    bench = Bench("sarathi", order="priority", blocks=200, block=1)
    bench.arrive("a", 10, 20, priority=-1)
    bench.arrive("b", 10, 20, priority=5)
    bench.iterate()
    bench.arrive("urgent", 188, 2, priority=0)
    assert bench.iterate() == {"a": 1, "urgent": 188}
    assert bench.steps[-1].preempted == ("b",)


def test_nobody_gives_way_if_all_of_them_would_not_do() -> None:
    bench = running("sarathi", {"a": 0, "b": 5}, blocks=10, prompt=12)
    bench.arrive("urgent", 30, 4, priority=1)  # 8 blocks: b has 3, 4 are free, and a is more urgent
    bench.iterate_times(3)
    assert all(step.preempted == () for step in bench.steps)
    assert bench.waiting() == ["urgent"]


def test_who_has_been_preempted_three_times_gives_way_no_more() -> None:
    bench = Bench("sarathi", seqs=1, order="priority")
    victim = bench.arrive("victim", 4, 50, priority=9)
    for number in range(5):
        bench.iterate()
        bench.arrive(f"urgent{number}", 4, 2, priority=0)
        bench.iterate_times(3)
    assert victim.preemptions == 3
    assert bench.running() == ["victim"]
    assert bench.waiting() == ["urgent3", "urgent4"]


def test_blocks_that_two_victims_share_are_free_when_both_have_gone() -> None:
    """Eight blocks of 4: x and y share 3 and hold one more each, so 3 are free, and 8 are needed."""
    bench = Bench("sarathi", order="priority", blocks=8, block=4)
    for name in "xy":
        bench.arrive(name, [*range(12), ord(name)], 10, priority=5)
        bench.iterate()
    assert bench.worker.pool.used == 5
    bench.arrive("urgent", 31, 1, priority=0)
    bench.plan()
    assert bench.steps[-1].preempted == ("y", "x")
    assert bench.running() == ["urgent"]


def test_a_block_that_the_urgent_one_shares_with_a_victim_is_not_counted_as_freed_by_it() -> None:
    """Eight blocks of 4, none free. The urgent one finds three of the victim's four and needs two more; the victim
    would leave it one. So that would not do, and it stays.
    """
    bench = Bench("sarathi", order="priority", blocks=8, block=4)
    bench.arrive("first", 13, 3, priority=0)
    bench.arrive("victim", [*range(12), 1], 3, priority=5)
    bench.iterate()
    assert bench.worker.pool.free == 0
    bench.arrive("urgent", [*range(12), *range(50, 55)], 3, priority=1)
    bench.iterate()
    assert bench.steps[-1].preempted == ()
    assert bench.running() == ["first", "victim"]


@pytest.mark.parametrize("policy", ["orca", "hybrid-only"])
def test_whole_prompts_that_the_budget_cannot_take_beside_the_others_cost_nobody_a_place(policy: str) -> None:
    """A budget of 40 (the longest served), 3 seats: beside two decodes 38 tokens are left, and 39 are missing."""
    bench = Bench(policy, seqs=3, budget=16, order="priority", kv="paged", max_model_len=40, blocks=100)
    for name in "abc":
        bench.arrive(name, 4, 20, priority=5)
    bench.iterate()
    bench.arrive("urgent", 39, 1, priority=0)
    bench.iterate()
    assert not bench.steps[-1].preempted
    bench.arrive("more urgent", 38, 1, priority=-1)
    assert "more urgent" in bench.iterate()
    assert bench.steps[-1].preempted == ("c",)


def test_under_static_places_are_given_when_the_batch_has_ended_and_not_before() -> None:
    bench = Bench("static", seqs=1, order="priority")
    bench.arrive("less", 4, 5, priority=5)
    bench.iterate()
    bench.arrive("urgent", 4, 2, priority=0)
    assert bench.iterate_times(5) == [{"less": 1}] * 4 + [{"urgent": 4}]


def test_a_long_urgent_prompt_begins_in_the_plan_in_which_somebody_gave_way_for_it() -> None:
    """It comes before the less urgent prompt that is being prefilled; else the place would be another's by then."""
    bench = Bench("sarathi", seqs=4, budget=128, order="priority", long_prefill_tokens=64)
    for number in range(3):
        bench.arrive(f"V{number}", 16, 400, priority=9)
    bench.iterate_times(4)
    bench.arrive("L", 3000, 10, priority=1)
    bench.iterate()
    bench.arrive("H", 2000, 10, priority=0)
    for number in range(6):
        bench.arrive(f"X{number}", 20, 400, priority=9)
    assert bench.iterate() == {"V0": 1, "V1": 1, "H": 126}
    assert bench.steps[-1].preempted == ("V2",)
    bench.iterate_times(20)
    assert sum(len(step.preempted) for step in bench.steps) == 1


@pytest.mark.parametrize(
    ("prompt", "fed"),
    [
        (40, {"a": 1, "urgent": 8, "short": 3}),
        (9, {"a": 1, "urgent": 8, "short": 3}),
        (3, {"a": 1, "urgent": 3, "long": 8}),
    ],
)
def test_who_takes_a_place_takes_of_the_long_ones_share_only_if_it_is_long(prompt: int, fed: dict[str, int]) -> None:
    """Budget 12, cap 8; of the short prompt 6 tokens are missing."""
    bench = Bench("sarathi", seqs=4, budget=12, order="priority", long_prefill_tokens=8)
    bench.arrive("a", 4, 50, priority=1)
    bench.arrive("victim", 4, 50, priority=10)
    bench.iterate()
    bench.arrive("long", 70, 50, priority=9)
    bench.arrive("short", 8, 50, priority=9)
    assert bench.iterate() == {"a": 1, "victim": 1, "long": 8, "short": 2}
    bench.arrive("urgent", prompt, 9, priority=0)
    assert bench.iterate() == fed
    assert bench.steps[-1].preempted == ("victim",)


def test_those_who_go_on_keep_the_watermark_when_others_give_way() -> None:
    """200 blocks of 4, of which two are to stay free. With c's 10 there are 180: enough for 179, not for two more."""
    bench = Bench("sarathi", budget=1000, order="priority", blocks=200, block=4)
    for name, priority in (("a", -1), ("b", 5), ("c", 6)):
        bench.arrive(name, 37, 3, priority=priority)
    bench.iterate()
    assert bench.worker.pool.free == 170
    bench.arrive("urgent", 4 * 179, 2, priority=0)
    assert bench.iterate() == {"a": 1, "urgent": 4 * 179}
    assert bench.steps[-1].preempted == ("c", "b")


def test_when_all_give_way_nothing_need_stay_free() -> None:
    bench = Bench("sarathi", order="priority", blocks=200, block=1)
    bench.arrive("a", 10, 20, priority=5)
    bench.iterate()
    bench.arrive("urgent", 199, 1, priority=0)
    assert bench.iterate() == {"urgent": 199}
    assert bench.steps[-1].preempted == ("a",)


def test_one_who_is_invited_to_a_free_seat_leaves_the_others_to_those_behind_it() -> None:
    bench = running("sarathi", {"a": 5}, seqs=3)
    for name, priority in (("urgent", 0), ("next", 1), ("last", 2)):
        bench.arrive(name, 4, 9, priority=priority)
    assert bench.iterate() == {"a": 1, "urgent": 4, "next": 4}
    assert bench.steps[-1].preempted == ()


def test_one_who_came_earlier_takes_no_place_of_one_who_is_as_urgent() -> None:
    bench = Bench("sarathi", seqs=1, order="priority")
    bench.arrive("runs", 4, 9, priority=1, at_ms=1000)
    bench.iterate()
    bench.arrive("earlier", 4, 9, priority=1, at_ms=0)
    assert bench.iterate() == {"runs": 1}
    assert bench.steps[-1].preempted == ()


def test_what_the_urgent_one_has_found_is_kept_for_it_from_those_who_run() -> None:
    """Of 7 free blocks it needs 6, of which it finds 3. So a has the one left, and b the one of c, which gives way."""
    bench = Bench("sarathi", order="priority", blocks=10, block=4)
    bench.arrive("gone", [*range(12), 99], 1)
    bench.iterate()
    for name, priority in (("a", 1), ("b", 2), ("c", 3)):
        bench.arrive(name, 4, 20, priority=priority)
    bench.iterate()
    assert (bench.worker.pool.free, bench.worker.pool.cached) == (7, 3)
    bench.arrive("urgent", [*range(12), *range(50, 62)], 4, priority=0)
    assert bench.iterate() == {"a": 1, "b": 1, "urgent": 12}
    assert bench.steps[-1].preempted == ("c",)


@pytest.mark.parametrize(
    ("blocks", "held", "preempted"), [(4, 1, ()), (4, 2, ("b",)), (200, 195, ()), (200, 196, ("b",)), (3, 0, ("b",))]
)
def test_the_other_worker_must_have_the_memory_and_leave_its_watermark(
    blocks: int, held: int, preempted: tuple[str, ...]
) -> None:
    """Blocks of 4, and the urgent one needs 3 at once and 4 in the end. Of 200 blocks two are to stay free."""
    bench = running("sarathi", {"a": 1, "b": 2}, seqs=2)
    view = WorkerView(WorkerId("w2"), BlockPool(blocks, 4), 10_000)
    bench.planner.add_worker(view)
    if held:
        resident = Request(RequestId("other"), 1, (0, 9), 4 * held, 9, priority=1, output_tokens=1)
        resident.blocks, resident.computed = [BlockId(block) for block in range(held)], 4 * held
        bench.planner.adopt(view, resident)
    bench.arrive("urgent", 12, 4, priority=0)
    assert bench.planner.next_step(bench.worker.id).preempted == preempted


def test_one_who_is_resident_here_cannot_go_elsewhere() -> None:
    bench = running("sarathi", {"a": 1, "b": 2}, seqs=2)
    second_worker(bench, 0)
    bench.arrive("urgent", 4, 9, priority=0).worker = bench.worker.id
    assert bench.planner.next_step(bench.worker.id).preempted == ("b",)


def second_worker(bench: Bench, running: int) -> WorkerView:
    """Another worker beside the bench's own, with so many who run there."""
    view = WorkerView(WorkerId("w2"), BlockPool(100, 4), 10_000)
    bench.planner.add_worker(view)
    for number in range(running):
        resident = Request(RequestId(f"other {number}"), 1, (number, 0), 4, 20, priority=1, output_tokens=1)
        resident.blocks, resident.computed = [BlockId(number)], 4
        bench.planner.adopt(view, resident)
    return view


@pytest.mark.parametrize(("elsewhere", "preempted"), [(1, ()), (2, ("b",))])
def test_nobody_gives_way_while_another_worker_has_a_place(elsewhere: int, preempted: tuple[str, ...]) -> None:
    bench = running("sarathi", {"a": 1, "b": 2}, seqs=2)
    second_worker(bench, elsewhere)
    bench.arrive("urgent", 4, 9, priority=0)
    assert bench.planner.next_step(bench.worker.id).preempted == preempted


def test_after_a_take_over_of_more_than_there_are_seats_all_that_must_go_go_at_once() -> None:
    bench = Bench("sarathi", seqs=4, order="priority")
    view = second_worker(bench, 8)
    bench.planner.submit(Request(RequestId("urgent"), 1, (99, 0), 16, 50))
    bench.planner.drop_worker(bench.worker.id)
    step = bench.planner.next_step(view.id)
    assert [admission.request for admission in step.admitted] == ["urgent"]
    assert step.preempted == ("other 7", "other 6", "other 5", "other 4", "other 3")
