"""A run for people, as tables, and for programs, as JSON."""

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from loadgen.client import Record
from loadgen.goodput import Bounds
from loadgen.measure import Distribution, time_of
from loadgen.summary import Goodput, Latency, Summary

FORMAT = "loadgen-run/1"
_DISTRIBUTION = "slipstream-serving"


def print_tables(summary: Summary, console: Console) -> None:
    """Print what a run showed."""
    console.print(_throughput_table(summary))
    if summary.succeeded:
        console.print(_latency_table(summary.latency))
    if summary.failures:
        console.print(_failure_table(summary.failures))
    for note in summary.notes:
        console.print(f"note: {note}", highlight=False)


def _throughput_table(summary: Summary) -> Table:
    table = Table(title="Throughput", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rate = summary.throughput
    counts = f"{summary.succeeded} ok, {summary.failed} failed"
    counts += f", {summary.cancelled} cancelled on purpose" if summary.cancelled else ""
    counts += f", {summary.interrupted} interrupted" if summary.interrupted else ""
    counts += f", {summary.warmup_failed} of the warm-up failed" if summary.warmup_failed else ""
    table.add_row("requests", counts)
    table.add_row("run", f"{summary.run_s:.2f} s")
    table.add_row("requests / s", f"{rate.requests_per_s:.2f}")
    table.add_row("output tokens / s", f"{rate.output_tokens_per_s:.1f}")
    table.add_row("total tokens / s", f"{rate.total_tokens_per_s:.1f}")
    if summary.goodput is not None:
        table.add_row(f"good requests / s ({_promises(summary.goodput.bounds)})", _goodput(summary.goodput))
    return table


def _promises(bounds: Bounds) -> str:
    named = {"TTFT": bounds.ttft_s, "TBT": bounds.tbt_s, "TPOT": bounds.tpot_s}
    return ", ".join(f"{name} ≤ {limit_s * 1000:g} ms" for name, limit_s in named.items() if limit_s is not None)


def _goodput(goodput: Goodput) -> str:
    share = f"{goodput.good / goodput.sent:.1%}" if goodput.sent else "none"
    return f"{goodput.requests_per_s:.2f} ({share} of {goodput.sent})"


def _latency_table(latency: Latency) -> Table:
    table = Table(title="Latency, ms", title_justify="left")
    table.add_column("")
    for name in ("P50", "P90", "P99", "mean", "max"):
        table.add_column(name, justify="right")
    rows = {
        "TTFT": latency.ttft,
        "TTFT from intended": latency.ttft_from_intended,
        "TBT (per token)": latency.tbt,
        "TPOT (per request)": latency.tpot,
        "longest gap": latency.max_gap,
        "E2E": latency.e2e,
        "E2E from intended": latency.e2e_from_intended,
        "E2E / token": latency.normalised,
        "send lag": latency.send_lag,
    }
    for name, of in rows.items():
        table.add_row(name, *_milliseconds(of))
    return table


def _milliseconds(of: Distribution | None) -> tuple[str, ...]:
    if of is None:
        return ("-",) * 5
    return tuple(f"{value * 1000:.1f}" for value in (of.p50, of.p90, of.p99, of.mean, of.largest))


def _failure_table(failures: Mapping[str, int]) -> Table:
    table = Table(title="Failures", title_justify="left")
    table.add_column("kind")
    table.add_column("requests", justify="right")
    for kind, count in failures.items():
        table.add_row(kind, str(count))
    return table


def machine() -> dict[str, Any]:
    """Return what a reader must know of the machine that the load came from."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "loadgen": _version(),
        "aiohttp": metadata.version("aiohttp"),
    }


def _version() -> str:
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "not installed: run from its source"


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    if described.exists():
        for line in described.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def row(record: Record, start_s: float, bounds: Bounds | None = None) -> dict[str, Any]:
    """Return one request as plain data: moments in seconds after the start of the run, durations in seconds.

    Whether it was good is null where nothing was promised.
    """
    answer, request = record.answer, record.request

    def after_start(moment_s: float | None) -> float | None:
        return None if moment_s is None else round(moment_s - start_s, 6)

    timing = time_of(record) if record.outcome == "ok" else None
    return {
        "index": request.index,
        "outcome": record.outcome,
        "failure": None if record.failure is None else record.failure._asdict() | {"name": record.failure.name},
        "prompt_tokens_sent": request.prompt_tokens,
        "max_tokens": request.output_tokens,
        "intended_s": after_start(record.intended_s),
        "sent_s": after_start(record.sent_s),
        "headers_s": after_start(record.headers_s),
        "first_event_s": after_start(answer.first_event_s),
        "first_text_s": after_start(answer.first_text_s),
        "done_s": after_start(record.done_s),
        "finish_reason": answer.finish_reason,
        "usage": answer.usage,
        "ttft_s": timing and timing.ttft_s,
        "ttft_from_intended_s": timing and timing.ttft_from_intended_s,
        "e2e_s": timing and timing.e2e_s,
        "e2e_from_intended_s": timing and timing.e2e_from_intended_s,
        "tpot_s": timing and timing.tpot_s,
        "normalised_s": timing and timing.normalised_s,
        "max_gap_s": timing and timing.max_gap_s,
        "tokens_known_by": timing and timing.tokens_known_by,
        "is_good": None if bounds is None else bounds.are_met_by(record),
        "chunks": [(after_start(chunk.at_s), chunk.tokens_so_far, chunk.has_text) for chunk in answer.chunks],
    }


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result, whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    unfinished.replace(path)
