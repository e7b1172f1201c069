"""What is drawn is what a simple implementation draws, whatever is asked for, and never depends on the others."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.executor import Draw, DrawFailed
from services.worker.history import History, history_of
from services.worker.sampling import draw_tokens
from services.worker.sampling_uniforms import uniforms
from shared.ids import GatewayId, RequestId
from shared.protocol.messages import Bias, Sampling, SubmitRequest

EOS = 3
VOCABULARY = 49_152
"""The default model's: rows are looked at in chunks, which a short row has only one of."""


def reference_logits(row: npt.NDArray[np.float32], draw: Draw, prompt: Sequence[int], output: Sequence[int]) -> Any:
    """Bans, biases and penalties, token by token."""
    asked, logits = draw.sampling, row.astype(np.float32).copy()
    if len(output) < asked.min_tokens:
        for token in {EOS, *asked.stop_token_ids}:
            logits[token] = -np.inf
    for bias in asked.biases:
        logits[bias.token_id] += np.float32(bias.bias)
    for token in {*prompt, *output}:
        if asked.repetition_penalty != 1:
            penalty = np.float32(asked.repetition_penalty)
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= np.float32(asked.frequency_penalty) * np.float32(output.count(token))
        logits[token] -= np.float32(asked.presence_penalty)
    return logits


def reference(logits: npt.NDArray[np.float32], draw: Draw) -> int:
    """All tokens in double precision, sorted; min-p, then top-k, then top-p; the inverse over ids in order."""
    asked = draw.sampling
    if asked.temperature == 0:
        return int(np.argmax(logits))
    weights = np.exp((logits.astype(np.float64) - logits.max()) / asked.temperature)
    weights[weights < asked.min_p] = 0
    order = np.argsort(-logits, kind="stable")
    if asked.top_k > 0:
        weights[order[asked.top_k :]] = 0
    if asked.top_p < 1:
        before, total = 0.0, weights.sum()
        for rank, token in enumerate(order):
            if rank and before >= asked.top_p * total:
                weights[order[rank:]] = 0
                break
            before += weights[token]
    cumulative = weights.cumsum()
    (number,) = uniforms([asked.seed], [draw.position])
    return int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))


def rows_of(rows: int, vocabulary: int, spread: float, seed: int) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def draw_of(asked: Sampling, prompt: Sequence[int], output: list[int], position: int) -> Draw:
    submit = SubmitRequest(RequestId("r"), 1, GatewayId("g"), tuple(prompt), 99, asked)
    return Draw(asked, position, history_of(submit, output, {EOS}))


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.9]),
    top_p=st.sampled_from([1.0, 1.0, 0.99, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 0, 1, 5, 40, 200, 10_000, 10**6]),
    seed=st.integers(-(2**63), 2**63 - 1),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.05, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5]),
    min_tokens=st.sampled_from([0, 0, 3, 100]),
    biases=st.sampled_from([(), (), (Bias(0, 100.0),), (Bias(5, -100.0), Bias(7, 3.5))]),
    stop_token_ids=st.sampled_from([(), (0, 1)]),
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(SAMPLINGS, min_size=1, max_size=6),
    st.sampled_from([0.5, 2.0, 4.0]),
    st.sampled_from([40, 64, 1000, 5120, VOCABULARY]),
    st.integers(0, 10_000),
)
def test_every_row_draws_what_the_reference_draws(
    samplings: list[Sampling], spread: float, vocabulary: int, seed: int
) -> None:
    rows = rows_of(len(samplings), vocabulary, spread, seed)
    numbers = np.random.default_rng(seed)
    draws, expected = [], []
    for index, asked in enumerate(samplings):
        prompt = numbers.integers(vocabulary, size=5).tolist()
        output = numbers.integers(12, size=seed % 7).tolist()
        draws.append(draw_of(asked, prompt, output, seed + index))
        expected.append(reference(reference_logits(rows[index].numpy(), draws[-1], prompt, output), draws[-1]))
    before = rows.clone()
    assert draw_tokens(rows, draws) == tuple(expected)
    assert rows.equal(before), "the logits belong to the model"


@settings(deadline=None, max_examples=20)
@given(st.lists(SAMPLINGS, min_size=2, max_size=20), st.sampled_from([2000, 5120, VOCABULARY]), st.integers(0, 1000))
def test_a_row_of_a_whole_vocabulary_draws_the_same_alone_and_among_others(
    samplings: list[Sampling], vocabulary: int, seed: int
) -> None:
    rows = rows_of(len(samplings), vocabulary, 2.0, seed)
    draws = [draw_of(asked, (1, 2), [5, 5, 6], index) for index, asked in enumerate(samplings)]
    together = draw_tokens(rows, draws)
    assert together == tuple(draw_tokens(rows[i : i + 1], [draw])[0] for i, draw in enumerate(draws))
    backwards = draw_tokens(rows.flip(0), draws[::-1])
    assert together == backwards[::-1]


@pytest.mark.parametrize("top_k", [1, 3, 64, 65, 100, 700, 3000])
def test_equal_logits_rank_by_id_though_they_fill_whole_chunks(top_k: int) -> None:
    row = torch.zeros(1, 64 * 800)
    row[0, 640:1280] = 1.0
    draws = [Draw(Sampling(seed=seed, top_k=top_k, temperature=50.0), seed) for seed in range(300)]
    tokens = draw_tokens(row.expand(300, -1), draws)
    in_order = [*range(640, 1280), *range(640), *range(1280, 64 * 800)]
    assert set(tokens) <= set(in_order[:top_k])
    assert len(set(tokens)) > min(top_k, 300) * 0.6


def test_the_rest_of_a_row_is_looked_at_when_the_largest_do_not_reach_top_p() -> None:
    row = torch.zeros(1, VOCABULARY)
    draws = [Draw(Sampling(seed=seed, top_p=0.5), seed) for seed in range(200)]
    tokens = draw_tokens(row.expand(200, -1), draws)
    ids = [token for token in tokens if isinstance(token, int)]
    assert len(ids) == 200
    assert VOCABULARY * 0.4 < max(ids) < VOCABULARY // 2


def test_bfloat16_logits_draw_as_their_own_values_in_single_precision() -> None:
    rows = rows_of(4, 1000, 2.0, 1).bfloat16()
    draws = [Draw(Sampling(temperature=float(index % 2), seed=index, top_p=0.9), index) for index in range(4)]
    assert draw_tokens(rows, draws) == draw_tokens(rows.float(), draws)


def test_a_vocabulary_that_is_no_multiple_of_a_chunk_has_no_token_beyond_its_end() -> None:
    rows = torch.full((500, 65), -1000.0)
    rows[:, 64] = 0.0
    assert set(draw_tokens(rows, [Draw(Sampling(seed=s, temperature=2.0), s) for s in range(500)])) == {64}


def test_no_draw_ends_the_answer_before_min_tokens_and_any_may_from_then_on() -> None:
    row = torch.zeros(1, 8)
    row[0, EOS] = 50.0
    row[0, 6] = 40.0
    asked = Sampling(temperature=0.0, min_tokens=2, stop_token_ids=(6,))
    output: list[int] = []
    draw = draw_of(asked, (1,), output, 1)
    assert draw_tokens(row, [draw]) == (0,)
    output += [0]
    assert draw_tokens(row, [draw]) == (0,)
    output += [0]
    assert draw_tokens(row, [draw]) == (EOS,)


def test_a_row_whose_every_token_is_banned_fails_alone() -> None:
    asked = Sampling(min_tokens=1, stop_token_ids=(0, 1, 2, 4))
    got = draw_tokens(torch.zeros(2, 5), [draw_of(asked, (1,), [], 0), Draw(Sampling(temperature=0.0), 0)])
    assert isinstance(got[0], DrawFailed)
    assert got[1] == 0


def test_an_ending_token_that_the_model_does_not_have_bans_nothing() -> None:
    draw = Draw(Sampling(temperature=0.0, min_tokens=5), 0, History([], prompt_ids=(), ending_ids={0, 900}))
    assert draw_tokens(torch.tensor([[3.0, 1.0, 2.0]]), [draw]) == (2,)


def test_a_history_counts_what_came_since_it_was_asked_last() -> None:
    output: list[int] = []
    history = History(output, prompt_ids=(7, 7, 9), ending_ids=())
    assert [part.tolist() for part in history.seen()] == [[7, 9], [0, 0]]
    output += [9, 4]
    assert [part.tolist() for part in history.seen()] == [[7, 9, 4], [0, 1, 1]]
    output += range(1000)
    ids, counts = history.seen()
    found = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    assert found == {token: 1 + (token in {9, 4}) for token in range(1000)}
    assert len(ids) == 1000


def test_a_request_without_penalties_or_least_length_has_no_history() -> None:
    assert draw_of(Sampling(biases=(Bias(1, 1.0),), stop_token_ids=(1,)), (1,), [], 0).history is None
