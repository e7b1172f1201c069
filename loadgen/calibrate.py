"""``loadgen calibrate``: a running server's step times, measured, fitted, and written for the simulator."""

import asyncio
import sys
from collections import Counter

from rich.console import Console
from rich.table import Table

from loadgen.calibrate_fit import Fit, Nonsense, Point, Residual, fit
from loadgen.calibrate_measure import Measurements, measure
from loadgen.calibrate_settings import CalibrateSettings
from loadgen.run import EXIT_INTERRUPTED, EXIT_OK, check_writable
from loadgen.server import CannotStart
from loadgen.step_times import FORMAT, ModelFile, write_model
from shared.runtime.clock import monotonic

BAD_OFF = 0.25
"""A point that is missed by more than this is worth a warning."""


def calibrate(settings: CalibrateSettings) -> int:
    """Measure, print how well the model fits, write it; return the exit status. Raises `CannotStart`."""
    check_writable(settings.out)
    begun_s = monotonic()

    def say(line: str) -> None:
        sys.stderr.write(f"{monotonic() - begun_s:6.1f} s  {line}\n")

    try:
        measurements = asyncio.run(measure(settings, monotonic, say))
    except KeyboardInterrupt:
        sys.stderr.write("loadgen: interrupted, nothing is written\n")
        return EXIT_INTERRUPTED
    try:
        fitted = fit(measurements.points)
    except Nonsense as why:
        raise CannotStart(f"nothing is written: {why}") from why
    Console().print(residual_table(fitted))
    if fitted.worst_off > BAD_OFF:
        sys.stderr.write("loadgen: some points are met badly: was the machine busy otherwise?\n")
    write_model(as_file(settings, measurements, fitted), settings.out)
    sys.stderr.write(f"written to {settings.out}\n")
    return EXIT_OK


def residual_table(fitted: Fit) -> Table:
    """Return how well the model meets each point, as a table."""
    table = Table(title=f"Step times, ms; {fitted}", title_justify="left")
    table.add_column("")
    for name in ("measured", "predicted", "off"):
        table.add_column(name, justify="right")
    for residual in fitted.residuals:
        table.add_row(_name(residual.point), *_cells(residual))
    return table


def _name(point: Point) -> str:
    streams = f"decodes: {point.steps[0].decode_rows} at {point.context} positions"
    if point.kind == "decode":
        return streams
    if point.kind == "mixed":
        return f"{streams}, a prompt of {point.size}"
    return f"prompt of {point.size} tokens" + (f", {len(point.steps)} steps" if len(point.steps) > 1 else "")


def _cells(residual: Residual) -> tuple[str, str, str]:
    return f"{residual.point.ms:.1f}", f"{residual.predicted_ms:.1f}", f"{residual.off:+.1%}"


def as_file(settings: CalibrateSettings, measurements: Measurements, fitted: Fit) -> ModelFile:
    """Return the file for the simulator. It bears no date: the same measurements make the same bytes."""
    model, points = fitted.model, measurements.points
    kinds = Counter(point.kind for point in points)
    return ModelFile(
        format=FORMAT,
        name=measurements.model,
        source=(
            f"loadgen calibrate of {measurements.model} at {settings.url}: times of {kinds['prompt']} prompts, "
            f"{kinds['decode']} decode batches and {kinds['mixed']} mixed steps, {fitted}"
        ),
        assumptions=(
            f"A step has at most {settings.step_tokens} tokens (--step-tokens).",
            f"Batches of up to {settings.max_streams} streams were asked for, within {settings.budget_s:g} s.",
            f"A request takes {fitted.overhead_ms:.1f} ms beyond the steps to its first token: no part of the model.",
            "Least squares of relative deviations, no number below 0.",
            *(f"Left out: {sentence}." for sentence in measurements.left_out),
            *fitted.left_out,
        ),
        tokens_ms=tuple(model.tokens_ms),
        decode_rows_ms=tuple(model.decode_rows_ms),
        decode_read_ms_per_token=model.decode_read_ms_per_token,
        prefill_read_ms_per_token=model.prefill_read_ms_per_token,
        prefill_pair_ms=model.prefill_pair_ms,
        kv_tokens=settings.kv_tokens,
    )
