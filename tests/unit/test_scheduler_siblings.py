"""Several answers to one prompt: the first computes it, the others wait for that and find it."""

from msgspec.structs import replace

from shared.ids import EntryId, RequestId
from shared.paging.reservation import KV_MANAGERS
from shared.protocol.messages import Resident, ResultRow, StepPlan, StepResult, SubmitRequest
from shared.scheduling.limits import Limits
from tests.unit.leader_desk import W2, Desk, W, make_desk, submission

PROMPT = 9  # two full blocks of four, and one token


def sibling(name: str, *, prompt: int = PROMPT, attempt: int = 1) -> SubmitRequest:
    first = RequestId("" if name == "r/0" else "r/0")
    return replace(submission(name, prompt=prompt, attempt=attempt, max_tokens=2), shares_with=first)


def desk_with(*names: str, prompt: int = PROMPT, shares_prefixes: bool = True) -> Desk:
    desk = make_desk(shares_prefixes=shares_prefixes)
    desk.claim()
    for name in names:
        desk.submit(sibling(name, prompt=prompt))
    return desk


def answer(desk: Desk, plan: StepPlan, *, drawn: bool = True) -> None:
    rows = tuple(ResultRow(slice_.request, 1, (50,) if drawn else ()) for slice_ in plan.slices)
    desk.leader.hear(W, StepResult(plan.epoch, plan.step, 0.01, rows), desk.now_s)


def starts(plan: StepPlan) -> dict[str, int]:
    return {str(new.submit.request): new.start for new in plan.new}


def test_siblings_wait_until_the_first_one_s_prompt_is_computed_and_then_find_it() -> None:
    desk = desk_with("r/0", "r/1", "r/2")
    plan = desk.must_plan()
    assert starts(plan) == {"r/0": 0}
    answer(desk, plan)
    plan = desk.must_plan()
    assert starts(plan) == {"r/1": 8, "r/2": 8}
    assert [(s.request, s.count) for s in plan.slices] == [("r/0", 1), ("r/1", 1), ("r/2", 1)]


def test_who_came_later_does_not_wait_for_them() -> None:
    desk = desk_with("r/0", "r/1")
    desk.submit(submission("other"))
    assert starts(desk.must_plan()) == {"r/0": 0, "other": 0}


def test_a_part_of_the_prompt_is_not_enough() -> None:
    desk = desk_with("r/0", "r/1")
    desk.leader.planner.limits_of_a_step = Limits(8, 8)
    plan = desk.must_plan()
    assert [(s.request, s.count) for s in plan.slices] == [("r/0", 8)]
    answer(desk, plan, drawn=False)
    plan = desk.must_plan()
    assert [(s.request, s.count) for s in plan.slices] == [("r/0", 1)]
    answer(desk, plan)
    assert starts(desk.must_plan()) == {"r/1": 8}


def test_under_reserve_and_without_a_prefix_cache_nothing_is_shared_and_nobody_waits() -> None:
    desk = desk_with("r/0", "r/1", shares_prefixes=False)
    assert starts(desk.must_plan()) == {"r/0": 0, "r/1": 0}
    desk = make_desk()
    desk.leader.planner.kv = KV_MANAGERS["reserve"]
    desk.claim()
    for name in ("r/0", "r/1"):
        desk.submit(sibling(name, prompt=5))
    assert starts(desk.must_plan()) == {"r/0": 0, "r/1": 0}


def test_a_prompt_without_a_full_block_to_share_is_not_waited_for() -> None:
    assert starts(desk_with("r/0", "r/1", prompt=4).must_plan()) == {"r/0": 0, "r/1": 0}
    assert starts(desk_with("r/0", "r/1", prompt=5).must_plan()) == {"r/0": 0}


def test_a_first_one_that_is_cancelled_is_waited_for_no_longer() -> None:
    desk = desk_with("r/0", "r/1", "r/2")
    desk.cancel("r/0")
    assert set(starts(desk.must_plan())) == {"r/1", "r/2"}


def test_a_first_one_that_ended_is_waited_for_no_longer_and_its_blocks_are_found() -> None:
    desk = desk_with("r/0", "r/1")
    plan = desk.must_plan()
    rows = (ResultRow(RequestId("r/0"), 1, (50,), "stop"),)
    desk.leader.hear(W, StepResult(plan.epoch, plan.step, 0.01, rows), desk.now_s)
    assert starts(desk.must_plan()) == {"r/1": 8}


def test_a_first_one_that_is_unknown_is_not_waited_for() -> None:
    assert starts(desk_with("r/1").must_plan()) == {"r/1": 0}


def test_a_new_leader_knows_from_the_worker_that_the_prompt_has_been_computed() -> None:
    for computed, waits in ((8, True), (PROMPT, False)):
        desk = make_desk()
        table = tuple(range(3))
        output = (50,) if computed == PROMPT else ()
        desk.claim(residents=(Resident(sibling("r/0"), EntryId("1-0"), output, computed, table),))  # type: ignore[arg-type] # ids of blocks
        desk.submit(sibling("r/1"))
        assert ("r/1" in starts(desk.must_plan())) is not waits


def test_what_another_worker_computes_is_not_waited_for() -> None:
    desk = desk_with("r/0")
    desk.must_plan()
    desk.claim(W2)
    desk.submit(sibling("r/1"))
    assert starts(desk.must_plan(W2)) == {"r/1": 0}
