"""What the times of one request mean, and the distribution of many.

With `s` the moment a request was sent, `f` its first text, `e` its [DONE] and `n` the tokens that the server's usage
counts: TTFT = f - s; E2E = e - s; TPOT = (E2E - TTFT) / (n - 1) for n >= 2; normalised latency = E2E / n. TTFT and E2E
are also taken from the intended moment, so that a client that falls behind does not hide what its users would feel.

TBT, the time between tokens, is the gap from one arrival to the next, divided over the tokens that the later one
brought. Events read at the same moment are one arrival. The first arrival ends no gap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from loadgen.answer import Answer
from loadgen.client import Record

TokenSource = Literal["usage", "one_per_chunk", "unknown"]
"""How the tokens of a chunk are known: the server counts in each; there are as many as tokens; not at all."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that came at one moment."""

    at_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Seconds per token, for as many tokens."""

    per_token_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """The durations of one answer that came whole, in seconds. None where the answer was too short to have one."""

    ttft_s: float | None
    ttft_from_intended_s: float | None
    e2e_s: float
    e2e_from_intended_s: float
    tpot_s: float | None
    normalised_s: float | None
    max_gap_s: float | None
    gaps: tuple[Gap, ...]
    tokens_known_by: TokenSource


def time_of(record: Record) -> Timing:
    """Return the durations of a request that ended well."""
    answer = record.answer
    tokens = answer.usage.completion_tokens if answer.usage else 0
    e2e_s = record.done_s - record.sent_s
    ttft_s = None if answer.first_text_s is None else answer.first_text_s - record.sent_s
    source, arrivals = arrivals_of(answer)
    moments = [arrival.at_s for arrival in arrivals]
    return Timing(
        ttft_s=ttft_s,
        ttft_from_intended_s=None if ttft_s is None else ttft_s + record.send_lag_s,
        e2e_s=e2e_s,
        e2e_from_intended_s=e2e_s + record.send_lag_s,
        tpot_s=tpot_s(e2e_s, ttft_s, tokens),
        normalised_s=e2e_s / tokens if tokens else None,
        max_gap_s=max((b - a for a, b in pairwise(moments)), default=None),
        gaps=() if source == "unknown" else gaps_between(arrivals),
        tokens_known_by=source,
    )


def tpot_s(e2e_s: float, ttft_s: float | None, tokens: int) -> float | None:
    """Return the mean seconds per token after the first, None if there was none after it."""
    return None if ttft_s is None or tokens < 2 else (e2e_s - ttft_s) / (tokens - 1)  # noqa: PLR2004 - the formula's own


def gaps_between(arrivals: Sequence[Arrival]) -> tuple[Gap, ...]:
    """Return the gap before each arrival but the first, divided over its tokens."""
    return tuple(Gap((later.at_s - former.at_s) / later.tokens, later.tokens) for former, later in pairwise(arrivals))


def arrivals_of(answer: Answer) -> tuple[TokenSource, list[Arrival]]:
    """Return how tokens are known and when they came. If they are not known, each text is taken for one arrival."""
    tokens = answer.usage.completion_tokens if answer.usage else 0
    counts = [chunk.tokens_so_far for chunk in answer.chunks]
    if counts and counts[-1] is None and not answer.chunks[-1].has_text:
        counts[-1] = tokens  # it has the finish reason alone, which some servers send uncounted: all tokens are there
    known = [number for number in counts if number is not None]
    if known == counts and counts and counts[-1] == tokens:
        new = np.diff(np.maximum.accumulate(known), prepend=0).tolist()
        return "usage", _merged([Arrival(c.at_s, n) for c, n in zip(answer.chunks, new, strict=True) if n])
    texts = [Arrival(chunk.at_s, 1) for chunk in answer.chunks if chunk.has_text]
    silent = tokens - len(texts)  # the token that ends an answer is counted and has no text
    is_known = silent == 0 or (silent == 1 and answer.finish_reason == "stop")
    return "one_per_chunk" if is_known else "unknown", _merged(texts)


def _merged(arrivals: list[Arrival]) -> list[Arrival]:
    merged: list[Arrival] = []
    for arrival in arrivals:
        if merged and merged[-1].at_s == arrival.at_s:
            merged[-1] = Arrival(arrival.at_s, merged[-1].tokens + arrival.tokens)
        else:
            merged.append(arrival)
    return merged


@dataclass(frozen=True, slots=True)
class Distribution:
    """Samples, boiled down. Percentiles are exact: all samples, linear interpolation between the nearest two."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    largest: float


def distribution(
    samples: Sequence[float] | npt.NDArray[np.float64], weights: Sequence[int] | None = None
) -> Distribution | None:
    """Return the distribution of the samples, each counted `weights` times; None if there are none."""
    values = np.asarray(samples, dtype=np.float64)
    values = values if weights is None else np.repeat(values, weights)
    if not values.size:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(values, [50, 90, 99], method="linear"))
    return Distribution(int(values.size), float(values.mean()), p50, p90, p99, float(values.max()))
