"""`loadgen run`: one load against one server, measured."""

import asyncio
import os
import secrets
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from loadgen import report
from loadgen.arrivals import poisson_times_s
from loadgen.client import Client
from loadgen.drive import Load
from loadgen.progress import display, keep_showing
from loadgen.prompts import draw_requests
from loadgen.server import CannotStart, choose_model, open_session
from loadgen.settings import RunSettings
from loadgen.summary import Run, Summary, summarise
from shared.runtime.clock import Clock, monotonic

EXIT_OK = 0
EXIT_FAILURES = 1
EXIT_CANNOT_START = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Result:
    """What a run leaves behind."""

    run: Run
    summary: Summary
    model: str
    seed: int
    started_at: str
    was_interrupted: bool


def run(settings: RunSettings) -> int:
    """Run, print tables, write the result; return the exit status. Raises `CannotStart`."""
    check_writable(settings.out)
    result = asyncio.run(measure(settings, monotonic))
    report.print_tables(result.summary, Console())
    report.write_json(settings.out, as_json(settings, result))
    Console(stderr=True).print(f"written to {settings.out}", highlight=False, soft_wrap=True)
    if result.was_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if result.summary.all_went_well else EXIT_FAILURES


def check_writable(path: Path) -> None:
    """Find out before a run, not after it, that its result cannot be written. Raises `CannotStart`."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise CannotStart(f"cannot write a file at {path}")


def as_json(settings: RunSettings, result: Result) -> dict[str, Any]:
    """Return the whole result as plain data, without the API key."""
    run_ = result.run
    config = settings.model_dump(mode="json", exclude={"api_key"})
    return {
        "format": report.FORMAT,
        "started_at": result.started_at,
        "was_interrupted": result.was_interrupted,
        "config": config | {"model": result.model, "seed": result.seed},
        "machine": report.machine(),
        "percentiles": "exact, linear interpolation",
        "summary": result.summary,
        "requests": [
            report.row(record, run_.start_s, run_.bounds)
            for record in sorted(run_.records, key=lambda r: r.request.index)
        ],
    }


async def measure(settings: RunSettings, clock: Clock) -> Result:
    """Send the load that the settings describe and return what came of it."""
    seed = secrets.randbelow(2**32) if settings.seed is None else settings.seed
    key = settings.api_key.get_secret_value() if settings.api_key else None
    async with open_session(key) as session:
        model = await choose_model(session, settings.url, settings.model)
        target = settings.target(model)
        rehearsal = Load(Client(session, target, clock), target, clock)
        load = Load(Client(session, target, clock), target, clock)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        was_interrupted = await _interruptible(_play(settings, seed, rehearsal, load, clock))
    run_ = Run(
        records=load.records,
        start_s=load.start_s,
        is_open_loop=settings.rate is not None,
        interrupted=load.in_flight,
        warmup=rehearsal.records,
        asked_full_length=settings.ignore_eos,
        bounds=settings.bounds,
    )
    return Result(run_, summarise(run_), model, seed, started_at, was_interrupted)


async def _play(settings: RunSettings, seed: int, rehearsal: Load, load: Load, clock: Clock) -> None:
    """Send what is not measured, then what is, each with prompts of its own."""
    for_arrivals, for_warmup, for_requests = np.random.SeedSequence(seed).spawn(3)
    warmup = islice(draw_requests(settings.workload, for_warmup), settings.warmup)
    await rehearsal.closed_loop(warmup, concurrency=settings.sessions, duration_s=settings.duration_s)
    requests = islice(draw_requests(settings.workload, for_requests), settings.requests)
    if settings.rate is None:
        sending = load.closed_loop(requests, concurrency=settings.sessions, duration_s=settings.duration_s)
        await _shown(sending, load, settings.requests, settings.duration_s, clock)
        return
    arrivals_s = poisson_times_s(settings.rate, for_arrivals, limit=settings.requests, duration_s=settings.duration_s)
    await _shown(load.open_loop(requests, arrivals_s), load, len(arrivals_s), settings.duration_s, clock)


async def _shown(
    sending: Coroutine[Any, Any, None], load: Load, requests: int, duration_s: float, clock: Clock
) -> None:
    with display(requests, duration_s) as shown_by:
        async with asyncio.TaskGroup() as group:
            showing = group.create_task(keep_showing(shown_by, load, clock))
            await sending
            showing.cancel()


async def _interruptible(work: Coroutine[Any, Any, None]) -> bool:
    """Do the work; at SIGINT or SIGTERM give it up. Return whether it was given up."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        try:
            await asyncio.wait({task})
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
    return task.cancelled()
