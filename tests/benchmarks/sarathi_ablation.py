"""Sarathi-Serve's ablation (Table 4) in virtual time: what chunks and what hybrid batches do, alone and together.

Run from the root of the project: ``python -m tests.benchmarks.sarathi_ablation SHAREGPT.csv [SEEDS]``, where the file
has the lengths of openchat_sharegpt4 (``num_prefill_tokens,num_decode_tokens,...``). Takes about a minute.

Model: Yi-34B on 2 A100, from the artefact's step times. 128 requests at Poisson times, at most 128 at once, one worker;
sharegpt at 1.0 a second with lengths from the file, arxiv at 0.5 a second with lognormal lengths fitted to the paper's
medians and 90th percentiles, cut at 16,384 in total. The budget is the paper's 1,024 and the artefact's 512.

Twice: with the artefact's step times as they are, and with decodes that cost no more than being tokens and reading
their context. The artefact's own figures contradict each other here: its decode series has 88 ms for 32 rows at 1,022
positions, while the SLOs of the paper (5 x and 25 x are 0.2 and 1 s) mean 40 ms for 32 rows at 4,096.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from loadgen.simulate_lengths import LogNormal, Pair, draw_pairs, read_pairs, sample_pairs
from loadgen.simulate_summary import SimulationSummary, summarise_simulation
from loadgen.simulate_workload import poisson_arrivals
from loadgen.step_times import load_model
from shared.simulation.model import StepTimeModel
from shared.simulation.records import Setup
from shared.simulation.simulator import simulate

REQUESTS = 128
LONGEST_SHAREGPT, LONGEST_ARXIV = 8192, 16_384
POLICIES = ("hybrid-only", "chunked-only", "sarathi")
BUDGETS = (1024, 512)
PAPER = {
    "sharegpt": {"hybrid-only": (0.53, 0.68), "chunked-only": (1.04, 0.17), "sarathi": (0.76, 0.14)},
    "arxiv": {"hybrid-only": (3.78, 1.38), "chunked-only": (5.38, 0.20), "sarathi": (3.90, 0.17)},
}
AS_MEASURED = load_model("sarathi-yi-34b").model
MODELS = {
    "step times as measured": AS_MEASURED,
    "decodes as the paper's SLOs imply": replace(AS_MEASURED, decode_rows_ms=((0, 0.0),)),
}


@dataclass(frozen=True, slots=True)
class Load:
    """Requests by their lengths, drawn anew for each seed, and their rate. ``longest``: positions that are served."""

    name: str
    longest: int
    draw: Callable[[np.random.Generator], list[Pair]]
    rate: float


def arxiv(source: np.random.Generator) -> list[Pair]:
    """Return lengths like those of arxiv_summarization (§5)."""
    pairs = draw_pairs(LogNormal(7059, 12985, LONGEST_ARXIV), LogNormal(208, 371, LONGEST_ARXIV), REQUESTS, source)
    return [(min(prompt, LONGEST_ARXIV - output), output) for prompt, output in pairs]


def run(model: StepTimeModel, policy: str, budget: int, load: Load, seed: int) -> SimulationSummary:
    """Serve the requests. Hybrid-only never cuts a prompt: its budget is the longest request, as in the artefact."""
    setup = Setup(
        model,
        kv_tokens=model.kv_tokens or 0,
        policy=policy,
        max_num_batched_tokens=budget,
        max_num_seqs=128,
        max_model_len=load.longest,
    )
    pairs = load.draw(np.random.default_rng(seed))
    return summarise_simulation(simulate(setup, poisson_arrivals(pairs, load.rate, seed)))


def figures(model: StepTimeModel, policy: str, budget: int, load: Load, seeds: int) -> tuple[float, float]:
    """Return the median over the seeds of P50 TTFT and P99 TBT, in seconds."""
    found = [run(model, policy, budget, load, seed) for seed in range(seeds)]
    return (
        median(summary.ttft_s.p50 for summary in found if summary.ttft_s),
        median(summary.tbt_s.p99 for summary in found if summary.tbt_s),
    )


def table(model_name: str, load: Load, seeds: int) -> None:
    """Print one workload, the paper beside ours for each budget."""
    heads = "".join(f" TTFT P50 @{budget} | TBT P99 @{budget} |" for budget in BUDGETS)
    print(f"\n## {load.name} at {load.rate:g} a second, {model_name}: seconds, median of {seeds} seeds\n")
    print(f"| scheduler | paper TTFT P50 | paper TBT P99 |{heads}")
    print("|---|---|---|" + "---|---|" * len(BUDGETS))
    for policy in POLICIES:
        ours = [figures(MODELS[model_name], policy, budget, load, seeds) for budget in BUDGETS]
        cells = "".join(f" {ttft_s:.2f} | {tbt_s:.2f} |" for ttft_s, tbt_s in ours)
        paper_ttft_s, paper_tbt_s = PAPER[load.name][policy]
        print(f"| {policy} | {paper_ttft_s:.2f} | {paper_tbt_s:.2f} |{cells}", flush=True)


def main(path: Path, seeds: int) -> None:
    """Print both workloads under both models."""
    rows = read_pairs(path)
    loads = (
        Load("sharegpt", LONGEST_SHAREGPT, lambda source: sample_pairs(rows, REQUESTS, source), 1.0),
        Load("arxiv", LONGEST_ARXIV, arxiv, 0.5),
    )
    for model_name in MODELS:
        for load in loads:
            table(model_name, load, seeds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", type=Path, metavar="SHAREGPT.csv", help="lengths of openchat_sharegpt4")
    parser.add_argument("seeds", type=int, nargs="?", default=11, metavar="SEEDS", help="runs whose median is taken")
    asked = parser.parse_args()
    main(asked.lengths, asked.seeds)
