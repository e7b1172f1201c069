"""Black-box case BB-35 in any size: what finished requests leave in memory, of each process and in the streams."""

import asyncio
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import aiohttp
import redis

from services.gateway.reader import TRIM_ENTRIES
from tests.end_to_end.asking import COMPLETIONS, session_of
from tests.end_to_end.served import MODEL, eventually, nothing_is_left
from tests.integration.processes import Up, variable_of

AT_ONCE, TOKENS = 32, 8
PROMPTS = 100
"""The same ones in every round. The tokenizer remembers words, 10,000 in each of the gateway's two threads, at half a
kilobyte, and the prefix cache blocks: new texts in every request would grow until these are full, and no further."""
PARTS = ("gateway", "scheduler", "worker", "valkey-server")
LIMIT_KB = 1.0
"""Per request."""
WARM_ROUNDS = 2
"""The first rounds fill caches that have a size of their own."""
ENTRIES_AT_REST = TRIM_ENTRIES + 8
"""What a reader may have read and not trimmed, and the lists that have come since."""


@dataclass(frozen=True)
class Left:
    """What there is after a round, once nothing runs."""

    resident_kb: dict[str, int]
    server_kb: int
    """What Valkey counts as used, its own buffers included."""
    entries: dict[str, int]
    """Of each stream."""

    def __str__(self) -> str:
        return f"resident KB: {self.resident_kb}, Valkey's data KB: {self.server_kb}, streams: {self.entries}"


async def ask(session: aiohttp.ClientSession, number: int) -> None:
    """Ask for one answer, every other one as a stream."""
    body = {"model": MODEL, "prompt": f"request {number % PROMPTS}", "max_tokens": TOKENS, "stream": number % 2 == 0}
    async with session.post(COMPLETIONS, json=body) as response:
        assert response.status == 200
        await response.read()


async def one_round(up: Up, requests: int) -> Left:
    """Send so many requests, and return what there is when nothing is left of them."""
    places = asyncio.Semaphore(AT_ONCE)

    async def in_turn(number: int) -> None:
        async with places:
            await ask(session, number)

    async with session_of(up, timeout_s=600) as session:
        await asyncio.gather(*(in_turn(number) for number in range(requests)))
    await eventually(nothing_is_left, up)
    return left(up)


def left(up: Up) -> Left:
    """Look at the processes and into Valkey."""
    url = variable_of(up.part("worker"), "SLIPSTREAM_REDIS_URL")
    with redis.Redis.from_url(url, decode_responses=True) as server:
        streams = sorted(key for key in server.scan_iter(_type="stream"))
        entries = {name: server.xlen(name) for name in streams}
        used = server.info("memory")["used_memory"]
    return Left({part: resident_kb(up.part(part)) for part in PARTS}, used // 1024, entries)


def resident_kb(pid: int) -> int:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])


def growth_kb(rounds: list[Left], requests: int) -> dict[str, float]:
    """Return by how much each has grown per request in the round in the middle, of those after the first.

    What is kept of every request grows in all rounds; a heap that takes its next piece from the system grows in one.
    """
    counted = [{**one.resident_kb, "Valkey's data": one.server_kb} for one in rounds[WARM_ROUNDS - 1 :]]
    return {
        name: statistics.median(after[name] - before[name] for before, after in pairwise(counted)) / requests
        for name in counted[0]
    }


def check(rounds: list[Left], requests: int) -> dict[str, float]:
    """Return the growth of each. Raises AssertionError if one has grown, or a stream has entries left."""
    growth = growth_kb(rounds, requests)
    assert max(growth.values()) < LIMIT_KB, (growth, list(map(str, rounds)))
    for one in rounds:
        kinds = {name.split(":")[1]: length for name, length in one.entries.items()}
        assert kinds["requests"] == 0, one
        assert max(kinds.values()) <= ENTRIES_AT_REST, one
    return growth
