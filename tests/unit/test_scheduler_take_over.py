"""What a leader makes of the residents that workers tell it of."""

import pytest

from shared.ids import BlockId, EntryId, RequestId
from shared.protocol import names
from shared.protocol.codec import decode
from shared.protocol.messages import (
    ClaimWorker,
    PlanRefused,
    Resident,
    StepPlan,
    WorkerState,
)
from tests.unit.leader_desk import SIZE, W2, Desk, W, make_desk, submission


@pytest.fixture
def desk() -> Desk:
    return make_desk()


def test_after_a_refused_plan_the_worker_is_claimed_again_and_its_residents_go_on(desk: Desk) -> None:
    desk.claim()
    desk.submit(submission())
    plan = desk.must_plan()
    desk.answer(plan)
    desk.must_plan()
    desk.leader.hear(W, PlanRefused(plan.epoch, 2, 3), desk.now_s)
    desk.leader.hear(W, PlanRefused(plan.epoch, 2, 4), desk.now_s)
    (claim,) = desk.said(names.plans(W), ClaimWorker)
    assert not desk.leader.all_have_answered
    resident = Resident(submission(), EntryId("1-0"), (7,), 3, (BlockId(0),))
    desk.leader.hear(W, WorkerState(W, 2, claim.nonce, SIZE, (resident,)), desk.now_s)
    plan = desk.must_plan()
    assert (plan.epoch, plan.step, plan.new) == (2, 1, ())
    assert [(s.request, s.start, s.count) for s in plan.slices] == [("r", 3, 1)]


def test_a_new_leader_goes_on_with_residents_and_settles_their_submissions(desk: Desk) -> None:
    runs = Resident(submission("runs"), EntryId("1-0"), (7, 7), 4, (BlockId(2),))
    preempted = Resident(submission("preempted"), EntryId("2-0"), (7,), 0, (), preemptions=3)
    ended = Resident(submission("ended"), EntryId("3-0"), (7, 7, 7, 7), 0, (), "length")
    desk.claim(residents=(runs, preempted, ended))
    copies = [desk.submit(submission(name)) for name in ("runs", "preempted", "ended")]
    plan = desk.must_plan()
    assert plan.released == ("ended",)
    assert plan.new == ()
    assert {(s.request, s.start, s.count) for s in plan.slices} == {("runs", 4, 1), ("preempted", 0, 4)}
    assert desk.settled == copies
    assert desk.leader.planner.state.requests[RequestId("preempted")].is_protected


def test_a_resident_that_ends_before_its_submission_is_read_is_not_run_again(desk: Desk) -> None:
    runs = Resident(submission(max_tokens=3), EntryId("1-0"), (7, 7), 4, (BlockId(2),))
    desk.claim(residents=(runs,))
    desk.answer(desk.must_plan(), "length")
    desk.must_plan()  # releases it
    late = desk.submit(submission(max_tokens=3))
    assert desk.held().held == ()
    assert late in desk.settled


def test_of_two_workers_that_hold_the_same_attempt_one_is_told_to_forget_it(desk: Desk) -> None:
    resident = Resident(submission(), EntryId("1-0"), (7,), 3, (BlockId(0),))
    desk.claim(W, residents=(resident,))
    desk.claim(W2, residents=(resident,))
    desk.leader.make_plans(desk.now_s)
    write = desk.leader.outbox.take()
    assert write is not None
    plans = {one.stream: decode(one.data) for one in write.writes}
    first, second = plans[names.plans(W)], plans[names.plans(W2)]
    assert isinstance(first, StepPlan)
    assert isinstance(second, StepPlan)
    assert (first.released, second.released) == ((), ("r",))


@pytest.mark.parametrize("older_first", [True, False])
def test_of_two_attempts_on_two_workers_the_later_one_goes_on(desk: Desk, *, older_first: bool) -> None:
    older = Resident(submission(attempt=1, prompt=6, max_tokens=9), EntryId("1-0"), (), 4, (BlockId(0), BlockId(1)))
    later = Resident(submission(attempt=2, prompt=6, max_tokens=9), EntryId("1-0"), (9,), 6, (BlockId(0), BlockId(1)))
    for resident, worker in ((older, W), (later, W2)) if older_first else ((later, W2), (older, W)):
        desk.claim(worker, residents=(resident,))
    views = desk.leader.planner.state.workers
    assert (views[W].to_release, views[W2].to_release) == (["r"], [])
    assert desk.leader.planner.state.requests[RequestId("r")].attempt == 2


@pytest.mark.parametrize(
    ("computed", "table"), [(4, (BlockId(0),)), (5, (BlockId(0),)), (3, ()), (2, (BlockId(0), BlockId(0)))]
)
def test_a_resident_whose_table_cannot_be_is_told_to_go_and_nobody_else_is_harmed(
    desk: Desk, computed: int, table: tuple[BlockId, ...]
) -> None:
    bad = Resident(submission("bad", prompt=4), EntryId("1-0"), (), computed, table)
    good = Resident(submission("good"), EntryId("2-0"), (7,), 3, (BlockId(5),))
    desk.claim(residents=(bad, good))
    plan = desk.must_plan()
    assert plan.released == ("bad",)
    assert [slice_.request for slice_ in plan.slices] == ["good"]


def test_a_worker_that_answers_under_another_name_is_given_up(desk: Desk) -> None:
    desk.leader.claim(W, desk.now_s)
    (claim,) = desk.said(names.plans(W), ClaimWorker)
    desk.leader.hear(W, WorkerState(W2, 1, claim.nonce, SIZE), desk.now_s)
    assert desk.leader.commands == {}
    assert desk.leader.next_plan_at() is None
