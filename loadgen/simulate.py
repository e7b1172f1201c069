"""`loadgen simulate`: loads in virtual time, on the planner that serves."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadgen.server import CannotStart
from loadgen.simulate_plots import draw_latency
from loadgen.simulate_report import Simulated, as_json, notes_of, print_tables, write_json
from loadgen.simulate_settings import SimulateSettings
from loadgen.simulate_summary import summarise_simulation
from loadgen.simulate_workload import Workload, arrivals_of, workload_of
from loadgen.step_times import NamedModel, load_model
from shared.runtime.clock import monotonic
from shared.scheduling.policies import POLICIES
from shared.simulation.records import Setup, StepRecord
from shared.simulation.simulator import simulate as run_in_virtual_time
from shared.simulation.worker import Host

EXIT_OK = 0
EXIT_INTERRUPTED = 130


def simulate(settings: SimulateSettings) -> int:
    """Run every policy at every rate, print a table, write the files; return the exit status. Raises `CannotStart`."""
    model = _model(settings)
    workload = workload_of(settings)
    setups = {policy: setup_of(settings, model, workload, policy) for policy in settings.policies}
    _make_folder(settings.out)
    try:
        runs = _run_all(settings, setups, workload)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted, nothing is written")
        return EXIT_INTERRUPTED
    print_tables(runs, Console())
    notes = [*workload.notes, *notes_of(runs)]
    for note in notes:
        Console().print(f"note: {note}", highlight=False, soft_wrap=True)
    write_json(settings.out / "simulation.json", as_json(settings, model, runs, notes))
    draw_latency(runs, settings.out / "latency.png")
    Console(stderr=True).print(f"written to {settings.out}", highlight=False, soft_wrap=True)
    return EXIT_OK


def _model(settings: SimulateSettings) -> NamedModel:
    try:
        return load_model(settings.model)
    except ValueError as error:
        raise CannotStart(str(error)) from error


def setup_of(settings: SimulateSettings, model: NamedModel, workload: Workload, policy: str) -> Setup:
    """Return the pool that one policy runs on. Raises `CannotStart` if it could serve nobody."""
    kv_tokens = settings.kv_tokens or model.model.kv_tokens
    if kv_tokens is None:
        raise CannotStart(f"model {model.name} does not say how much KV memory there is: give --kv-tokens")
    if kv_tokens < workload.block_tokens:
        raise CannotStart(f"--kv-tokens {kv_tokens} are less than one block of {workload.block_tokens}")
    served = min(settings.max_model_len or workload.longest, kv_tokens)
    shortest = min(row.prompt_tokens + (settings.max_tokens or row.output_tokens) for row in workload.rows)
    if shortest > served:
        raise CannotStart(f"no request fits: the shortest has {shortest} tokens, {served} are served")
    stages = (settings.stages or model.model.stages) if policy == "orca" else 1
    return Setup(
        model.model,
        kv_tokens=kv_tokens,
        policy=policy,
        queue=settings.queue,
        kv=settings.kv,
        workers=settings.workers,
        plan_depth=settings.plan_depth,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len or workload.longest + _headroom(settings),
        block_tokens=workload.block_tokens,
        long_prefill_tokens=settings.long_prefill_tokens,
        tile_tokens=settings.tile_tokens,
        stages=stages,
        padded=settings.padded and policy == "static",
        one_way_s=settings.round_trip_ms / 2000,
    )


def _headroom(settings: SimulateSettings) -> int:
    """Return what requests may ask for beyond the longest answer that there will be."""
    return settings.max_tokens or 0


def _run_all(settings: SimulateSettings, setups: dict[str, Setup], workload: Workload) -> list[Simulated]:
    runs = []
    with _display(len(workload.rows)) as display:
        for rate in settings.rates:
            arrivals = arrivals_of(settings, workload, rate)
            for policy, setup in setups.items():
                display.begin(policy if rate is None else f"{policy} at {rate:g}/s")
                result = run_in_virtual_time(setup, arrivals, watch=display.watch)
                display.end(result.span_s)
                runs.append(Simulated(policy, rate, result, summarise_simulation(result)))
    order = {policy: number for number, policy in enumerate(POLICIES)}
    return sorted(runs, key=lambda run: (order[run.policy], run.rate or 0.0))


def _make_folder(folder: Path) -> None:
    """Find out before the runs, not after them, that the files cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotStart(f"cannot make a folder at {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise CannotStart(f"cannot write into {folder}")


# -- how far it is ----------------------------------------------------------------------------------------------------


class _Display(Protocol):
    def begin(self, name: str) -> None:
        """Show that a run begins."""

    def watch(self, step: StepRecord, host: Host) -> None:
        """Take note of a step."""

    def end(self, span_s: float) -> None:
        """Show that the run has ended, and what time it covered."""


class _Bar:
    def __init__(self, progress: Progress, requests: int) -> None:
        self._progress = progress
        self._requests = requests
        self._task = progress.add_task("", total=requests)

    def begin(self, name: str) -> None:
        self._progress.reset(self._task, total=self._requests, description=name)

    def watch(self, step: StepRecord, _host: Host) -> None:
        if step.ended:
            self._progress.advance(self._task, step.ended)

    def end(self, span_s: float) -> None:
        self._progress.update(self._task, completed=self._requests, description=f"{span_s:.0f} s simulated")


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._name = ""
        self._began_s = 0.0

    def begin(self, name: str) -> None:
        self._name, self._began_s = name, monotonic()

    def watch(self, step: StepRecord, _host: Host) -> None:
        """Show nothing: a log has a line per run."""

    def end(self, span_s: float) -> None:
        took_s = monotonic() - self._began_s
        self._console.print(
            f"{self._name}: {span_s:.0f} s simulated in {took_s:.1f} s", highlight=False, soft_wrap=True
        )


@contextmanager
def _display(requests: int) -> Iterator[_Display]:
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
        yield _Bar(progress, requests)
