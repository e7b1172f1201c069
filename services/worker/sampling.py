"""Drawing tokens: the whole batch at once, each row as if it were alone.

One uniform number per (seed, position) and the inverse of the cumulative distribution over ids in order, so that a
position that is computed again draws with the same number (DESIGN §4).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.worker.executor import Draw, DrawFailed, Outcome

_TWO_TO_64 = 1 << 64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_Numbers = npt.NDArray[np.uint64]


def draw_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[Outcome, ...]:
    """Return one token for each row of ``[rows, vocabulary]``; a row without finite logits fails alone."""
    logits = logits.float()
    # NaN and +inf reach the maximum, and a row of -inf alone has nothing to draw from
    finite = torch.isfinite(logits.amax(dim=-1)).tolist()
    good = [index for index, is_finite in enumerate(finite) if is_finite]
    greedy = [index for index in good if draws[index].sampling.temperature <= 0]
    random = [index for index in good if draws[index].sampling.temperature > 0]
    outcomes: list[Outcome] = [DrawFailed("logits that are not finite")] * len(draws)
    if greedy:
        # numpy promises the first of equals
        for index, token in zip(greedy, logits[greedy].numpy().argmax(axis=-1).tolist(), strict=True):
            outcomes[index] = token
    if random:
        tokens = _draw_random(logits[random], [draws[index] for index in random])
        for index, token in zip(random, tokens, strict=True):
            outcomes[index] = token
    return tuple(outcomes)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position): splitmix64, whose state is a counter."""
    seed = _mixed(np.array([seed % _TWO_TO_64 for seed in seeds], dtype=np.uint64))
    position = np.array(positions, dtype=np.uint64)
    with np.errstate(over="ignore"):
        bits = _mixed(seed + (position + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(numbers: _Numbers) -> _Numbers:
    with np.errstate(over="ignore"):
        numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX_1
        numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX_2
    mixed: _Numbers = numbers ^ (numbers >> np.uint64(31))
    return mixed


def _draw_random(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    temperatures = torch.tensor([draw.sampling.temperature for draw in draws], dtype=torch.float64)
    # the maximum goes first: a tiny temperature would make the others overflow, never this difference
    scaled = (logits.double() - logits.amax(dim=-1, keepdim=True).double()) / temperatures[:, None]
    weights = torch.softmax(scaled, dim=-1)
    filtered = [index for index, draw in enumerate(draws) if _is_filtered(draw, logits.shape[-1])]
    if filtered:
        weights[filtered] = _kept(weights[filtered], [draws[index] for index in filtered])
    cumulative = weights.cumsum(dim=-1)
    numbers = uniforms([draw.sampling.seed for draw in draws], [draw.position for draw in draws])
    targets = torch.from_numpy(numbers)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    # rounding may put the target onto the total itself: then it is the last id that has any weight
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).byte().argmax(dim=-1)
    chosen: list[int] = torch.minimum(tokens, last).tolist()
    return chosen


def _is_filtered(draw: Draw, vocabulary: int) -> bool:
    return draw.sampling.top_p < 1 or 0 < draw.sampling.top_k < vocabulary


def _kept(weights: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return the weights with those outside of top-k, then top-p, set to zero. Equal weights rank by id."""
    vocabulary = weights.shape[-1]
    ranked, order = torch.sort(weights, dim=-1, descending=True, stable=True)
    top_k = torch.tensor([draw.sampling.top_k if draw.sampling.top_k > 0 else vocabulary for draw in draws])
    ranked = ranked.masked_fill(torch.arange(vocabulary)[None, :] >= top_k[:, None], 0.0)
    before = ranked.cumsum(dim=-1) - ranked
    top_p = torch.tensor([draw.sampling.top_p for draw in draws], dtype=torch.float64)
    # the smallest set that reaches top_p of what top-k left, and never less than the first
    reached = before >= top_p[:, None] * ranked.sum(dim=-1, keepdim=True)
    reached[:, 0] = False
    reached &= (top_p < 1)[:, None]
    return torch.zeros_like(weights).scatter_(-1, order, ranked.masked_fill(reached, 0.0))
