"""The worker's ledger: epochs and steps, who ends when, and plans that cannot be."""

import pytest

from services.worker.executor import DrawFailed, Drawn, Scored, Scores
from services.worker.residents import Accepted, Refused, Repeated
from shared.ids import GatewayId, RequestId
from shared.protocol.messages import (
    Bias,
    Logprobs,
    PlanRefused,
    Ranked,
    ResultRow,
    Sampling,
    StepPlan,
    TokenBatch,
    TokenRow,
)
from tests.unit.worker_plans import EOS, WORKER, claimed, ledger, new, piece, run, submit


def test_nothing_is_executed_before_the_first_claim() -> None:
    refused = ledger().accept(StepPlan(epoch=0, step=1))
    assert isinstance(refused, Repeated | Refused)
    refused = ledger().accept(StepPlan(epoch=1, step=1))
    assert isinstance(refused, Refused)


def test_each_claim_raises_the_epoch_and_repeats_the_nonce() -> None:
    made = ledger()
    first, second = made.claim("a"), made.claim("b")
    assert (first.epoch, first.nonce, second.epoch, second.nonce) == (1, "a", 2, "b")


def test_a_claim_that_comes_twice_is_answered_twice_and_changes_nothing() -> None:
    made = ledger()
    made.claim("a")
    run(made, StepPlan(1, 1))
    assert made.claim("a").epoch == 1
    assert isinstance(made.accept(StepPlan(1, 2)), Accepted)


def test_a_prompt_in_one_slice_draws_and_tokens_go_to_its_gateway() -> None:
    made = claimed()
    plan = StepPlan(1, 1, new=(new(submit(), 5),), slices=(piece("r", 0, 3),))
    accepted, rows, batches = run(made, plan, 42)
    (row,) = accepted.batch
    assert (row.token_ids, row.start, row.table) == ((1, 2, 3), 0, (5,))
    assert row.draw is not None
    assert row.draw.position == 3
    assert rows == (ResultRow(RequestId("r"), 0, (42,)),)
    assert batches == [TokenBatch(WORKER, (TokenRow(RequestId("r"), 0, 0, (42,)),))]


def test_a_token_sampled_in_step_n_is_what_step_n_plus_1_feeds() -> None:
    made = claimed()
    run(made, StepPlan(1, 1, new=(new(submit(), 0),), slices=(piece("r", 0, 3),)), 42)
    accepted, _, batches = run(made, StepPlan(1, 2, slices=(piece("r", 3, 1),)), 43)
    assert accepted.batch[0].token_ids == (42,)
    assert batches[0].rows[0].first_index == 1


def test_a_chunk_that_does_not_reach_the_end_draws_nothing() -> None:
    made = claimed()
    accepted, rows, batches = run(made, StepPlan(1, 1, new=(new(submit(), 0),), slices=(piece("r", 0, 2),)))
    assert accepted.batch[0].draw is None
    assert rows == (ResultRow(RequestId("r"), 0),)
    assert batches == []


def test_slices_extend_their_table_before_they_are_fed() -> None:
    made = claimed()
    plan = StepPlan(1, 1, new=(new(submit(prompt=(1, 2, 3, 4, 5)), 7),), slices=(piece("r", 0, 5, 2),))
    accepted, _, _ = run(made, plan, 42)
    assert accepted.batch[0].table == (7, 2)


def test_an_end_of_turn_token_ends_the_request_in_that_very_step() -> None:
    made = claimed()
    _, rows, batches = run(made, StepPlan(1, 1, new=(new(submit(), 0),), slices=(piece("r", 0, 3),)), EOS)
    assert rows[0].finish == "stop"
    assert batches[0].rows[0] == TokenRow(RequestId("r"), 0, 0, (EOS,), "stop")


def test_ignore_eos_lets_it_go_on() -> None:
    made = claimed()
    plan = StepPlan(1, 1, new=(new(submit(ignore_eos=True), 0),), slices=(piece("r", 0, 3),))
    assert run(made, plan, EOS)[1][0].finish is None


def test_max_tokens_counts_the_tokens_of_earlier_attempts() -> None:
    made = claimed()
    request = submit(attempt=1, output_ids=(7, 8), max_tokens=3)
    _, rows, batches = run(made, StepPlan(1, 1, new=(new(request, 0, 1),), slices=(piece("r", 0, 5),)), 9)
    assert rows[0].finish == "length"
    assert batches[0].rows[0].first_index == 2


def test_the_model_s_own_length_ends_a_request() -> None:
    made = claimed(max_model_len=4)
    assert run(made, StepPlan(1, 1, new=(new(submit(), 0),), slices=(piece("r", 0, 3),)), 9)[1][0].finish == "length"


def test_a_request_that_ended_is_skipped_in_plans_that_still_name_it() -> None:
    made = claimed()
    run(made, StepPlan(1, 1, new=(new(submit(), 0),), slices=(piece("r", 0, 3),)), EOS)
    accepted, rows, batches = run(made, StepPlan(1, 2, slices=(piece("r", 3, 1, 4),)))
    assert accepted.batch == ()
    assert rows == (ResultRow(RequestId("r"), 0, skipped=True),)
    assert batches == []


def test_a_draw_that_failed_ends_that_request_alone() -> None:
    made = claimed()
    plan = StepPlan(1, 1, new=(new(submit("a"), 0), new(submit("b"), 1)), slices=(piece("a", 0, 3), piece("b", 0, 3)))
    _, rows, batches = run(made, plan, DrawFailed("logits"), 5)
    assert [row.finish for row in rows] == ["error", None]
    assert batches[0].rows[0] == TokenRow(RequestId("a"), 0, 0, (), "error")
    assert batches[0].rows[1].token_ids == (5,)


def test_token_ids_that_do_not_exist_fail_their_request_alone() -> None:
    made = claimed()
    bad = submit("bad", prompt=(1, 100))
    plan = StepPlan(1, 1, new=(new(bad, 0), new(submit("b"), 1)), slices=(piece("bad", 0, 1), piece("b", 0, 3)))
    accepted, rows, _ = run(made, plan, 5)
    assert [row.request for row in accepted.batch] == ["b"]
    assert [row.finish for row in rows] == ["error", None]
    assert run(made, StepPlan(1, 2, slices=(piece("bad", 1, 1),)))[1][0].skipped


def test_each_gateway_gets_one_batch() -> None:
    made = claimed()
    requests = [submit(name, gateway=GatewayId(gateway)) for name, gateway in (("a", "g"), ("b", "h"), ("c", "g"))]
    plan = StepPlan(
        1,
        1,
        new=tuple(new(request, block) for block, request in enumerate(requests)),
        slices=tuple(piece(request.request, 0, 3) for request in requests),
    )
    accepted = made.accept(plan)
    assert isinstance(accepted, Accepted)
    batches = made.token_batches(made.settle(accepted, (1, 2, 3)))
    assert {gateway: [row.request for row in batch.rows] for gateway, batch in batches.items()} == {
        "g": ["a", "c"],
        "h": ["b"],
    }


def test_a_preempted_request_keeps_its_tokens_and_starts_a_new_table() -> None:
    made = claimed()
    run(made, StepPlan(1, 1, new=(new(submit(), 0),), slices=(piece("r", 0, 3),)), 42)
    run(made, StepPlan(1, 2, preempted=(RequestId("r"),)))
    (resident,) = made.claim("n").residents
    assert (resident.computed, resident.table, resident.output_ids) == (0, (), (42,))
    assert resident.preemptions == 1
    accepted, _, _ = run(made, StepPlan(2, 1, slices=(piece("r", 0, 4, 6),)), 43)
    assert accepted.batch[0].token_ids == (1, 2, 3, 42)
    assert accepted.batch[0].table == (6,)


def test_a_preemption_of_one_that_has_just_ended_changes_nothing() -> None:
    made = claimed()
    run(made, StepPlan(1, 1, new=(new(submit(), 0),), slices=(piece("r", 0, 3),)), EOS)
    run(made, StepPlan(1, 2, preempted=(RequestId("r"),)))
    assert made.claim("n").residents[0].finish == "stop"


def test_a_snapshot_shows_residents_until_a_plan_releases_them() -> None:
    made = claimed()
    run(made, StepPlan(1, 1, new=(new(submit(), 3),), slices=(piece("r", 0, 3),)), 42)
    (resident,) = made.claim("n").residents
    assert (resident.computed, resident.table, resident.finish) == (3, (3,), None)
    run(made, StepPlan(2, 1, released=(RequestId("r"),)))
    assert made.claim("n").residents == ()


def test_a_higher_attempt_supersedes_a_lower_one() -> None:
    made = claimed()
    run(made, StepPlan(1, 1, new=(new(submit(), 0),), slices=(piece("r", 0, 3),)), 42)
    again = submit(attempt=1, output_ids=(42,))
    _, rows, _ = run(made, StepPlan(1, 2, new=(new(again, 1),), slices=(piece("r", 0, 4),)), 43)
    assert rows[0].attempt == 1


def test_a_repeat_is_dropped() -> None:
    made = claimed()
    run(made, StepPlan(1, 1))
    assert isinstance(made.accept(StepPlan(1, 1)), Repeated)
    assert isinstance(made.accept(StepPlan(1, 2)), Accepted)


def test_an_old_epoch_is_dropped() -> None:
    made = claimed()
    made.claim("other")
    assert isinstance(made.accept(StepPlan(1, 1)), Repeated)


def test_after_a_gap_nothing_is_executed_until_claimed_again() -> None:
    made = claimed()
    run(made, StepPlan(1, 1))
    refused = made.accept(StepPlan(1, 3))
    assert isinstance(refused, Refused)
    assert refused.answer == PlanRefused(epoch=1, expected=2, got=3)
    assert isinstance(made.accept(StepPlan(1, 2)), Refused)
    made.claim("again")
    assert isinstance(made.accept(StepPlan(2, 1)), Accepted)


CONTRADICTIONS = {
    "an unknown request": StepPlan(1, 2, slices=(piece("ghost", 0, 1),)),
    "an unknown victim": StepPlan(1, 2, preempted=(RequestId("ghost"),)),
    "a slice that does not continue": StepPlan(1, 2, slices=(piece("r", 2, 1),)),
    "an empty slice": StepPlan(1, 2, slices=(piece("r", 3, 0),)),
    "more tokens than are known": StepPlan(1, 2, slices=(piece("r", 3, 2, 1),)),
    "two slices for one request": StepPlan(1, 2, slices=(piece("r", 3, 1), piece("r", 3, 1))),
    "a block that does not exist": StepPlan(1, 2, slices=(piece("r", 3, 1, 8),)),
    "a negative block": StepPlan(1, 2, slices=(piece("r", 3, 1, -1),)),
    "a request known already": StepPlan(1, 2, new=(new(submit(), 1),)),
    "a table too short": StepPlan(1, 2, new=(new(submit("s", (1,) * 5), 1),), slices=(piece("s", 0, 5),)),
    "a start beyond its blocks": StepPlan(1, 2, new=(new(submit("s", (1,) * 9), 1, start=8),)),
    "a start at the end": StepPlan(1, 2, new=(new(submit("s"), 1, start=3),)),
    "a prompt longer than the model": StepPlan(1, 2, new=(new(submit("s", (1,) * 65), 1),)),
    "a slot written twice": StepPlan(
        1, 2, new=(new(submit("s", (1,) * 4), 0),), slices=(piece("r", 3, 1), piece("s", 0, 4))
    ),
    "a blockless newcomer": StepPlan(1, 2, new=(new(submit("s")),), slices=(piece("s", 0, 3),)),
}


@pytest.mark.parametrize("plan", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_a_plan_that_contradicts_the_ledger_is_refused_whole(plan: StepPlan) -> None:
    made = claimed()
    run(made, StepPlan(1, 1, new=(new(submit(), 0),), slices=(piece("r", 0, 3),)), 42)
    refused = made.accept(plan)
    assert isinstance(refused, Refused)
    assert refused.answer == PlanRefused(epoch=1, expected=2, got=2)
    (resident,) = made.claim("n").residents
    assert (resident.submit.request, resident.computed, resident.table, resident.output_ids) == ("r", 3, (0,), (42,))


def test_sampling_parameters_travel_to_the_draw() -> None:
    made = claimed()
    sampling = Sampling(temperature=0.5, seed=3)
    plan = StepPlan(1, 1, new=(new(submit(sampling=sampling), 0),), slices=(piece("r", 0, 3),))
    draw = run(made, plan, 1)[0].batch[0].draw
    assert draw is not None
    assert draw.sampling is sampling


def test_a_stop_token_ends_the_request_even_if_the_models_own_are_ignored() -> None:
    made = claimed()
    request = submit(ignore_eos=True, sampling=Sampling(stop_token_ids=(42,)))
    _, rows, _ = run(made, StepPlan(1, 1, new=(new(request, 0),), slices=(piece("r", 0, 3),)), 42)
    assert rows[0].finish == "stop"


def test_logprobs_go_to_the_gateway_with_their_token_and_never_to_the_leader() -> None:
    made = claimed()
    told = Logprobs(-0.5, (Ranked(7, -0.25),))
    _, rows, batches = run(made, StepPlan(1, 1, new=(new(submit(), 0),), slices=(piece("r", 0, 3),)), Drawn(EOS, told))
    assert batches[0].rows[0] == TokenRow(RequestId("r"), 0, 0, (EOS,), "stop", logprobs=(told,))
    assert rows == (ResultRow(RequestId("r"), 0, (EOS,), "stop"),)


def test_a_draw_knows_what_was_drawn_before_it_in_this_attempt_and_in_earlier_ones() -> None:
    made = claimed()
    request = submit(attempt=1, output_ids=(7, 7), sampling=Sampling(repetition_penalty=2.0, min_tokens=9))
    accepted, _, _ = run(made, StepPlan(1, 1, new=(new(request, 0, 1),), slices=(piece("r", 0, 5),)), 8)
    draw = accepted.batch[0].draw
    assert draw is not None
    assert draw.history is not None
    ids, counts = draw.history.seen()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {1: 0, 2: 0, 3: 0, 7: 2, 8: 1}
    assert draw.history.output_tokens == 3
    assert draw.history.ending_ids.tolist() == [EOS]
    again, _, _ = run(made, StepPlan(1, 2, slices=(piece("r", 5, 1),)), 8)
    assert again.batch[0].draw is not None
    assert again.batch[0].draw.history is draw.history


def test_a_bias_on_a_token_that_the_model_does_not_have_ends_that_request_alone() -> None:
    made = claimed()
    bad = submit("bad", sampling=Sampling(biases=(Bias(100, 1.0),)))
    plan = StepPlan(1, 1, new=(new(bad, 0), new(submit(), 1)), slices=(piece("bad", 0, 3), piece("r", 0, 3)))
    _, rows, _ = run(made, plan, 5)
    assert [row.finish for row in rows] == ["error", None]


def test_a_prompt_in_slices_is_told_of_from_each_and_no_more_once_there_is_a_token() -> None:
    made = claimed()
    asked = submit(prompt=(1, 2, 3, 4, 5), sampling=Sampling(prompt_logprobs=2))
    told = [Logprobs(-float(place)) for place in range(5)]
    plan = StepPlan(1, 1, new=(new(asked, 0, 1),), slices=(piece("r", 0, 2),))
    accepted, rows, batches = run(made, plan, Scored((told[1], told[2])))
    assert accepted.batch[0].scores == Scores(1, (2, 3), 2)
    assert rows == (ResultRow(RequestId("r"), 0),)
    first = TokenRow(RequestId("r"), 0, 0, (), prompt_first=1, prompt_logprobs=(told[1], told[2]))
    assert batches == [TokenBatch(WORKER, (first,))]
    accepted, rows, batches = run(made, StepPlan(1, 2, slices=(piece("r", 2, 3),)), Scored((told[3], told[4]), 42))
    assert accepted.batch[0].scores == Scores(3, (4, 5), 2)
    assert rows == (ResultRow(RequestId("r"), 0, (42,)),)
    second = TokenRow(RequestId("r"), 0, 0, (42,), prompt_first=3, prompt_logprobs=(told[3], told[4]))
    assert batches == [TokenBatch(WORKER, (second,))]
    run(made, StepPlan(1, 3, preempted=(RequestId("r"),)))
    accepted, _, batches = run(made, StepPlan(1, 4, slices=(piece("r", 0, 6, 2, 3),)), 43)
    assert accepted.batch[0].scores is None
    assert batches == [TokenBatch(WORKER, (TokenRow(RequestId("r"), 0, 1, (43,)),))]


def test_a_prompt_that_cannot_be_told_of_ends_its_request_before_it_draws() -> None:
    made = claimed()
    asked = submit(prompt=(1, 2, 3), sampling=Sampling(prompt_logprobs=0))
    _, rows, batches = run(
        made, StepPlan(1, 1, new=(new(asked, 0),), slices=(piece("r", 0, 2),)), DrawFailed("not finite")
    )
    assert rows == (ResultRow(RequestId("r"), 0, (), "error"),)
    assert batches[0].rows[0].finish == "error"
    _, rows, _ = run(made, StepPlan(1, 2, slices=(piece("r", 2, 1),)))
    assert rows == (ResultRow(RequestId("r"), 0, skipped=True),)


def test_the_last_token_of_a_prompt_alone_tells_of_nothing() -> None:
    made = claimed()
    asked = submit(prompt=(1, 2, 3), sampling=Sampling(prompt_logprobs=0))
    run(made, StepPlan(1, 1, new=(new(asked, 0),), slices=(piece("r", 0, 2),)), Scored((Logprobs(-1), Logprobs(-2))))
    accepted, _, batches = run(made, StepPlan(1, 2, slices=(piece("r", 2, 1),)), 42)
    assert accepted.batch[0].scores is None
    assert batches == [TokenBatch(WORKER, (TokenRow(RequestId("r"), 0, 0, (42,)),))]
