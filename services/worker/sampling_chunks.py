"""Rows of logits in chunks of 64: their maxima tell in one pass over the logits where the large ones are.

The k-th largest maximum is a lower bound for the k-th largest logit. What exceeds it lies in fewer than k chunks, and
only these are looked at.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

CHUNK = 64
_ROWS_AT_A_TIME = 8
"""What is worked on at a time stays in the cache of a core."""
_LEAST, _NOTHING = -87.0, 1.66e-38
"""Single precision knows no smaller weight but those without full precision: less than that is none."""

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Of each row all logits above its bar, in the order of their ids, filled up with -inf."""

    ids: Ints
    logits: Singles
    counts: Ints
    bars: Singles
    """-inf: nothing is missing."""


class Chunks:
    """Logits ``[rows, vocabulary]`` in chunks. Every result depends on its own row alone, to the last bit."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.vocabulary: int = logits.shape[-1]
        self._logits = logits
        self._rows = logits.numpy()

    @cached_property
    def _chunks(self) -> torch.Tensor:
        """``[rows, chunks, 64]``; without a copy unless the last chunk has to be filled up."""
        missing = -self.vocabulary % CHUNK
        logits = torch.nn.functional.pad(self._logits, (0, missing), value=-torch.inf) if missing else self._logits
        return logits.view(len(logits), -1, CHUNK) if logits.is_contiguous() else logits.unfold(-1, CHUNK, CHUNK)

    @cached_property
    def maxima(self) -> Singles:
        """The largest logit of each chunk, or NaN."""
        maxima: Singles = self._chunks.amax(-1).numpy()
        return maxima

    def peaks(self, rows: Ints) -> Singles:
        """Return the largest logit of each row."""
        peaks: Singles = self.maxima[rows].max(axis=1)
        return peaks

    def row(self, row: int) -> Singles:
        """Return one row of logits."""
        one: Singles = self._rows[row]
        return one

    def at(self, rows: Ints, chunks: Ints) -> Singles:
        """Return the logits of some chunks, each of the row at the same place of ``rows``."""
        chosen: Singles = self._chunks.numpy()[rows, chunks]
        return chosen

    def weights(self, rows: Ints, temperatures: Floats) -> Singles:
        """Return, for each chunk of these rows, the sum of exp((logit - largest) / temperature)."""
        peaks = torch.from_numpy(self.peaks(rows))[:, None, None]
        divisors = torch.from_numpy(temperatures.astype(np.float32))[:, None, None]
        sums = []
        for first in range(0, len(rows), _ROWS_AT_A_TIME):
            some = slice(first, first + _ROWS_AT_A_TIME)
            logits = self._chunks[torch.from_numpy(rows[some])]
            exponents = logits.sub_(peaks[some]).div_(divisors[some])
            # rows with a grammar are -inf for the most part, of which exp takes ten times as long
            weights = torch.nn.functional.threshold_(exponents.clamp_min_(_LEAST).exp_(), _NOTHING, 0.0)
            sums.append(weights.sum(-1))
        found: Singles = torch.cat(sums).numpy()
        return found

    def candidates(self, rows: Ints, chunks: int) -> Candidates:
        """Return all logits above the largest of the chunk that comes at this place, by its largest."""
        maxima = self.maxima[rows]
        is_all = chunks >= maxima.shape[1]
        bars = np.full(len(rows), -np.inf, dtype=np.float32)
        if not is_all:
            bars = np.partition(maxima, -chunks, axis=1)[:, -chunks]
        at_row, at_chunk = np.nonzero(maxima > bars[:, None])
        logits = self.at(rows[at_row], at_chunk)
        found, within = np.nonzero(logits > bars[at_row, None])
        return _padded(at_row[found], at_chunk[found] * CHUNK + within, logits[found, within], bars)


def _padded(rows: Ints, ids: Ints, logits: Singles, bars: Singles) -> Candidates:
    """Put what lies one after the other, in the order of rows, into one line for each row."""
    counts = np.bincount(rows, minlength=len(bars))
    places = np.arange(len(rows)) - (counts.cumsum() - counts)[rows]
    shape = (len(bars), max(int(counts.max(initial=0)), 1))
    candidates = Candidates(np.zeros(shape, dtype=np.int64), np.full(shape, -np.inf, np.float32), counts, bars)
    candidates.ids[rows, places] = ids
    candidates.logits[rows, places] = logits
    return candidates
