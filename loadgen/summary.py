"""A whole run in numbers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadgen.client import Record
from loadgen.goodput import Bounds
from loadgen.measure import Distribution, Timing, distribution, time_of

MAX_LAG_SHARE = 0.05
"""A client whose P99 send lag is more of the median TTFT than this measures itself."""


@dataclass(frozen=True, slots=True)
class Run:
    """The facts of a run, before anything is computed from them. `start_s` is on the records' clock."""

    records: Sequence[Record]
    start_s: float
    is_open_loop: bool
    interrupted: int
    warmup: Sequence[Record] = ()
    asked_full_length: bool = False
    bounds: Bounds | None = None


@dataclass(frozen=True, slots=True)
class Throughput:
    """Per second of the run, from its start to the end of its last request; only requests that ended well count."""

    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that were good, per second of the run, and of all that were sent: failed, left or interrupted too."""

    bounds: Bounds
    good: int
    sent: int
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Distributions in seconds, of the requests that ended well; send lag of all.

    TBT's samples are tokens, the others' are requests.
    """

    ttft: Distribution | None
    ttft_from_intended: Distribution | None
    tbt: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    e2e_from_intended: Distribution | None
    max_gap: Distribution | None
    normalised: Distribution | None
    send_lag: Distribution | None


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run showed. `notes` are sentences that its reader must not miss."""

    succeeded: int
    failed: int
    cancelled: int
    interrupted: int
    warmup_failed: int
    failures: dict[str, int]
    run_s: float
    prompt_tokens: int
    output_tokens: int
    throughput: Throughput
    goodput: Goodput | None
    latency: Latency
    notes: tuple[str, ...]

    @property
    def all_went_well(self) -> bool:
        """Whether no request failed, those of the warm-up included."""
        return self.failed == 0 and self.warmup_failed == 0


def summarise(run: Run) -> Summary:
    """Return what a run showed."""
    good = [record for record in run.records if record.outcome == "ok"]
    failures = Counter(record.failure.name for record in run.records if record.failure)
    timings = [time_of(record) for record in good]
    latency = _latency(timings, run.records)
    run_s = max((record.done_s for record in run.records), default=run.start_s) - run.start_s
    prompt_tokens = sum(record.answer.usage.prompt_tokens for record in good if record.answer.usage)
    output_tokens = sum(record.answer.usage.completion_tokens for record in good if record.answer.usage)
    return Summary(
        succeeded=len(good),
        failed=failures.total(),
        cancelled=sum(record.outcome == "cancelled" for record in run.records),
        interrupted=run.interrupted,
        warmup_failed=sum(record.outcome == "failed" for record in run.warmup),
        failures=dict(failures.most_common()),
        run_s=run_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        throughput=Throughput(
            _per(len(good), run_s), _per(output_tokens, run_s), _per(prompt_tokens + output_tokens, run_s)
        ),
        goodput=_goodput(run, run_s),
        latency=latency,
        notes=tuple(_notes(run, good, timings, latency)),
    )


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _goodput(run: Run, run_s: float) -> Goodput | None:
    if run.bounds is None:
        return None
    good = sum(map(run.bounds.are_met_by, run.records))
    return Goodput(run.bounds, good, len(run.records) + run.interrupted, _per(good, run_s))


def _latency(timings: Sequence[Timing], records: Sequence[Record]) -> Latency:
    gaps = [gap for timing in timings for gap in timing.gaps]
    return Latency(
        ttft=_of(timing.ttft_s for timing in timings),
        ttft_from_intended=_of(timing.ttft_from_intended_s for timing in timings),
        tbt=distribution([gap.per_token_s for gap in gaps], [gap.tokens for gap in gaps]),
        tpot=_of(timing.tpot_s for timing in timings),
        e2e=_of(timing.e2e_s for timing in timings),
        e2e_from_intended=_of(timing.e2e_from_intended_s for timing in timings),
        max_gap=_of(timing.max_gap_s for timing in timings),
        normalised=_of(timing.normalised_s for timing in timings),
        send_lag=_of(record.send_lag_s for record in records),
    )


def _of(samples: Iterable[float | None]) -> Distribution | None:
    return distribution([sample for sample in samples if sample is not None])


def _notes(run: Run, good: Sequence[Record], timings: Sequence[Timing], latency: Latency) -> Iterable[str]:
    if run.is_open_loop and falls_behind(latency):
        yield "INVALID: the client fell behind its own schedule (P99 send lag over 5 % of median TTFT)"
    counts = {
        "answers are shorter than asked": sum(map(_is_short, good)) if run.asked_full_length else 0,
        "prompts have another length by the server's count": sum(map(_is_counted_otherwise, good)),
        "answers had no text, so they have no TTFT": sum(timing.ttft_s is None for timing in timings),
        "answers came in chunks of unknown size: left out of TBT": sum(
            timing.tokens_known_by == "unknown" for timing in timings
        ),
    }
    yield from (f"{count} {what}" for what, count in counts.items() if count)


def falls_behind(latency: Latency) -> bool:
    """Tell whether the client's own delay is large beside what it measures."""
    lag, ttft = latency.send_lag, latency.ttft
    return lag is not None and ttft is not None and lag.p99 > MAX_LAG_SHARE * ttft.p50


def _is_short(record: Record) -> bool:
    usage = record.answer.usage
    return usage is not None and usage.completion_tokens < record.request.output_tokens


def _is_counted_otherwise(record: Record) -> bool:
    usage, sent = record.answer.usage, record.request.prompt_tokens
    return usage is not None and sent is not None and usage.prompt_tokens != sent
