"""A simulation in numbers, by the same definitions as a measured run (`loadgen.measure`)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadgen.measure import Distribution, distribution
from shared.simulation.records import RequestRecord, Result


@dataclass(frozen=True, slots=True)
class SimulationSummary:
    """What a simulation showed. Times in seconds; per second of the time from the first arrival to the last end.

    TTFT and E2E count from the arrival, TBT is every gap between two tokens of a request, normalised latency is
    E2E / tokens of the answer. ``cached_share``: of prompt tokens, those found in a prefix cache. ``padding_share``:
    of tokens computed, those that were padding. KV shares are of all blocks, over all workers and the whole time.
    """

    requests: int
    finished: int
    refused: int
    ttft_s: Distribution | None
    tbt_s: Distribution | None
    normalised_s: Distribution | None
    e2e_s: Distribution | None
    queued_s: Distribution | None
    span_s: float
    requests_per_s: float
    output_tokens_per_s: float
    preemptions: int
    kv_mean: float
    kv_peak: float
    cached_share: float
    padding_share: float
    steps: int
    tokens: int


def summarise_simulation(result: Result) -> SimulationSummary:
    """Return what a simulation showed."""
    finished, totals = result.finished, result.totals
    output_tokens = sum(len(request.token_times_s) for request in finished)
    prompt_tokens = sum(request.arrival.prompt_tokens for request in finished)
    span_s = result.span_s or float("inf")
    return SimulationSummary(
        requests=len(result.requests),
        finished=len(finished),
        refused=sum(request.refused for request in result.requests),
        ttft_s=_of(request.ttft_s for request in finished),
        tbt_s=distribution(gaps_s(finished)),
        normalised_s=_of((request.e2e_s or 0.0) / len(request.token_times_s) for request in finished),
        e2e_s=_of(request.e2e_s for request in finished),
        queued_s=_of(_queued_s(request) for request in finished),
        span_s=result.span_s,
        requests_per_s=len(finished) / span_s,
        output_tokens_per_s=output_tokens / span_s,
        preemptions=totals.preemptions,
        kv_mean=result.kv.mean,
        kv_peak=result.kv.peak,
        cached_share=sum(request.cached_tokens for request in finished) / max(1, prompt_tokens),
        padding_share=totals.padding_tokens / max(1, totals.tokens),
        steps=totals.steps,
        tokens=totals.tokens,
    )


def gaps_s(requests: Sequence[RequestRecord]) -> npt.NDArray[np.float64]:
    """Return every gap between two tokens of a request, of all of them."""
    gaps = [np.diff(np.asarray(request.token_times_s, dtype=np.float64)) for request in requests]
    return np.concatenate(gaps) if gaps else np.empty(0)


def _queued_s(request: RequestRecord) -> float | None:
    return None if request.first_scheduled_s is None else request.first_scheduled_s - request.arrival.at_s


def _of(samples: Iterable[float | None]) -> Distribution | None:
    return distribution([sample for sample in samples if sample is not None])
