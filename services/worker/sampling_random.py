"""Draws of rows with a temperature: min-p, then top-k, then top-p of what these left, as vLLM has it.

The distribution is inverted over ids in order, by one uniform number each. Equal logits rank by id. Nothing is sorted
but the few logits that may be drawn; a row for which a few do not suffice is drawn from all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from services.worker.executor import Draw
from services.worker.sampling_chunks import CHUNK, Candidates, Chunks, Floats, Ints, Singles
from services.worker.sampling_uniforms import uniforms

_COLDEST = 1e-30
"""Below it nothing changes any more, and single precision knows no such number."""
_FEW, _MORE = 64, 256
"""Chunks: in most steps of most models the first has all that top-p keeps."""
_SURE = 1 + 1e-6
"""What a sum of weights in single precision may be wrong by."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What rows ask for: one entry of each array belongs to one row."""

    rows: Ints
    temperatures: Floats
    top_k: Ints
    """As many as there are: off."""
    top_p: Floats
    min_p: Floats
    numbers: Floats

    def only(self, which: npt.NDArray[np.bool_]) -> "Asked":
        """Return some of the rows."""
        return Asked(*(getattr(self, field.name)[which] for field in fields(self)))

    def is_cut(self, vocabulary: int) -> npt.NDArray[np.bool_]:
        """Return which rows are bounded by something that does not depend on the weight of all tokens."""
        return (self.top_k < vocabulary) | (self.min_p > 0)


def draw_random(chunks: Chunks, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
    """Return one token for each of these rows, whose draws have a temperature."""
    asked = _asked(rows, draws, chunks.vocabulary)
    tokens = np.full(len(rows), -1, dtype=np.int64)
    is_free = ~asked.is_cut(chunks.vocabulary) & (asked.top_p >= 1)
    if is_free.any():
        tokens[is_free] = _draw_free(chunks, asked.only(is_free))
    for most in (_FEW, _MORE):
        if (left := tokens < 0).any():
            tokens[left] = _draw_among(chunks, asked.only(left), most)
    for index in np.flatnonzero(tokens < 0):
        tokens[index] = _draw_of_all(chunks, asked, int(index))
    drawn: list[int] = tokens.tolist()
    return drawn


def _asked(rows: Sequence[int], draws: Sequence[Draw], vocabulary: int) -> Asked:
    samplings = [draw.sampling for draw in draws]
    top_k = np.array([sampling.top_k for sampling in samplings], dtype=np.int64)
    return Asked(
        np.array(rows, dtype=np.int64),
        np.maximum([sampling.temperature for sampling in samplings], _COLDEST),
        np.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary),
        np.array([sampling.top_p for sampling in samplings], dtype=np.float64),
        np.array([sampling.min_p for sampling in samplings], dtype=np.float64),
        uniforms([sampling.seed for sampling in samplings], [draw.position for draw in draws]),
    )


def _draw_free(chunks: Chunks, asked: Asked) -> Ints:
    """Draw from all tokens: first the chunk, then the token in it."""
    sums = chunks.weights(asked.rows, asked.temperatures).astype(np.float64)
    cumulative = sums.cumsum(axis=1)
    targets = asked.numbers * cumulative[:, -1]
    chosen = _place(sums, cumulative, targets)
    every = np.arange(len(chosen))
    peaks = chunks.peaks(asked.rows).astype(np.float64)
    logits = chunks.at(asked.rows, chosen).astype(np.float64)
    weights = np.exp((logits - peaks[:, None]) / asked.temperatures[:, None])
    # what is left of the target in this chunk, by the weight that single precision gave it
    left = (targets - (cumulative - sums)[every, chosen]) * weights.sum(axis=1) / sums[every, chosen]
    return chosen * CHUNK + _place(weights, weights.cumsum(axis=1), left)


def _draw_among(chunks: Chunks, asked: Asked, most: int) -> Ints:
    """Draw from the largest logits; -1 where it is not sure that all that may be drawn is among these."""
    candidates = chunks.candidates(asked.rows, most)
    peaks = chunks.peaks(asked.rows).astype(np.float64)
    weights = np.exp((candidates.logits - peaks[:, None]) / asked.temperatures[:, None])
    order = np.argsort(-candidates.logits, axis=1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=1)
    ranks = np.arange(ranked.shape[1])
    ranked[(ranked < asked.min_p[:, None]) | (ranks >= asked.top_k[:, None])] = 0
    totals, is_whole = _totals(chunks, asked, candidates, ranked, peaks)
    before = ranked.cumsum(axis=1) - ranked
    has_reached = (before >= (asked.top_p * totals)[:, None]) & (asked.top_p < 1)[:, None]
    ranked[has_reached & (ranks > 0)] = 0
    np.put_along_axis(weights, order, ranked, axis=1)
    cumulative = weights.cumsum(axis=1)
    places = _place(weights, cumulative, asked.numbers * cumulative[:, -1])
    return np.where(is_whole, candidates.ids[np.arange(len(places)), places], -1)


def _totals(
    chunks: Chunks, asked: Asked, candidates: Candidates, ranked: Floats, peaks: Floats
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return the weight that top-p takes its share of, and whether all that it may keep is among the candidates."""
    totals = ranked.sum(axis=1)
    is_cut = asked.is_cut(chunks.vocabulary)
    at_bar = np.exp((candidates.bars - peaks) / asked.temperatures)
    is_whole = (candidates.counts >= asked.top_k) | (at_bar < asked.min_p) | np.isneginf(candidates.bars)
    is_open = ~is_cut & ~is_whole
    if is_open.any():
        found = totals[is_open]
        totals[is_open] = chunks.weights(asked.rows[is_open], asked.temperatures[is_open]).sum(axis=1, dtype=np.float64)
        is_whole[is_open] = found >= asked.top_p[is_open] * totals[is_open] * _SURE
    return totals, is_whole


def _draw_of_all(chunks: Chunks, asked: Asked, index: int) -> int:
    """Draw one row from all of its logits."""
    logits = chunks.row(int(asked.rows[index]))
    temperature = asked.temperatures[index]
    ranked = np.sort(logits)[::-1]
    kept = _kept(ranked, asked, index)
    bar = ranked[kept - 1]
    is_kept = logits > bar
    is_kept[np.flatnonzero(logits == bar)[: kept - np.count_nonzero(is_kept)]] = True
    ids = np.flatnonzero(is_kept)
    weights = np.exp((logits[ids].astype(np.float64) - logits.max()) / temperature)[None]
    cumulative = weights.cumsum(axis=1)
    return int(ids[_place(weights, cumulative, asked.numbers[index] * cumulative[:, -1])[0]])


def _kept(ranked: Singles, asked: Asked, index: int) -> int:
    """Return how many of the logits, largest first, may be drawn."""
    weights = np.exp((ranked.astype(np.float64) - ranked[0]) / asked.temperatures[index])
    most = min(int(np.count_nonzero(weights >= asked.min_p[index])), int(asked.top_k[index]))
    if asked.top_p[index] >= 1:
        return most
    cumulative = weights[:most].cumsum()
    before = cumulative - weights[:most]
    return max(1, int(np.count_nonzero(before < asked.top_p[index] * cumulative[-1])))


def _place(weights: Floats, cumulative: Floats, targets: Floats) -> Ints:
    """Return in each row the first place whose cumulative weight exceeds the target, and never one without weight."""
    places = (cumulative <= targets[:, None]).sum(axis=1)
    # rounding may put the target onto the total itself: then it is the last that has any weight
    last = weights.shape[1] - 1 - (weights > 0)[:, ::-1].argmax(axis=1)
    found: Ints = np.minimum(places, last)
    return found
