"""Drawing tokens: exact supports, the right distribution, and nobody's draw depends on the others."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.executor import Draw, DrawFailed
from services.worker.sampling import draw_tokens
from services.worker.sampling_uniforms import uniforms
from shared.protocol.messages import Sampling

INT64 = st.integers(-(2**63), 2**63 - 1)
CHI_SQUARE_999_9_DF = 27.9  # 9 degrees of freedom, one in a thousand


def logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def draw(position: int = 0, **sampling: float) -> Draw:
    return Draw(Sampling(**sampling), position)  # type: ignore[arg-type] # top_k and seed are given as ints


def test_temperature_0_takes_the_largest_and_the_first_of_equals() -> None:
    rows = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 1.0, 5.0]])
    assert draw_tokens(rows, [draw(temperature=0.0)] * 2) == (1, 0)


def test_the_distribution_is_that_of_the_softmax() -> None:
    row = logits(1, 10)
    draws = 20_000
    tokens = draw_tokens(row.expand(draws, -1), [draw(position, seed=7) for position in range(draws)])
    expected = torch.softmax(row[0].double(), 0).numpy() * draws
    found = np.bincount(np.array(tokens, dtype=np.int64), minlength=10)
    assert ((found - expected) ** 2 / expected).sum() < CHI_SQUARE_999_9_DF


def test_temperature_sharpens_the_distribution() -> None:
    row = logits(1, 10)
    draws = 20_000
    tokens = draw_tokens(row.expand(draws, -1), [draw(p, seed=8, temperature=0.5) for p in range(draws)])
    expected = torch.softmax(row[0].double() / 0.5, 0).numpy() * draws
    found = np.bincount(np.array(tokens, dtype=np.int64), minlength=10)
    assert ((found - expected) ** 2 / np.maximum(expected, 1e-9))[expected > 5].sum() < CHI_SQUARE_999_9_DF


def test_uniform_numbers_are_uniform_over_seeds_and_over_positions() -> None:
    for numbers in (uniforms([3] * 20_000, range(20_000)), uniforms(range(-10_000, 10_000), [5] * 20_000)):
        found = np.histogram(numbers, bins=10, range=(0, 1))[0]
        assert ((found - 2000) ** 2 / 2000).sum() < CHI_SQUARE_999_9_DF


def test_uniform_numbers_never_change() -> None:
    # a recomputed position must draw with the same number, in this version as in the last
    numbers = [f"{number:.12f}" for number in uniforms([0, 1, -1], [0, 5, 100])]
    assert numbers == ["0.883310808214", "0.595767932167", "0.829334298532"]


@given(INT64, st.integers(0, 100_000))
def test_every_int64_is_a_seed(seed: int, position: int) -> None:
    (number,) = uniforms([seed], [position])
    assert 0 <= number < 1


@settings(deadline=None)
@given(seed=INT64, top_k=st.integers(1, 60), position=st.integers(0, 5000))
def test_top_k_draws_one_of_the_k_largest(seed: int, top_k: int, position: int) -> None:
    row = logits(1, 50, seed=position)
    (token,) = draw_tokens(row, [draw(position, seed=seed, top_k=top_k, temperature=3.0)])
    assert token in torch.topk(row[0], min(top_k, 50)).indices.tolist()


@settings(deadline=None)
@given(seed=INT64, top_p=st.floats(0.01, 0.999), position=st.integers(0, 5000))
def test_top_p_draws_from_the_smallest_set_that_reaches_p(seed: int, top_p: float, position: int) -> None:
    row = logits(1, 50, seed=position)
    (token,) = draw_tokens(row, [draw(position, seed=seed, top_p=top_p)])
    ranked, order = torch.softmax(row[0].double(), 0).sort(descending=True)
    needed = int((ranked.cumsum(0) < top_p).sum()) + 1
    assert token in order[:needed].tolist()


def test_top_p_reaches_every_member_of_its_set_and_no_other() -> None:
    row = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    tokens = draw_tokens(row.expand(2000, -1), [draw(p, top_p=0.75) for p in range(2000)])
    assert set(tokens) == {0, 1, 2}


def test_top_k_keeps_exactly_k_of_equal_weights_lower_ids_first() -> None:
    tokens = draw_tokens(torch.zeros(2000, 8), [draw(p, top_k=3) for p in range(2000)])
    assert set(tokens) == {0, 1, 2}


def test_top_k_1_and_a_tiny_top_p_are_greedy() -> None:
    rows = logits(20, 50)
    greedy = draw_tokens(rows, [draw(temperature=0.0)] * 20)
    assert draw_tokens(rows, [draw(p, top_k=1) for p in range(20)]) == greedy
    assert draw_tokens(rows, [draw(p, top_p=1e-9) for p in range(20)]) == greedy
    assert draw_tokens(rows, [draw(p, top_p=0.0) for p in range(20)]) == greedy
    assert draw_tokens(rows, [draw(p, temperature=1e-30) for p in range(20)]) == greedy


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([0.0, 0.7, 1.5]), min_size=2, max_size=9), st.integers(0, 1000))
def test_a_row_draws_the_same_alone_and_among_others(temperatures: list[float], seed: int) -> None:
    rows = logits(len(temperatures), 300, seed)
    draws = [
        draw(index, temperature=temperature, seed=seed, top_k=index * 7, top_p=1 - index / 20)
        for index, temperature in enumerate(temperatures)
    ]
    together = draw_tokens(rows, draws)
    alone = tuple(draw_tokens(rows[index : index + 1], [one])[0] for index, one in enumerate(draws))
    assert together == alone


def test_a_row_without_finite_logits_fails_alone() -> None:
    rows = logits(5, 20)
    expected = draw_tokens(rows, [draw(seed=1)] * 5)
    rows = rows.clone()
    rows[1, 3] = float("nan")
    rows[2, 0] = float("inf")
    rows[3] = float("-inf")
    got = draw_tokens(rows, [draw(seed=1)] * 5)
    assert [isinstance(outcome, DrawFailed) for outcome in got] == [False, True, True, True, False]
    assert (got[0], got[4]) == (expected[0], expected[4])


def test_ids_of_minus_infinity_are_never_drawn() -> None:
    rows = torch.full((2000, 6), float("-inf"))
    rows[:, 2] = 0.0
    rows[:, 4] = 0.0
    assert set(draw_tokens(rows, [draw(p) for p in range(2000)])) == {2, 4}
