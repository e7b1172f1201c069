"""Black-box case BB-35: what a finished request leaves in memory, of every process and of the server: nothing.

Run by hand: ``python -m tests.long.memory [ROUNDS]``, 5 by default, each of 1,000 requests of 8 tokens. Prints resident
kilobytes after each round and fails if a process has grown by more than 1 KB per request after the second round.

Every round asks the same thousand texts. The tokenizer remembers words, 10,000 in each of the gateway's two threads, at
half a kilobyte: new words in every request would be 0.6 KB per request for the first 20,000, and nothing after them.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import aiohttp

from tests.end_to_end.served import FAKE, MODEL, eventually, nothing_is_left, url_of
from tests.integration.processes import Up, slipstream_up

REQUESTS, AT_ONCE, TOKENS = 1000, 32, 8
PARTS = ("gateway", "scheduler", "worker", "valkey-server")
LIMIT_KB = 1.0


async def ask(session: aiohttp.ClientSession, number: int) -> None:
    """Ask for one answer, every other one as a stream."""
    body = {"model": MODEL, "prompt": f"request {number}", "max_tokens": TOKENS, "stream": number % 2 == 0}
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200
        await response.read()


async def one_round(up: Up) -> None:
    """Send a thousand requests, and return when nothing is left of them."""
    connector = aiohttp.TCPConnector(limit=AT_ONCE)
    async with aiohttp.ClientSession(url_of(up), connector=connector) as session:
        await asyncio.gather(*(ask(session, number) for number in range(REQUESTS)))
    await eventually(nothing_is_left, up)


def resident_kb(pid: int) -> int:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])


def main(rounds: int) -> int:
    """Return 0 if nobody has grown."""
    with tempfile.TemporaryDirectory() as name, slipstream_up(Path(name), *FAKE, "--max-queue", "1000") as up:
        up.until_ready()
        resident: list[dict[str, int]] = []
        for number in range(rounds):
            asyncio.run(one_round(up))
            resident.append({part: resident_kb(up.part(part)) for part in PARTS})
            print(f"after {(number + 1) * REQUESTS} requests, KB: {resident[-1]}", flush=True)
        # the first rounds fill caches that have a size of their own
        counted = (rounds - 2) * REQUESTS
        growth = {part: (resident[-1][part] - resident[1][part]) / counted for part in PARTS}
        print("KB per request after the second round: " + ", ".join(f"{p} {kb:.2f}" for p, kb in growth.items()))
        return int(max(growth.values()) > LIMIT_KB)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
