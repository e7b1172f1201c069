"""Shows how a run goes, on stderr: a bar for people, a line now and then for logs."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadgen.drive import Load
from shared.runtime.clock import Clock

_BAR_EVERY_S = 0.25
_LINE_EVERY_S = 5.0


class Display(Protocol):
    """Something that can be told how far a run is."""

    every_s: float

    def show(self, load: Load, elapsed_s: float) -> None:
        """Show it."""


class _Bar:
    every_s = _BAR_EVERY_S

    def __init__(self, progress: Progress, requests: int, duration_s: float) -> None:
        self._progress = progress
        self._requests = requests
        self._duration_s = duration_s
        self._task = progress.add_task("", total=1.0)

    def show(self, load: Load, elapsed_s: float) -> None:
        # the run ends at whichever bound comes first; after the time is up it still waits for those in flight
        done = len(load.records)
        by_time = elapsed_s / self._duration_s * (1 if load.in_flight == 0 else done / load.sent)
        share = min(1.0, max(done / self._requests if self._requests else 0.0, by_time))
        self._progress.update(self._task, completed=share, description=_words(load))


class _Lines:
    every_s = _LINE_EVERY_S

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, load: Load, elapsed_s: float) -> None:
        self._console.print(f"{elapsed_s:6.0f} s  {_words(load)}", highlight=False, soft_wrap=True)


def _words(load: Load) -> str:
    counts = f"{len(load.records)} done, {load.in_flight} running, {load.failed} failed"
    return f"{counts}, {load.output_tokens} tokens generated"


@contextmanager
def display(requests: int, duration_s: float) -> Iterator[Display]:
    """Give the display that suits stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress, requests, duration_s)


async def keep_showing(shown_by: Display, load: Load, clock: Clock) -> None:
    """Show how the load goes until cancelled."""
    start_s = clock()
    while True:
        await asyncio.sleep(shown_by.every_s)
        shown_by.show(load, clock() - start_s)
