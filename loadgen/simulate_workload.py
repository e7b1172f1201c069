"""The requests of a simulation: drawn from one seed, or a trace's own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from loadgen.arrivals import poisson_times_s
from loadgen.server import CannotStart
from loadgen.simulate_lengths import Pair, draw_pairs, parse_length, read_pairs, sample_pairs
from loadgen.simulate_settings import SimulateSettings
from loadgen.trace_formats import TraceRequest
from loadgen.traces import Trace
from shared.simulation.records import Arrival

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests without their times, and what was done to get them. ``times_s``: a trace's own."""

    rows: tuple[TraceRequest, ...]
    block_tokens: int
    notes: tuple[str, ...]

    @property
    def longest(self) -> int:
        """Positions of the longest request."""
        return max(row.prompt_tokens + row.output_tokens for row in self.rows)


def workload_of(settings: SimulateSettings) -> Workload:
    """Return what is asked in every run. Raises `CannotStart` for a file that cannot be read."""
    if settings.trace is not None:
        return _of_trace(settings)
    _, for_lengths = np.random.SeedSequence(settings.seed).spawn(2)
    source = np.random.default_rng(for_lengths)
    if settings.lengths is not None:
        pairs = sample_pairs(read_pairs(settings.lengths), settings.requests, source)
    else:
        prompts, outputs = parse_length(settings.prompt_tokens), parse_length(settings.output_tokens)
        pairs = draw_pairs(prompts, outputs, settings.requests, source)
    return _capped([TraceRequest(None, *pair) for pair in pairs], settings, BLOCK_TOKENS, ())


def _of_trace(settings: SimulateSettings) -> Workload:
    trace = Trace(settings.trace, settings.reshape) if settings.trace else None
    if trace is None:
        raise AssertionError("called for a trace")
    rows = list(islice(trace, settings.requests))
    if not rows:
        raise CannotStart(f"{settings.trace} has no request with an answer")
    if rows[0].at_s is None:
        raise CannotStart(f"{settings.trace} has lengths and no times: give it as --lengths")
    has_prefixes = any(row.hash_ids for row in rows)
    block_tokens = trace.reshape.block_tokens if has_prefixes else BLOCK_TOKENS
    return _capped(rows, settings, block_tokens, (f"trace: {trace.counts}",))


def _capped(
    rows: Sequence[TraceRequest], settings: SimulateSettings, block_tokens: int, notes: tuple[str, ...]
) -> Workload:
    most = settings.max_tokens
    if most is None:
        return Workload(tuple(rows), block_tokens, notes)
    cut = sum(row.output_tokens > most for row in rows)
    notes += (f"{cut} answers were cut at --max-tokens {most}",) if cut else ()
    capped = tuple(row._replace(output_tokens=min(row.output_tokens, most)) for row in rows)
    return Workload(capped, block_tokens, notes)


def arrivals_of(settings: SimulateSettings, workload: Workload, rate: float | None) -> list[Arrival]:
    """Return the requests at their times. Another rate stretches the same gaps."""
    times_s = _times_s(settings, workload, rate)
    return [
        Arrival(
            at_s=at_s,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            max_tokens=settings.max_tokens or row.output_tokens,
            tenant=f"t{index % settings.tenants}",
            prefix=row.hash_ids,
        )
        for index, (at_s, row) in enumerate(zip(times_s, workload.rows, strict=True))
    ]


def _times_s(settings: SimulateSettings, workload: Workload, rate: float | None) -> list[float]:
    if rate is not None:
        for_arrivals, _ = np.random.SeedSequence(settings.seed).spawn(2)
        return poisson_times_s(rate, for_arrivals, limit=len(workload.rows), duration_s=math.inf)
    return [row.at_s or 0.0 for row in workload.rows]


def poisson_arrivals(pairs: Sequence[Pair], rate: float, seed: int, *, max_tokens: int | None = None) -> list[Arrival]:
    """Return requests of these lengths at Poisson times, asking for ``max_tokens`` (else exactly their answer)."""
    times_s = poisson_times_s(rate, np.random.SeedSequence(seed), limit=len(pairs), duration_s=math.inf)
    return [
        Arrival(at_s, prompt, output, max_tokens or output)
        for at_s, (prompt, output) in zip(times_s, pairs, strict=True)
    ]
