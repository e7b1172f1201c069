"""How likely the model found a token, and what it found likeliest: by its own logits, at temperature 1."""

from collections.abc import Sequence

import numpy as np

from services.worker.executor import LEAST
from services.worker.sampling_chunks import Candidates, Chunks, Ints, Singles
from shared.protocol.messages import Logprobs, Ranked


def logprobs_of(chunks: Chunks, rows: Sequence[int], tokens: Sequence[int], most: Sequence[int]) -> list[Logprobs]:
    """Return the logprob of each row's token and those of the ``most`` likeliest, equal ones by id."""
    at = np.array(rows, dtype=np.int64)
    sums = chunks.weights(at, np.ones(len(rows))).sum(axis=1, dtype=np.float64)
    totals = chunks.peaks(at).astype(np.float64) + np.log(sums)
    found = chunks.candidates(at, max(most) + 1)
    told = []
    for index, token in enumerate(tokens):
        row = chunks.row(rows[index])
        top = _likeliest(row, found, index, most[index])
        ranked = tuple(Ranked(one, float(row[one] - totals[index])) for one in top.tolist())
        told.append(Logprobs(max(float(row[token] - totals[index]), LEAST), ranked))
    return told


def _likeliest(row: Singles, found: Candidates, index: int, most: int) -> Ints:
    """Return the ids of the largest logits; those that can never be drawn are none."""
    if found.counts[index] < most:  # several chunks have the same maximum, or the row has no more
        order: Ints = np.argsort(-row, kind="stable")[:most]
        return order[np.isfinite(row[order])]
    first: Ints = found.ids[index, np.argsort(-found.logits[index], kind="stable")[:most]]
    return first
