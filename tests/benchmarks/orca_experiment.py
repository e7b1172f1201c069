"""ORCA's experiment (§6.2, Figure 10) in virtual time: median latency per generated token against the request rate.

Run from the root of the project: ``python -m tests.benchmarks.orca_experiment [SEED]``. Takes some minutes.

Model: ORCA's 175B on 2 pipeline stages. Requests: input U(32, 512), output U(1, 128), no EOS, Poisson arrivals.
``static``: request-level batching as FasterTransformer does it: one batch at a time through both stages, ended rows
computed and answered with the longest, prompts padded to the longest, 2,048 positions set aside for each.
``orca``: Algorithm 1, max_tokens set aside, a batch in flight per stage.

Not modelled, all in static's favour: FasterTransformer begins a batch as if every prompt were as short as the shortest
and feeds the rest one token a step, and its engine is slower (up to 47 % by the paper, for want of a control plane of
its own). Not modelled, in orca's favour: attention is not batched across requests, and a plan takes no time.
"""

import argparse
from collections.abc import Iterable

import numpy as np

from loadgen.lengths import Span
from loadgen.simulate_lengths import Pair, draw_pairs
from loadgen.simulate_summary import SimulationSummary, summarise_simulation
from loadgen.simulate_workload import poisson_arrivals
from loadgen.step_times import load_model
from shared.simulation.core import RESERVE_LONGEST
from shared.simulation.records import Setup
from shared.simulation.simulator import simulate

REQUESTS = {"static": 500, "orca": 2000}
"""Enough for each to be steady: orca's rates are so much higher that as many would be over before it is."""
STATIC_CAPS = (1, 2, 4, 8, 16, 23)
ORCA_CAPS = (1, 8, 16, 32, 128)
PRECISION = 0.02
PAPER_MS, PAPER_STATIC, PAPER_ORCA = 190.0, 0.185, 6.81
MODEL = load_model("orca-175b").model


def setup_of(policy: str, cap: int) -> Setup:
    """Return one worker: 16 GPUs."""
    static = policy == "static"
    return Setup(
        MODEL,
        kv_tokens=MODEL.kv_tokens or 0,
        policy=policy,
        kv=RESERVE_LONGEST if static else "reserve",
        max_num_batched_tokens=128 * 512,  # no bound: neither has one but the batch cap
        max_num_seqs=cap,
        max_model_len=2048,
        stages=1 if static else MODEL.stages,
        padded=static,
        block_tokens=1,
    )


def run(policy: str, cap: int, pairs: list[Pair], rate: float, seed: int) -> SimulationSummary:
    """Serve the requests at one rate."""
    some = pairs[: REQUESTS[policy]]
    return summarise_simulation(simulate(setup_of(policy, cap), poisson_arrivals(some, rate, seed)))


def latency_ms(summary: SimulationSummary) -> float:
    """Return the median latency per generated token."""
    return summary.normalised_s.p50 * 1000 if summary.normalised_s else float("inf")


def rate_at(policy: str, cap: int, pairs: list[Pair], most_ms: float, seed: int) -> float:
    """Return the highest rate with a median latency per token of ``most_ms``; 0 if even the lowest exceeds it."""
    low, high = 0.05, 0.1
    if latency_ms(run(policy, cap, pairs, low, seed)) > most_ms:
        return 0.0
    while latency_ms(run(policy, cap, pairs, high, seed)) <= most_ms and high < 1000:
        low, high = high, high * 2
    while high / low > 1 + PRECISION:
        middle = (low * high) ** 0.5
        if latency_ms(run(policy, cap, pairs, middle, seed)) <= most_ms:
            low = middle
        else:
            high = middle
    return low


def best(policy: str, caps: Iterable[int], pairs: list[Pair], most_ms: float, seed: int) -> tuple[float, int]:
    """Print the rate of each batch cap and return the best with its cap."""
    rates = [(rate_at(policy, cap, pairs, most_ms, seed), cap) for cap in caps]
    cells = ", ".join(f"{policy}({cap}) {rate:.3f}" for rate, cap in rates)
    print(f"req/s at {most_ms:.0f} ms per token: {cells}", flush=True)
    return max(rates, key=lambda found: (found[0], -found[1]))  # of equals the smaller batch


def compare(title: str, pairs: list[Pair], seed: int) -> tuple[float, float, float]:
    """Print what both policies carry at twice the unloaded latency; return that latency and both rates."""
    unloaded_ms = latency_ms(run("orca", 1, pairs, 0.001, seed))
    print(f"\n## {title}\n\nunloaded: {unloaded_ms:.1f} ms per token\n", flush=True)
    static, static_cap = best("static", STATIC_CAPS, pairs, 2 * unloaded_ms, seed)
    orca, orca_cap = best("orca", ORCA_CAPS, pairs, 2 * unloaded_ms, seed)
    print(f"\nbest: static({static_cap}) {static:.3f} req/s, orca({orca_cap}) {orca:.2f} req/s: {orca / static:.1f} x")
    print(f"\nMedian latency per token, ms\n\n| req/s | static({static_cap}) | orca({orca_cap}) |\n|---|---|---|")
    for rate in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0):
        cells = (latency_ms(run(p, cap, pairs, rate, seed)) for p, cap in (("static", static_cap), ("orca", orca_cap)))
        print(f"| {rate:g} | " + " | ".join(f"{cell:,.0f}" for cell in cells) + " |", flush=True)
    return unloaded_ms, static, orca


def main(seed: int) -> None:
    """Print the experiment and its control."""
    source = np.random.default_rng(seed)
    mixed = draw_pairs(Span(32, 512), Span(1, 128), max(REQUESTS.values()), source)
    unloaded_ms, static, orca = compare("Mixed lengths: U(32, 512) in, U(1, 128) out", mixed, seed)
    print("\n| | paper | here |\n|---|---|---|")
    print(f"| unloaded, ms per token | {PAPER_MS / 2:.0f} | {unloaded_ms:.1f} |")
    print(f"| static, req/s at twice that | {PAPER_STATIC} | {static:.3f} |")
    print(f"| orca, req/s at twice that | {PAPER_ORCA} | {orca:.2f} |")
    print(f"| factor | {PAPER_ORCA / PAPER_STATIC:.1f} | {orca / static:.1f} |")
    compare("Control, all alike: 272 in, 64 out", [(272, 64)] * max(REQUESTS.values()), seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, nargs="?", default=1, metavar="SEED", help="of lengths and arrivals")
    main(parser.parse_args().seed)
