"""A simulation for people, as a table, and for programs, as JSON. No word of when, where or how fast it was run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from loadgen.measure import Distribution
from loadgen.simulate_settings import SimulateSettings
from loadgen.simulate_summary import SimulationSummary
from loadgen.step_times import NamedModel
from shared.simulation.records import RequestRecord, Result

FORMAT = "loadgen-simulation/1"
_DIGITS = 6
_FIELDS = (
    "at_s",
    "prompt_tokens",
    "output_tokens",
    "first_scheduled_s",
    "first_token_s",
    "end_s",
    "preemptions",
    "cached_tokens",
)


@dataclass(frozen=True, slots=True)
class Simulated:
    """One policy at one rate (None: requests that have no rate)."""

    policy: str
    rate: float | None
    result: Result
    summary: SimulationSummary


def print_tables(runs: Sequence[Simulated], console: Console) -> None:
    """Print a row per run, twice: what requests saw, and what the pool did."""
    console.print(_latency_table(runs))
    console.print(_pool_table(runs))


def _latency_table(runs: Sequence[Simulated]) -> Table:
    names = ("TTFT P50", "TTFT P99", "TBT P50", "TBT P99", "E2E/token P50")
    table = _table("Simulated latency, ms", names)
    for run in runs:
        of = run.summary
        table.add_row(
            *_name(run),
            _ms(of.ttft_s, "p50"),
            _ms(of.ttft_s, "p99"),
            _ms(of.tbt_s, "p50"),
            _ms(of.tbt_s, "p99"),
            _ms(of.normalised_s, "p50"),
        )
    return table


def _pool_table(runs: Sequence[Simulated]) -> Table:
    table = _table("Simulated pool", ("finished", "req/s", "tok/s", "preempted", "KV mean", "KV peak"))
    for run in runs:
        of = run.summary
        table.add_row(
            *_name(run),
            str(of.finished),
            f"{of.requests_per_s:.2f}",
            f"{of.output_tokens_per_s:.0f}",
            str(of.preemptions),
            f"{of.kv_mean:.1%}",
            f"{of.kv_peak:.1%}",
        )
    return table


def _table(title: str, numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("policy", "rate"):
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _name(run: Simulated) -> tuple[str, str]:
    return run.policy, "-" if run.rate is None else f"{run.rate:g}"


def _ms(of: Distribution | None, name: str) -> str:
    return "-" if of is None else f"{getattr(of, name) * 1000:.1f}"


def notes_of(runs: Sequence[Simulated]) -> list[str]:
    """Return what a reader of the table must not miss."""
    notes = []
    for run in runs:
        of, name = run.summary, run.policy if run.rate is None else f"{run.policy} at {run.rate:g}/s"
        counts = {
            f"{of.refused} of {of.requests} requests are longer than what is served: refused": of.refused,
            f"{of.padding_share:.1%} of the tokens computed were padding": of.padding_share,
            f"{of.cached_share:.1%} of the prompt tokens were found in a prefix cache": of.cached_share,
        }
        notes += [f"{name}: {sentence}" for sentence, count in counts.items() if count]
    return notes


def as_json(
    settings: SimulateSettings, model: NamedModel, runs: Sequence[Simulated], notes: Sequence[str]
) -> dict[str, Any]:
    """Return everything as plain data. A request is a row of `request_fields`."""
    return {
        "format": FORMAT,
        "config": settings.model_dump(mode="json", exclude={"out"}),
        "model": {"name": model.name, "source": model.source},
        "notes": list(notes),
        "request_fields": _FIELDS,
        "runs": [
            {
                "policy": run.policy,
                "rate": run.rate,
                "summary": run.summary,
                "requests": [_row(request) for request in run.result.requests],
            }
            for run in runs
        ],
    }


def _row(request: RequestRecord) -> list[float | int | None]:
    first_s = request.token_times_s[0] if request.token_times_s else None
    return [
        _rounded(request.arrival.at_s),
        request.arrival.prompt_tokens,
        request.arrival.output_tokens,
        _rounded(request.first_scheduled_s),
        _rounded(first_s),
        _rounded(request.end_s),
        request.preemptions,
        request.cached_tokens,
    ]


def _rounded(moment_s: float | None) -> float | None:
    return None if moment_s is None else round(moment_s, _DIGITS)


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write the result; never half of it."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(msgspec.json.encode(result) + b"\n")
    unfinished.replace(path)
