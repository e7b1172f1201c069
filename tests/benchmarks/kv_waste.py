"""PagedAttention's waste (§1, Figure 2) in virtual time: what share of KV memory holds tokens under each manager.

Run from the root of the project: ``python -m tests.benchmarks.kv_waste SHAREGPT.csv [REQUESTS]``, where the file has
the lengths of sharegpt (``num_prefill_tokens,num_decode_tokens,...``). Takes about a minute.

All requests are there at once, so that memory is what bounds how many run; figures are means over the time while
somebody waits. Twice: with the lengths as they are (prompts hold a whole chat, so most of a request is known when it
comes), and with those that fit into the paper's 2,048 positions. Of the positions given to requests, some hold keys and
values, some are *reserved* (the request will use them later), some are *internal* waste (it never will). What buddy
allocators lose between requests is not modelled.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadgen.simulate_lengths import Pair, read_pairs, sample_pairs
from loadgen.step_times import load_model
from shared.simulation.core import RESERVE_LONGEST
from shared.simulation.records import Arrival, Setup, StepRecord
from shared.simulation.simulator import simulate
from shared.simulation.worker import Host

MODEL = load_model("sarathi-yi-34b").model


@dataclass(frozen=True, slots=True)
class Service:
    """What is served: ``longest`` positions a request, of which clients ask for ``max_tokens`` of answer."""

    longest: int
    max_tokens: int

    @property
    def kv_tokens(self) -> int:
        """Positions of the pool: 16 requests of full length."""
        return 16 * self.longest


@dataclass(frozen=True, slots=True)
class Manager:
    """One way to give memory. ``is_oracle``: every request asks for exactly the answer that it will get."""

    name: str
    kv: str
    block_tokens: int
    paper: str
    is_oracle: bool = False


SERVICES = (Service(8192, 2048), Service(2048, 1024))
MANAGERS = (
    Manager("reserve longest", RESERVE_LONGEST, 1, "20.4-38.2 %"),
    Manager("reserve max_tokens", "reserve", 1, "20.4-38.2 %"),
    Manager("reserve the exact answer", "reserve", 1, "20.4-38.2 %", is_oracle=True),
    Manager("paged, blocks of 16", "paged", 16, "96.3 %"),
)
HEAD = (
    "| manager | paper: holds tokens | holds tokens | reserved | internal | of the pool | at once | preempted | req/s |"
    "\n|---|---|---|---|---|---|---|---|---|"
)


class Ledger:
    """Positions by what they are for, summed over time while somebody waits."""

    def __init__(self, needs: dict[str, int]) -> None:
        self._needs = needs
        self.seconds = self.requests = self.held = self.computed = self.reserved = 0.0

    def watch(self, step: StepRecord, host: Host) -> None:
        """Take note of who holds what as a step ends."""
        if not step.waiting:
            return
        seconds = step.ended_s - step.begun_s
        self.seconds += seconds
        self.requests += seconds * len(host.view.running)
        for request in host.view.running:
            held = len(request.blocks) * host.view.pool.block_tokens
            self.held += seconds * held
            self.computed += seconds * request.computed
            self.reserved += seconds * max(0, min(held, self._needs[request.id]) - request.computed)


def row(manager: Manager, service: Service, pairs: Sequence[Pair]) -> tuple[str, float]:
    """Return a line of the table and the requests that ran at once."""
    arrivals = [Arrival(0.0, prompt, out, out if manager.is_oracle else service.max_tokens) for prompt, out in pairs]
    ledger = Ledger({f"r{index:07}": one.prompt_tokens + one.output_tokens - 1 for index, one in enumerate(arrivals)})
    setup = Setup(
        MODEL,
        kv_tokens=service.kv_tokens,
        policy="orca",
        kv=manager.kv,
        max_num_batched_tokens=service.longest,
        max_num_seqs=1024,
        max_model_len=service.longest,
        block_tokens=manager.block_tokens,
    )
    result = simulate(setup, arrivals, watch=ledger.watch)
    internal = ledger.held - ledger.computed - ledger.reserved
    shares = [f"{amount / ledger.held:.1%}" for amount in (ledger.computed, ledger.reserved, internal)]
    of_pool = f"{ledger.computed / ledger.seconds / service.kv_tokens:.1%}"
    running = ledger.requests / ledger.seconds
    rate = len(result.finished) / result.span_s
    cells = (manager.name, manager.paper, *shares, of_pool, f"{running:.1f}", result.totals.preemptions, f"{rate:.2f}")
    return "| " + " | ".join(map(str, cells)) + " |", running


def table(service: Service, rows: Sequence[Pair], count: int) -> None:
    """Print a row per manager."""
    fit = [(prompt, output) for prompt, output in rows if prompt + service.max_tokens <= service.longest]
    drawn = sample_pairs(fit, count, np.random.default_rng(1))
    pairs = [(prompt, min(output, service.max_tokens)) for prompt, output in drawn]
    prompt, output = (sum(lengths) / count for lengths in zip(*pairs, strict=True))
    print(f"\n## Up to {service.longest:,} positions a request, {service.max_tokens:,} of them answer\n")
    print(f"{count} requests, mean {prompt:.0f} + {output:.0f} tokens; {service.kv_tokens:,} positions\n")
    print(HEAD)
    found = []
    for manager in MANAGERS:
        line, running = row(manager, service, pairs)
        found.append(running)
        print(line, flush=True)
    print("\nrequests at once, paged against each: " + ", ".join(f"{found[-1] / other:.1f} x" for other in found[:-1]))


def main(path: Path, count: int) -> None:
    """Print a table per service."""
    rows = read_pairs(path)
    for service in SERVICES:
        table(service, rows, count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", type=Path, metavar="SHAREGPT.csv", help="lengths of sharegpt")
    parser.add_argument("requests", type=int, nargs="?", default=1000, metavar="REQUESTS", help="drawn from the file")
    asked = parser.parse_args()
    main(asked.lengths, asked.requests)
