"""The leader without I/O: what it publishes and settles after what it read."""

import pytest

from shared.ids import BlockId, EntryId, RequestId
from shared.protocol import names
from shared.protocol.messages import (
    ClaimWorker,
    HeldRequest,
    PlanRefused,
    RequestRefused,
    Resident,
    StepFailed,
    StepResult,
    WorkerSize,
    WorkerState,
)
from tests.unit.leader_desk import SIZE, W2, Desk, G, W, make_desk, submission


@pytest.fixture
def desk() -> Desk:
    return make_desk()


def test_nothing_is_planned_for_a_worker_before_it_has_answered_its_claim(desk: Desk) -> None:
    desk.leader.claim(W, desk.now_s)
    desk.submit(submission())
    desk.leader.hear(W, WorkerState(W, 1, "somebody else's nonce", SIZE), desk.now_s)
    assert not desk.leader.all_have_answered
    assert desk.leader.next_plan_at() is None


def test_a_new_request_travels_in_full_once_and_steps_count_from_1(desk: Desk) -> None:
    desk.claim(epoch=5)
    entry = desk.submit(submission())
    first = desk.must_plan()
    assert (first.epoch, first.step, first.new[0].submit, first.new[0].arrival) == (5, 1, submission(), entry)
    desk.answer(first)
    second = desk.must_plan()
    assert (second.step, second.new, [s.count for s in second.slices]) == (2, (), [1])


def test_a_submission_is_settled_when_a_result_first_names_it_not_when_it_is_planned(desk: Desk) -> None:
    desk.claim()
    entry = desk.submit(submission())
    plan = desk.must_plan()
    assert desk.settled == []
    desk.answer(plan)
    desk.must_plan()
    assert desk.settled == [entry]


def test_a_copy_and_an_older_attempt_are_settled_and_change_nothing(desk: Desk) -> None:
    desk.claim()
    desk.submit(submission(attempt=2))
    copies = [desk.submit(submission(attempt=2)), desk.submit(submission(attempt=1))]
    plan = desk.must_plan()
    assert [new.submit.attempt for new in plan.new] == [2]
    assert desk.settled == copies


def test_a_higher_attempt_supersedes_a_running_one_in_one_plan(desk: Desk) -> None:
    desk.claim()
    desk.submit(submission())
    desk.answer(desk.must_plan())
    desk.submit(submission(attempt=2))
    plan = desk.must_plan()
    assert plan.released == ("r",)
    assert [new.submit.attempt for new in plan.new] == [2]


def test_news_of_a_superseded_attempt_do_not_touch_the_present_one() -> None:
    desk = make_desk(depth=2)
    desk.claim()
    desk.submit(submission())
    old = desk.must_plan()
    entry = desk.submit(submission(attempt=2))
    desk.now_s += 1
    desk.must_plan()
    desk.answer(old, "stop", attempt=1)
    assert desk.held().held == (HeldRequest(RequestId("r"), 2),)
    assert entry not in desk.settled


def test_cancelling_a_waiting_request_settles_both_entries_at_once(desk: Desk) -> None:
    entries = [desk.submit(submission()), desk.cancel("r")]
    assert desk.held().held == ()
    assert desk.settled == entries


def test_cancelling_a_running_request_settles_the_cancellation_with_the_plan_that_tells_the_worker() -> None:
    desk = make_desk(depth=1)
    desk.claim()
    desk.submit(submission())
    plan = desk.must_plan()
    cancellation = desk.cancel("r")
    assert desk.plan() is None
    assert cancellation not in desk.settled
    desk.answer(plan)
    assert desk.must_plan().released == ("r",)
    assert cancellation in desk.settled


def test_cancelling_a_request_whose_last_step_is_published_is_settled_at_once() -> None:
    desk = make_desk(depth=2)
    desk.claim()
    desk.submit(submission(max_tokens=1))
    desk.must_plan()
    desk.now_s += 1
    assert desk.must_plan().released == ("r",)
    cancellation = desk.cancel("r")
    desk.held()
    assert cancellation in desk.settled


@pytest.mark.parametrize("attempt", [1, 7])
def test_cancelling_somebody_unknown_is_settled_at_once(desk: Desk, attempt: int) -> None:
    cancellation = desk.cancel("nobody", attempt)
    assert desk.plan() is None
    assert desk.settled == [cancellation]


def test_a_cancellation_of_an_older_attempt_leaves_the_present_one_alone(desk: Desk) -> None:
    desk.claim()
    desk.submit(submission(attempt=3))
    desk.cancel("r", attempt=2)
    assert desk.held().held == (HeldRequest(RequestId("r"), 3),)


def test_a_request_longer_than_any_worker_holds_is_refused_with_both_numbers(desk: Desk) -> None:
    desk.claim()
    entry = desk.submit(submission(prompt=30, max_tokens=3))
    (refused,) = desk.said(names.tokens(G), RequestRefused)
    assert (refused.code, refused.message) == ("too_long", "prompt and answer need 33 tokens, at most 32 are served")
    assert desk.settled == [entry]


def test_max_model_len_bounds_what_is_served() -> None:
    desk = make_desk(max_model_len=10)
    desk.claim()
    assert desk.held().report.length_served == 10


def test_who_waited_before_the_first_worker_came_is_refused_if_it_can_never_fit(desk: Desk) -> None:
    desk.submit(submission(prompt=30, max_tokens=3))
    desk.leader.claim(W, desk.now_s)
    (claim,) = desk.said(names.plans(W), ClaimWorker)
    desk.leader.hear(W, WorkerState(W, 1, claim.nonce, SIZE), desk.now_s)
    assert [refused.code for refused in desk.said(names.tokens(G), RequestRefused)] == ["too_long"]


def test_when_the_larger_worker_dies_who_is_too_long_for_the_other_is_refused(desk: Desk) -> None:
    desk.claim(W)
    desk.leader.claim(W2, desk.now_s)
    (claim,) = desk.said(names.plans(W2), ClaimWorker)
    small = WorkerSize(blocks=2, block_tokens=4, max_model_len=1000)
    desk.leader.hear(W2, WorkerState(W2, 1, claim.nonce, small), desk.now_s)
    entry = desk.submit(submission(prompt=20))
    desk.leader.lose_worker(W, "test")
    assert [refused.code for refused in desk.said(names.tokens(G), RequestRefused)] == ["too_long"]
    assert desk.settled == [entry]
    assert desk.leader.line.length_served == 8


def test_a_lost_worker_is_declared_dead_in_the_same_write_and_never_claimed_again(desk: Desk) -> None:
    desk.claim()
    desk.leader.lose_worker(W, "test")
    write = desk.leader.outbox.take()
    assert write is not None
    assert write.dead == (W,)
    assert desk.leader.given_up == {W}


def test_a_cancellation_whose_plan_was_refused_is_carried_by_the_next_one(desk: Desk) -> None:
    desk.claim()
    desk.submit(submission())
    plan = desk.must_plan()
    cancellation = desk.cancel("r")
    desk.leader.hear(W, PlanRefused(plan.epoch, 1, 1), desk.now_s)
    (claim,) = desk.said(names.plans(W), ClaimWorker)
    resident = Resident(submission(), EntryId("1-0"), (), 0, (BlockId(0),))
    desk.leader.hear(W, WorkerState(W, 2, claim.nonce, SIZE, (resident,)), desk.now_s)
    assert cancellation not in desk.settled
    plan = desk.must_plan()
    assert (plan.released, plan.slices) == (("r",), ())
    assert cancellation in desk.settled


def test_newcomers_go_to_the_least_busy_worker(desk: Desk) -> None:
    desk.claim(W)
    desk.submit(submission("first"))
    desk.must_plan(W)
    desk.claim(W2)
    desk.submit(submission("second"))
    assert [new.submit.request for new in desk.must_plan(W2).new] == ["second"]


def test_held_names_what_waits_what_runs_and_whose_last_result_is_unread() -> None:
    desk = make_desk(depth=2)
    desk.claim()
    desk.submit(submission("ends", max_tokens=1))
    plan = desk.must_plan()
    desk.now_s += 1
    assert desk.must_plan().released == ("ends",)
    desk.submit(submission("waits"))
    assert {row.request for row in desk.held().held} == {"ends", "waits"}
    desk.answer(plan, "length")
    assert {row.request for row in desk.held().held} == {"waits"}


def test_the_report_counts_blocks_and_requests(desk: Desk) -> None:
    desk.claim()
    desk.submit(submission("a", prompt=5))
    desk.must_plan()
    desk.submit(submission("b"))
    report = desk.held().report
    assert (report.workers, report.running, report.waiting) == (1, 1, 1)
    assert (report.blocks_used, report.blocks_total, report.length_served) == (2, 8, 32)


def test_requests_of_a_lost_worker_are_held_no_more_and_the_list_is_due_at_once(desk: Desk) -> None:
    desk.claim()
    entry = desk.submit(submission())
    desk.must_plan()
    desk.leader.lose_worker(W, "test")
    assert desk.leader.held_is_due
    assert desk.held().held == ()
    assert desk.settled == [entry]
    assert desk.leader.line.length_served == 32


def test_a_failed_step_loses_the_worker_under_that_id(desk: Desk) -> None:
    desk.claim()
    desk.submit(submission())
    plan = desk.must_plan()
    desk.leader.hear(W, StepFailed(plan.epoch, plan.step, "boom"), desk.now_s)
    assert desk.leader.commands == {}
    assert desk.held().held == ()


def test_a_result_that_comes_twice_or_from_an_older_epoch_is_ignored(desk: Desk) -> None:
    desk.claim()
    desk.submit(submission())
    plan = desk.must_plan()
    desk.answer(plan)
    second = desk.must_plan()
    desk.answer(plan)
    assert desk.plan() is None
    desk.leader.hear(W, StepResult(0, second.step, 0.01, ()), desk.now_s)
    assert desk.plan() is None


def test_everything_of_a_gateway_that_is_gone_ends(desk: Desk) -> None:
    desk.claim()
    desk.submit(submission("old"))
    noticed = desk.leader.line.known.noticed
    desk.submit(submission("new"))
    desk.leader.lose_gateways((), noticed)
    assert desk.held().held == ()


def test_a_gateway_noticed_only_after_the_look_around_is_not_lost(desk: Desk) -> None:
    noticed = desk.leader.line.known.noticed
    desk.submit(submission("new"))
    desk.leader.lose_gateways((), noticed)
    assert len(desk.held().held) == 1


def test_after_a_minute_without_a_worker_everybody_is_refused(desk: Desk) -> None:
    entry = desk.submit(submission())
    desk.leader.refuse_if_without_worker(desk.now_s)
    desk.leader.refuse_if_without_worker(desk.now_s + 59)
    assert desk.said(names.tokens(G), RequestRefused) == []
    desk.leader.refuse_if_without_worker(desk.now_s + 61)
    assert [refused.code for refused in desk.said(names.tokens(G), RequestRefused)] == ["no_worker"]
    assert desk.settled == [entry]


def test_a_claim_or_plan_unanswered_for_30_s_means_that_the_worker_is_dead(desk: Desk) -> None:
    desk.leader.claim(W2, desk.now_s)
    desk.claim(W)
    desk.submit(submission())
    desk.answer(desk.must_plan(W))
    desk.must_plan(W)
    assert desk.leader.overdue(desk.now_s + 29) == []
    assert set(desk.leader.overdue(desk.now_s + 31)) == {W, W2}


def test_a_worker_s_very_first_step_may_take_five_minutes(desk: Desk) -> None:
    desk.claim(W)
    desk.submit(submission())
    desk.must_plan(W)
    assert desk.leader.overdue(desk.now_s + 299) == []
    assert desk.leader.overdue(desk.now_s + 301) == [W]


def test_the_second_plan_is_made_shortly_before_the_running_step_is_expected_to_end() -> None:
    desk = make_desk(depth=2)
    desk.claim()
    desk.submit(submission("first", max_tokens=9))
    desk.answer(desk.must_plan())  # the step of three tokens took 10 ms
    desk.answer(desk.must_plan())  # the step of one token too
    desk.must_plan()
    due = desk.leader.next_plan_at()
    assert due == pytest.approx(desk.now_s + 0.010 - 0.005)
    assert desk.plan() is None
    desk.submit(submission("late"))
    desk.now_s += 0.006
    assert {slice_.request for slice_ in desk.must_plan().slices} == {"first", "late"}
    assert desk.leader.next_plan_at() is None


def test_a_plan_made_ahead_that_came_late_lets_the_next_one_be_made_sooner() -> None:
    desk = make_desk(depth=2)
    desk.claim()
    desk.submit(submission("first", max_tokens=9))
    desk.waited_s = 0.0
    for _ in range(2):
        desk.answer(desk.must_plan())  # nothing ran when they were made: they could not have come sooner
    running = desk.must_plan()
    assert desk.leader.next_plan_at() == pytest.approx(desk.now_s + 0.010 - 0.005)
    desk.now_s += 0.006
    behind = desk.must_plan()
    desk.answer(running)
    desk.answer(behind)
    desk.must_plan()
    assert desk.leader.next_plan_at() == pytest.approx(desk.now_s + 0.010 - 0.006)


def test_an_answer_longer_than_promised_counts_as_what_it_is(desk: Desk) -> None:
    desk.claim()
    made = submission(prompt=4, max_tokens=1)
    desk.submit(type(made)(made.request, 1, made.gateway, made.prompt_ids, 1, output_ids=tuple(range(40))))
    assert desk.said(names.tokens(G), RequestRefused)


def test_what_only_trims_results_waits_for_the_next_plan_and_goes_by_itself_once_it_is_due(desk: Desk) -> None:
    desk.claim()
    outbox = desk.leader.outbox
    outbox.applied(names.results(W), EntryId("7-0"))
    assert outbox.take(may_trim_only=False) is None
    desk.submit(submission())
    desk.leader.make_plans(desk.now_s)
    with_plan = outbox.take(may_trim_only=False)
    assert with_plan is not None
    assert [one.stream for one in with_plan.writes] == [names.plans(W)]
    assert with_plan.trims == {names.results(W): EntryId("7-0")}
    outbox.applied(names.results(W), EntryId("8-0"))
    alone = outbox.take()
    assert alone is not None
    assert (alone.writes, alone.trims) == ((), {names.results(W): EntryId("8-0")})
