"""Prefix hits on Mooncake's conversation trace in virtual time, by the planner's own prefix cache.

Run from the root of the project: ``python -m tests.benchmarks.prefix_hits TRACE [--seed N] [--model NAME_OR_FILE]
[--rate R]``. Takes about a minute.

Lengths are 1/32 of the trace's, so that its hash blocks of 512 tokens are blocks of 16; under load prompts are cut at
1,984 tokens and answers at 64, which makes 2,048 positions. Multiply KV memory by 32 for that of the unscaled trace.

First the requests come one after another, each when the one before has ended, to a worker that forgets nothing. What is
found then differs from the trace's own hit rate (`loadgen.trace_prefixes.look_up`) by blocks that can be counted, and
are: with all lengths, and with cut ones. Then they come at a rate, to workers with less memory, with the cache and
without. The trace keeps its own gaps, stretched to the rate. Step times are a real model's for prompts 1/32 as long:
compare TTFT with and without, the seconds alone are nobody's.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import takewhile
from pathlib import Path

import numpy as np

from loadgen.arrivals import poisson_times_s
from loadgen.simulate_summary import SimulationSummary, summarise_simulation
from loadgen.step_times import load_model
from loadgen.trace_formats import HASH_BLOCK_TOKENS, TraceRequest
from loadgen.trace_prefixes import PrefixHits, look_up
from loadgen.traces import Reshape, Trace
from shared.paging.pool import BlockPool
from shared.simulation.model import StepTimeModel
from shared.simulation.records import Arrival, Setup, StepRecord
from shared.simulation.simulator import simulate
from shared.simulation.worker import Host

SCALE = Fraction(1, 32)
BLOCK_TOKENS = int(HASH_BLOCK_TOKENS * SCALE)
MOST_PROMPT, MOST_OUTPUT = 1984, 64
LONGEST_S = 1000.0
"""No request takes so long when it is alone."""
A_MS_A_STEP = StepTimeModel(tokens_ms=((1, 1.0),))
LIVE_KV_TOKENS = 131_072
"""As much as a live worker takes at most."""
KV_TOKENS = (6144, 16_384, LIVE_KV_TOKENS)
"""The first ones are three and eight requests of full length."""
ROOMY = 0.5
"""A pool never fuller than this kept nobody waiting: more memory changes nothing, without a cache."""
HEAD = (
    "| arrivals | req/s | workers | KV tokens each | room for | blocks found | evicted "
    "| TTFT P50, s | without | TTFT P99, s | without | preempted | without |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


# -- what must be found -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Account:
    """Blocks of prompt looked up one after another, and why some that had been seen are computed again all the same.

    ``partial``: the last block is not full, and only full ones have a name. ``whole``: all of the prompt is cached, but
    the last token is always computed, and its block with it. ``of_answers``: at most so many more would be found if
    every next turn repeated its answer word for word: the trace does not say what an answer's blocks are called.
    """

    own: PrefixHits
    distinct: int
    partial: int
    whole: int
    of_answers: int

    @property
    def hits(self) -> int:
        """Blocks that the planner must find."""
        return self.own.hits - self.partial - self.whole


def account_of(rows: Sequence[TraceRequest], block_tokens: int) -> Account:
    """Count what must be found when each request ends before the next one comes, and nothing is forgotten."""
    seen: set[int] = set()
    with_answer: dict[int, int] = {}
    partial = whole = of_answers = 0
    for row in rows:
        leading = sum(1 for _ in takewhile(seen.__contains__, row.hash_ids))
        useful = (row.prompt_tokens - 1) // block_tokens
        full = row.prompt_tokens // block_tokens
        partial += leading > full
        whole += full >= leading > useful
        if 0 < leading < useful:
            of_answers += max(0, min(useful, with_answer.get(row.hash_ids[leading - 1], 0)) - leading)
        seen.update(row.hash_ids)
        if full:
            blocks = (row.prompt_tokens + row.output_tokens - 1) // block_tokens  # the last token is never fed
            last = row.hash_ids[full - 1]
            with_answer[last] = max(blocks, with_answer.get(last, 0))
    return Account(look_up(rows), len(seen), partial, whole, of_answers)


# -- what is found ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """What newcomers found in their workers' caches, and what everyone saw."""

    hits: int
    evictions: int
    summary: SimulationSummary


@dataclass(slots=True)
class _Pools:
    """The pools of all workers that computed something."""

    pools: dict[int, BlockPool] = field(default_factory=dict)

    def watch(self, _step: StepRecord, host: Host) -> None:
        self.pools[host.number] = host.view.pool


def setup_of(model: StepTimeModel, workers: int, kv_tokens: int) -> Setup:
    """Return a pool with the defaults of the live service."""
    return Setup(
        model,
        kv_tokens=kv_tokens,
        workers=workers,
        plan_depth=2,
        max_model_len=MOST_PROMPT + MOST_OUTPUT,
        block_tokens=BLOCK_TOKENS,
        one_way_s=0.00025,
    )


def serve(setup: Setup, rows: Sequence[TraceRequest], times_s: Sequence[float], *, shares: bool = True) -> Found:
    """Serve the requests at these times; unless they share, nobody's blocks have a name."""
    arrivals = [
        Arrival(at_s, row.prompt_tokens, row.output_tokens, row.output_tokens, prefix=row.hash_ids if shares else ())
        for at_s, row in zip(times_s, rows, strict=True)
    ]
    workers = _Pools()
    result = simulate(setup, arrivals, watch=workers.watch)
    if len(result.finished) < len(rows):
        raise AssertionError(f"{len(rows) - len(result.finished)} requests never ended")
    hits = sum(request.cached_tokens for request in result.requests) // setup.block_tokens
    evictions = sum(pool.evictions for pool in workers.pools.values())
    return Found(hits, evictions, summarise_simulation(result))


def one_after_another(setup: Setup, rows: Sequence[TraceRequest]) -> Found:
    """Let each request come when the one before has ended. Raises AssertionError if one had not."""
    found = serve(setup, rows, [index * LONGEST_S for index in range(len(rows))])
    if found.summary.e2e_s is None or found.summary.e2e_s.largest >= LONGEST_S:
        raise AssertionError(f"a request took longer than {LONGEST_S} s and met the next one")
    return found


def times_of_trace(rows: Sequence[TraceRequest], rate: float) -> list[float]:
    """Return the trace's own times, its gaps stretched so that their mean rate is this one."""
    times_s = [row.at_s or 0.0 for row in rows]
    stretch = len(rows) / (times_s[-1] * rate)
    return [at_s * stretch for at_s in times_s]


# -- what is printed --------------------------------------------------------------------------------------------------


def explain(title: str, account: Account, found: Found) -> None:
    """Print what lies between the trace's own hit rate and the planner's. Exits if anything is left unexplained."""

    def share(blocks: int) -> str:
        return f"{blocks:,}, {blocks / account.own.blocks:.2%}"

    print(f"One after another, nothing forgotten, {title}:\n")
    print(f"- seen before: {share(account.own.hits)} of {account.own.blocks:,} blocks")
    print(f"- of these in last blocks that are not full, which have no name: {share(account.partial)}")
    print(f"- and in full last blocks of prompts seen whole, as the last token is computed: {share(account.whole)}")
    print(f"- which leaves {share(account.hits)}; the planner found **{share(found.hits)}**")
    print(f"- of all tokens of prompts it found {found.summary.cached_share:.2%}")
    print(
        f"- the trace does not name blocks of answers; next turns could find at most {share(account.of_answers)} more"
    )
    print(flush=True)
    if found.hits != account.hits:
        raise SystemExit(f"{found.hits - account.hits:+,} blocks are not explained")


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive: a name, their rate, their times, and how many workers serve them."""

    name: str
    rate: float
    times_s: Sequence[float]
    workers: int


def cells_of(load: Load | None, setup: Setup, account: Account, found: Found) -> list[str]:
    """Return the first cells of a row, up to what was evicted. No load: one after another."""
    name, rate = ("one after another", "-") if load is None else (load.name, f"{load.rate:g}")
    room = min(1.0, setup.workers * setup.kv_tokens / BLOCK_TOKENS / account.distinct)
    share = f"{found.hits / account.own.blocks:.1%}"
    return [name, rate, str(setup.workers), f"{setup.kv_tokens:,}", f"{room:.1%}", share, f"{found.evictions:,}"]


def compared(found: Found, without: Found) -> list[str]:
    """Return the rest of the cells: what the cache is worth."""
    cells = []
    for name in ("p50", "p99"):
        cells += [f"{getattr(one.summary.ttft_s, name):.2f}" for one in (found, without)]
    return [*cells, *(f"{one.summary.preemptions:,}" for one in (found, without))]


def show_under_load(
    load: Load, model: StepTimeModel, rows: Sequence[TraceRequest], account: Account, sizes: Sequence[int]
) -> None:
    """Serve one load with each size of memory, from small to large, with the cache and without; print the rows."""
    without: Found | None = None
    for kv_tokens in sizes:
        setup = setup_of(model, load.workers, kv_tokens)
        found = serve(setup, rows, load.times_s)
        if without is None or without.summary.kv_peak > ROOMY:
            without = serve(setup, rows, load.times_s, shares=False)
        show([*cells_of(load, setup, account, found), *compared(found, without)])


def show(cells: Sequence[str]) -> None:
    """Print a row of the table."""
    print("| " + " | ".join(cells) + " |", flush=True)


def look_up_alone(path: Path, reshape: Reshape) -> tuple[list[TraceRequest], Account, Found, Setup]:
    """Serve the trace, so reshaped, one request after another with memory for everything; print the account."""
    trace = Trace(path, reshape)
    rows = [*trace]
    account = account_of(rows, reshape.block_tokens)
    setup = setup_of(A_MS_A_STEP, 1, reshape.block_tokens * (account.distinct + len(rows)))
    longest = max(row.prompt_tokens + row.output_tokens for row in rows)
    setup = replace(setup, max_model_len=longest)
    found = one_after_another(setup, rows)
    explain(str(trace.counts), account, found)
    return rows, account, found, setup


def main(path: Path, seed: int, model: StepTimeModel, rate: float) -> None:
    """Print how the planner's hit rate comes about, then a table of loads; ``rate`` is for each worker."""
    look_up_alone(path, Reshape(scale_lengths=SCALE))
    cut = Reshape(scale_lengths=SCALE, max_prompt_tokens=MOST_PROMPT, max_output_tokens=MOST_OUTPUT)
    rows, account, alone, unlimited = look_up_alone(path, cut)
    print("`without`: no cache. `room for`: share of the trace's distinct blocks that all workers hold together.\n")
    print(HEAD)
    limited = setup_of(A_MS_A_STEP, 1, LIVE_KV_TOKENS)
    for setup, found in ((unlimited, alone), (limited, one_after_another(limited, rows))):
        show([*cells_of(None, setup, account, found), *["-"] * 6])
    poisson_s = poisson_times_s(rate, np.random.SeedSequence(seed), limit=len(rows), duration_s=math.inf)
    for load in (
        Load("trace", rate, times_of_trace(rows, rate), 1),
        Load("Poisson", rate, poisson_s, 1),
        Load("trace", 4 * rate, times_of_trace(rows, 4 * rate), 4),
    ):
        show_under_load(load, model, rows, account, (*KV_TOKENS, unlimited.kv_tokens))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="Mooncake's conversation trace")
    parser.add_argument("--seed", type=int, default=1, help="of Poisson arrivals")
    parser.add_argument("--model", default="sarathi-yi-34b", help="step times, by name or file")
    parser.add_argument("--rate", type=float, default=9.0, help="requests a second and worker")
    given = parser.parse_args()
    main(given.trace, given.seed, load_model(given.model).model, given.rate)
