"""How long a worker's compute threads wait between two steps, while the real services run beside them.

Run from the root of the project: ``python -m tests.benchmarks.worker_idle``. Ends within three minutes.

Idle is 1 - sum of ``step_s`` / wall, over steps that decode the same number of streams. All that is not a step counts
as idle: reading and checking plans, laying tensors out, settling, publishing. A gateway made by hand reads the tokens.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from shared.runtime.settings import DEFAULT_MODEL
from tests.benchmarks.machine import describe
from tests.end_to_end.token_client import TokenClient, Wanted, token_client
from tests.integration.processes import Up, slipstream_up, variable_of

SERVED = "idle"
STREAMS = (16, 64)
PROMPT_TOKENS = 128
_FIRST = 20
"""Steps left out at the beginning: prompts are taken in, and the leader learns how long steps take."""

Event = dict[str, Any]


@dataclass(frozen=True)
class Idle:
    """Steps that followed one another, and what lay before each, by the clock of the thread that runs them."""

    steps_s: Sequence[float]
    gaps_s: Sequence[float]

    @property
    def share(self) -> float:
        """Return what part of the wall time no step ran."""
        return sum(self.gaps_s) / (sum(self.gaps_s) + sum(self.steps_s))


def idle_of(events: Sequence[Event], streams: int) -> Idle:
    """Return what the whole decode steps came to. Raises ValueError if they do not follow one another."""
    steps = [event for event in events if event["drawn"] == event["rows"] == event["tokens"] == streams][_FIRST:]
    follows = [later["step"] == earlier["step"] + 1 for earlier, later in pairwise(steps)]
    if not all(follows) or len(follows) < _FIRST:
        raise ValueError(f"{len(steps)} whole steps, not in a row")
    return Idle([event["step_ms"] / 1000 for event in steps], [event["idle_ms"] / 1000 for event in steps])


async def decode(client: TokenClient, streams: int, tokens: int) -> None:
    """Run so many streams from their first token to their last."""
    prompts = [tuple(random.choices(range(5, 250), k=PROMPT_TOKENS)) for _ in range(streams)]
    for name in await client.submit(*(Wanted(prompt, tokens) for prompt in prompts)):
        await client.answer(name)


def measure(up: Up, streams: int, seconds: float) -> Idle:
    """Decode for about so many seconds, the learning of the step time apart."""

    async def run(tokens: int) -> float:
        loop = asyncio.get_running_loop()
        async with token_client(variable_of(up.part("worker"), "SLIPSTREAM_REDIS_URL"), SERVED) as client:
            begun_s = loop.time()
            await decode(client, streams, tokens)
            return loop.time() - begun_s

    per_token_s = asyncio.run(run(2 * _FIRST)) / (2 * _FIRST)
    seen = len(up.events("step_executed"))
    asyncio.run(run(3 * _FIRST + int(seconds / per_token_s)))
    return idle_of(up.events("step_executed")[seen:], streams)


def main() -> None:
    """Print one line for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executor", choices=("torch", "fake"), default="torch")
    parser.add_argument("--fake-step-ms", type=float, default=25.0, help="how long the fake executor's steps last")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--seconds", type=float, default=20.0, help="for each number of streams")
    given = parser.parse_args()
    flags = ["--served-model-name", SERVED, "--log-level", "debug", "--executor", given.executor]
    if given.executor == "fake":
        flags += ["--fake-step-ms", str(given.fake_step_ms)]
    print(f"{describe()}; {DEFAULT_MODEL if given.executor == 'torch' else 'the fake executor'}")
    print(f"{'streams':>8} {'steps':>6} {'step':>10} {'gap, median':>12} {'gap, p99':>9} {'idle':>7}")
    # a short path: it holds a unix socket
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, slipstream_up(Path(folder), *flags) as up:
        up.until_ready(within_s=120.0)
        for streams in given.streams:
            idle = measure(up, streams, given.seconds)
            step, gap = statistics.median(idle.steps_s) * 1e3, statistics.median(idle.gaps_s) * 1e3
            worst = statistics.quantiles(idle.gaps_s, n=100)[-1] * 1e3
            print(f"{streams:>8} {len(idle.steps_s):>6} {step:7.2f} ms {gap:9.3f} ms {worst:6.2f} ms {idle.share:7.2%}")


if __name__ == "__main__":
    main()
