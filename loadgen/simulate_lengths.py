"""Lengths of simulated requests: a span, a lognormal distribution, or the rows of a file."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from loadgen.lengths import Span
from loadgen.trace_formats import BadTrace, read_rows

_Z90 = 1.2815515655446004
"""Standard deviations from the median to the 90th percentile of a normal distribution."""
_MOST_ROWS = 1_000_000


class Length(Protocol):
    """Something that lengths are drawn from."""

    def draw(self, source: np.random.Generator) -> int:
        """Return one length in tokens."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A length in tokens whose logarithm is normal, by its median and 90th percentile, cut at `most`."""

    p50: int
    p90: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``lognormal:P50:P90`` or ``lognormal:P50:P90:MOST``. Raises ValueError with a sentence."""
        match = re.fullmatch(r"lognormal:(\d{1,7}):(\d{1,7})(?::(\d{1,7}))?", text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not like lognormal:1730:5696 or lognormal:7059:12985:16384")
        p50, p90, most = int(match[1]), int(match[2]), int(match[3] or 9_999_999)
        if not 1 <= p50 < p90 <= most:
            raise ValueError(f"{text!r}: the median must be 1 or more, the 90th percentile above it, the cut not below")
        return cls(p50, p90, most)

    def draw(self, source: np.random.Generator) -> int:
        """Return one length in tokens."""
        sigma = math.log(self.p90 / self.p50) / _Z90
        return min(self.most, max(1, round(self.p50 * math.exp(sigma * source.standard_normal()))))


def parse_length(text: str) -> Length:
    """Read ``128``, ``64-256`` or ``lognormal:P50:P90[:MOST]``. Raises ValueError with a sentence."""
    return LogNormal.parse(text) if text.strip().startswith("lognormal") else Span.parse(text)


Pair = tuple[int, int]
"""Tokens of a prompt and of its answer."""


def draw_pairs(prompts: Length, outputs: Length, count: int, source: np.random.Generator) -> list[Pair]:
    """Return so many pairs, prompt and answer drawn apart from each other."""
    return [(prompts.draw(source), outputs.draw(source)) for _ in range(count)]


def read_pairs(path: Path) -> list[Pair]:
    """Return the pairs of a file's rows, those without answer left out. Raises `BadTrace`."""
    rows: Iterable[Pair] = ((row.prompt_tokens, row.output_tokens) for _, row in islice(read_rows(path), _MOST_ROWS))
    pairs = [(prompt, output) for prompt, output in rows if prompt and output]
    if not pairs:
        raise BadTrace(f"{path} has no row with a prompt and an answer")
    return pairs


def sample_pairs(pairs: list[Pair], count: int, source: np.random.Generator) -> list[Pair]:
    """Return so many of the pairs, drawn with replacement."""
    return [pairs[index] for index in source.integers(len(pairs), size=count).tolist()]
