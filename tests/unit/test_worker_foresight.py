"""The next plan, told while the step before it draws: what can be told, what cannot, and that nothing is entered."""

from dataclasses import replace

from services.worker.executor import DrawFailed, Outcome, Row, known_ids
from services.worker.fake_executor import FakeExecutor
from services.worker.foresight import came_true, drawing_of
from services.worker.residents import Accepted, Ledger
from shared.ids import BlockId, RequestId
from shared.protocol.messages import ResultRow, Sampling, Slice, StepPlan
from shared.scheduling.limits import Limits
from tests.conductor import Conductor
from tests.unit.worker_plans import EOS, claimed, new, piece, submit


def drawing(on: Ledger, *names: str, prompt: int = 3, **fields: object) -> Accepted:
    """Bring requests in whose prompts all draw in the first step, which runs when this returns."""
    ids = tuple(range(1, prompt + 1))
    brought = tuple(new(submit(name, ids, **fields), 2 * at, 2 * at + 1) for at, name in enumerate(names))
    accepted = on.accept(StepPlan(1, 1, new=brought, slices=tuple(piece(name, 0, prompt) for name in names)))
    assert isinstance(accepted, Accepted)
    return accepted


def foreseen(on: Ledger, running: Accepted, *slices: Slice, **fields: object) -> tuple[Row, ...] | None:
    plan = StepPlan(1, 2, slices=slices, **fields)  # type: ignore[arg-type] # fields by name
    return on.foresee(plan, drawing_of(running.batch))


def in_turn(on: Ledger, running: Accepted, outcomes: tuple[Outcome, ...], *slices: Slice) -> tuple[Row, ...]:
    on.settle(running, outcomes)
    accepted = on.accept(StepPlan(1, 2, slices=slices))
    assert isinstance(accepted, Accepted), accepted
    return accepted.batch


def test_a_decode_awaits_its_place_among_the_outcomes_and_is_then_what_the_ledger_accepts() -> None:
    on = claimed()
    running = drawing(on, "a", "b")
    slices = (piece("b", 3, 1), piece("a", 3, 1))
    ahead = foreseen(on, running, *slices)
    assert ahead is not None
    assert [(row.request, row.awaits, row.token_ids) for row in ahead] == [("b", 1, (0,)), ("a", 0, (0,))]
    batch = in_turn(on, running, (42, 43), *slices)
    assert tuple(known_ids(row, (42, 43)) for row in ahead) == tuple(row.token_ids for row in batch)
    assert came_true(ahead, (42, 43), batch)


def test_a_request_that_ends_meanwhile_is_computed_in_vain() -> None:
    on = claimed()
    running = drawing(on, "a", "b")
    slices = (piece("a", 3, 1), piece("b", 3, 1))
    ahead = foreseen(on, running, *slices)
    assert ahead is not None
    for outcomes in ((EOS, 43), (DrawFailed("why"), 43)):
        assert known_ids(ahead[1], outcomes) == (43,)
    batch = in_turn(on, running, (EOS, 43), *slices)
    assert [row.request for row in batch] == ["b"]
    assert came_true(ahead, (EOS, 43), batch)


def test_a_row_that_failed_feeds_something_that_exists() -> None:
    assert known_ids(Row(RequestId("r"), 3, (0,), (BlockId(0),), None, 0), (DrawFailed("why"),)) == (0,)


def test_chunks_and_newcomers_are_told_as_they_are() -> None:
    on = claimed()
    running = on.accept(StepPlan(1, 1, new=(new(submit("a", (1, 2, 3, 4)), 0),), slices=(piece("a", 0, 2),)))
    assert isinstance(running, Accepted)
    plan = StepPlan(1, 2, new=(new(submit("b"), 1),), slices=(piece("a", 2, 2), piece("b", 0, 3)))
    ahead = on.foresee(plan, drawing_of(running.batch))
    on.settle(running, ())
    accepted = on.accept(plan)
    assert isinstance(accepted, Accepted)
    assert ahead == accepted.batch
    assert came_true(ahead, (), accepted.batch)
    assert not came_true(ahead, (), tuple(replace(row, draw=None) for row in accepted.batch))


def test_a_newcomer_whose_draw_has_a_history_comes_true_with_one_of_its_own() -> None:
    on = claimed()
    running = drawing(on, "a")
    request = submit("b", sampling=Sampling(frequency_penalty=1.0))
    plan = StepPlan(1, 2, new=(new(request, 5),), slices=(piece("b", 0, 3),))
    ahead = on.foresee(plan, drawing_of(running.batch))
    assert ahead is not None
    on.settle(running, (42,))
    accepted = on.accept(plan)
    assert isinstance(accepted, Accepted)
    assert came_true(ahead, (42,), accepted.batch)


def test_nothing_is_entered() -> None:
    on, other = claimed(), claimed()
    running, same = drawing(on, "a", "b", prompt=4), drawing(other, "a", "b", prompt=4)
    plan = StepPlan(
        1,
        2,
        new=(new(submit("c"), 6),),
        slices=(piece("b", 4, 1), piece("c", 0, 3)),
        released=(RequestId("a"),),
    )
    assert on.foresee(plan, drawing_of(running.batch)) is not None
    assert on.settle(running, (42, 43)) == other.settle(same, (42, 43))
    assert on.claim("again") == other.claim("again")


def test_a_request_that_is_released_while_it_draws_is_told_to_its_gateway_all_the_same() -> None:
    on = claimed()
    running = drawing(on, "a", "b")
    ahead = foreseen(on, running, piece("b", 3, 1), released=(RequestId("a"),))
    assert ahead is not None
    assert [(row.request, row.awaits) for row in ahead] == [("b", 1)]
    settled = on.settle(running, (42, 43))
    assert settled.rows[0] == ResultRow(RequestId("a"), 0, (42,))


def test_a_plan_out_of_turn_is_not_foreseen() -> None:
    on = claimed()
    running = drawing(on, "a")
    for epoch, step in ((1, 1), (1, 3), (2, 1), (0, 2)):
        plan = StepPlan(epoch, step, slices=(piece("a", 3, 1),))
        assert on.foresee(plan, drawing_of(running.batch)) is None


def test_what_cannot_be_told_yet_waits_for_its_turn() -> None:
    on = claimed()
    running = drawing(on, "a", prompt=8)
    a = RequestId("a")
    cases: dict[str, tuple[tuple[Slice, ...], dict[str, object]]] = {
        "more than the token drawn": ((piece("a", 8, 2, 6),), {}),
        "not where it goes on": ((piece("a", 7, 1, 6),), {}),
        "no place in its table": ((piece("a", 8, 1),), {}),
        "another's block": ((piece("a", 8, 1, 0),), {}),
        "preempted and fed": ((piece("a", 0, 8, 6, 7),), {"preempted": (a,)}),
        "two slices": ((piece("a", 8, 1, 6), piece("a", 9, 1)), {}),
        "unknown": ((piece("x", 0, 1),), {}),
    }
    for why, (slices, fields) in cases.items():
        assert foreseen(on, running, *slices, **fields) is None, why
    assert foreseen(on, running, piece("a", 8, 1, 6)) is not None


def test_a_draw_that_depends_on_the_token_waits_for_its_turn() -> None:
    on = claimed()
    running = drawing(on, "a", sampling=Sampling(presence_penalty=1.0))
    assert foreseen(on, running, piece("a", 3, 1)) is None


def test_the_longest_text_is_never_exceeded() -> None:
    on = claimed(max_model_len=3)
    running = drawing(on, "a")
    assert foreseen(on, running, piece("a", 3, 1)) is None


def test_nearly_every_step_behind_another_is_foreseen() -> None:
    conductor = Conductor(FakeExecutor(64), (), Limits(32, 8), depth=2)
    for name in "abcdef":
        conductor.submit(name, tuple(name.encode()) * 20, 40)
    conductor.run_dry()
    assert conductor.foreseen > 40


def test_another_batch_did_not_come_true() -> None:
    on = claimed()
    running = drawing(on, "a", "b")
    ahead = foreseen(on, running, piece("a", 3, 1))
    assert ahead is not None
    batch = in_turn(on, running, (42, 43), piece("a", 3, 1), piece("b", 3, 1))
    assert not came_true(ahead, (42, 43), batch), "a row that was not foreseen"
    assert not came_true(ahead, (41, 43), batch[:1]), "another token"
    assert came_true(ahead, (42, 43), batch[:1])
