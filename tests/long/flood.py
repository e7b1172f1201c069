"""800 requests at once beside streams that run, with 32 slots and room for 128: who is served, and what streams feel.

Run by hand: ``python -m tests.long.flood [ROUNDS]``, 1 by default. Each round floods twice, through connections that
come with it and through some that are there already, and prints the counts by status, the longest refusal from the
reading of the request, and the gap between tokens of the streams before, during and after. Fails if an answer is
neither 200 nor 429, a connection is reset, a refusal takes 100 ms or more, or the P99 gap is more than doubled.

Times are those of the machine: on one that others keep busy a round says little. It says how busy it was. What a flood
costs streams in work, which is the same on any machine, is tested in tests/integration/test_gateway_floods.py.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.company import Company
from tests.end_to_end.floods import Flooded, Size, flood_beside_streams, p99
from tests.end_to_end.served import FAKE
from tests.integration.processes import slipstream_up

SLOTS, QUEUE, REQUESTS = 32, 128, 800
STREAMS, STREAM_TOKENS, STEP_MS = 16, 900, 20
REFUSED_WITHIN_MS = 100.0
FLAGS = ("--max-num-seqs", str(SLOTS), "--max-queue", str(QUEUE), "--fake-step-ms", str(STEP_MS))


def faults(flooded: Flooded) -> list[str]:
    """Return what is not as it has to be."""
    ratio = p99(flooded.flood_gaps_ms) / p99(flooded.quiet_gaps_ms)
    broken = {
        f"statuses {dict(flooded.statuses)}": not set(flooded.statuses) <= {200, 429},
        f"{flooded.statuses[200]} served, fewer than wait": flooded.statuses[200] < QUEUE,
        f"tokens of the streams {flooded.stream_tokens}": set(flooded.stream_tokens) != {STREAM_TOKENS},
        "a refusal took too long": max(flooded.refusals_ms) >= REFUSED_WITHIN_MS,
        f"the P99 gap is {ratio:.2f} times what it was": ratio > 2,
    }
    return [fault for fault, is_so in broken.items() if is_so]


def main(rounds: int) -> int:
    """Return 0 if all rounds were as they have to be."""
    failed = 0
    with tempfile.TemporaryDirectory() as name, slipstream_up(Path(name), *FAKE, *FLAGS) as up:
        up.until_ready()
        for is_connected in (False, True) * rounds:
            company = Company()
            size = Size(STREAMS, STREAM_TOKENS, REQUESTS, is_connected=is_connected)
            flooded = asyncio.run(flood_beside_streams(up, size))
            how = "connections there before" if is_connected else "new connections"
            print(f"{how}: {flooded}; others kept {company.cores():.2f} cores busy", flush=True)
            for fault in faults(flooded):
                print(f"  FAILED: {fault}", flush=True)
                failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
