"""Pictures of a simulation. The same numbers give the same bytes: nothing in a file says when it was drawn."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from loadgen.measure import Distribution
from loadgen.simulate_report import Simulated
from loadgen.simulate_summary import SimulationSummary, gaps_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHARES = np.linspace(0, 100, 401)
_Samples = Callable[[Simulated], npt.NDArray[np.float64]]
_Of = Callable[[SimulationSummary], Distribution | None]


def draw_latency(runs: Sequence[Simulated], path: Path) -> None:
    """Draw TTFT, TBT and E2E per token into a PNG: against the rate if there are several, else as distributions."""
    # Only here: it takes most of a second, and whoever wants a table has not installed it for that.
    import matplotlib as mpl  # noqa: PLC0415 - as said above

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - must follow the choice of what draws

    has_rates = len({run.rate for run in runs}) > 1
    with mpl.rc_context({"font.family": "DejaVu Sans", "svg.hashsalt": "", "path.simplify": True}):
        figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
        draw = _draw_by_rate if has_rates else _draw_distributions
        draw(runs, axes)
        axes[0].legend(fontsize="small")
        figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
        plt.close(figure)


def _draw_by_rate(runs: Sequence[Simulated], axes: Sequence["Axes"]) -> None:
    panels: dict[str, _Of] = {
        "TTFT, s": lambda summary: summary.ttft_s,
        "TBT, s": lambda summary: summary.tbt_s,
        "E2E / token, s": lambda summary: summary.normalised_s,
    }
    for axis, (title, of) in zip(axes, panels.items(), strict=True):
        for number, policy in enumerate(dict.fromkeys(run.policy for run in runs)):
            points = [(run.rate, of(run.summary)) for run in runs if run.policy == policy]
            known = [(rate, found) for rate, found in points if rate is not None and found is not None]
            rates = [rate for rate, _ in known]
            axis.plot(rates, [found.p50 for _, found in known], f"C{number}o-", label=f"{policy} P50")
            axis.plot(rates, [found.p99 for _, found in known], f"C{number}^--", label=f"{policy} P99")
        axis.set(title=title, xlabel="requests / s", yscale="log")
        axis.grid(visible=True, alpha=0.3)


def _draw_distributions(runs: Sequence[Simulated], axes: Sequence["Axes"]) -> None:
    panels: dict[str, _Samples] = {"TTFT, s": _ttfts_s, "TBT, s": _gaps_s, "E2E / token, s": _normalised_s}
    for axis, (title, samples_of) in zip(axes, panels.items(), strict=True):
        for run in runs:
            samples = samples_of(run)
            if samples.size:
                axis.plot(np.percentile(samples, _SHARES), _SHARES, label=run.policy)
        axis.set(title=title, ylabel="% of all")
        axis.grid(visible=True, alpha=0.3)


def _ttfts_s(run: Simulated) -> npt.NDArray[np.float64]:
    return np.array([request.ttft_s for request in run.result.finished], dtype=np.float64)


def _gaps_s(run: Simulated) -> npt.NDArray[np.float64]:
    return gaps_s(run.result.finished)


def _normalised_s(run: Simulated) -> npt.NDArray[np.float64]:
    return np.array([(r.e2e_s or 0.0) / len(r.token_times_s) for r in run.result.finished], dtype=np.float64)
