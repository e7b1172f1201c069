"""Logprobs are the model's own: of its logits as they are, whatever the draw asked for."""

import math

import pytest
import torch

from services.worker.executor import Draw, Drawn, Outcome
from services.worker.sampling import draw_tokens
from shared.protocol.messages import Bias, Sampling


def rows_of(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def drawn(outcome: Outcome) -> Drawn:
    assert isinstance(outcome, Drawn), outcome
    return outcome


@pytest.mark.parametrize("vocabulary", [10, 5000, 49_152])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_the_drawn_token_and_the_likeliest_are_told_with_the_log_of_their_softmax(
    vocabulary: int, temperature: float
) -> None:
    rows = rows_of(6, vocabulary)
    draws = [
        Draw(Sampling(temperature=temperature, seed=index, top_p=0.9, logprobs=index), index) for index in range(6)
    ]
    expected = torch.log_softmax(rows.double(), dim=-1)
    for index, one in enumerate(map(drawn, draw_tokens(rows, draws))):
        assert one.logprobs.logprob == pytest.approx(expected[index, one.token_id].item(), abs=1e-5)
        values, ids = expected[index].sort(descending=True)
        assert [ranked.token_id for ranked in one.logprobs.top] == ids[:index].tolist()
        assert [ranked.logprob for ranked in one.logprobs.top] == pytest.approx(values[:index].tolist(), abs=1e-5)


def test_penalties_and_biases_change_what_is_drawn_and_not_its_logprob() -> None:
    rows = rows_of(1, 50)
    asked = Sampling(temperature=0.0, biases=(Bias(17, 100.0),), logprobs=1)
    one = drawn(draw_tokens(rows, [Draw(asked, 0)])[0])
    expected = torch.log_softmax(rows[0].double(), dim=-1)
    assert one.token_id == 17
    assert one.logprobs.logprob == pytest.approx(expected[17].item(), abs=1e-5)
    assert one.logprobs.top[0].token_id == int(expected.argmax())


def test_who_asks_for_logprobs_draws_the_same_token_and_who_does_not_gets_none() -> None:
    rows = rows_of(4, 3000)
    plain = [Draw(Sampling(seed=index), index) for index in range(4)]
    told = [Draw(Sampling(seed=index, logprobs=2), index) for index in range(4)]
    mixed = draw_tokens(rows, [*told[:2], *plain[2:]])
    tokens = draw_tokens(rows, plain)
    assert [drawn(one).token_id for one in mixed[:2]] == list(tokens[:2])
    assert mixed[2:] == tokens[2:]


def test_logprobs_of_a_row_are_the_same_alone_and_among_others() -> None:
    rows = rows_of(20, 49_152)
    draws = [Draw(Sampling(seed=index, logprobs=index), index) for index in range(20)]
    together = draw_tokens(rows, draws)
    assert together == tuple(draw_tokens(rows[i : i + 1], [draw])[0] for i, draw in enumerate(draws))


def test_equal_logits_are_told_in_the_order_of_their_ids() -> None:
    one = drawn(draw_tokens(torch.zeros(1, 6400), [Draw(Sampling(temperature=0.0, logprobs=3), 0)])[0])
    assert [ranked.token_id for ranked in one.logprobs.top] == [0, 1, 2]
    assert one.logprobs.logprob == pytest.approx(-math.log(6400))


def test_a_token_that_can_never_be_drawn_is_not_told() -> None:
    row = torch.full((1, 10), -torch.inf)
    row[0, 4] = row[0, 6] = 0.0
    one = drawn(draw_tokens(row, [Draw(Sampling(temperature=0.0, logprobs=5), 0)])[0])
    assert [ranked.token_id for ranked in one.logprobs.top] == [4, 6]
    assert [ranked.logprob for ranked in one.logprobs.top] == pytest.approx([-math.log(2)] * 2)
