"""Black-box cases of the API in the size that was asked for; the short forms are tests/end_to_end/test_black_box_*.py.

Prints a line for each case; exits non-zero if any of them fails.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from services.scheduler.report import NO_WORKER_S
from shared.runtime.clock import monotonic
from tests.end_to_end.asking import read_all, serves, session_of, stream
from tests.end_to_end.crowds import flood, leave_after_first_chunk, leave_again_and_again
from tests.end_to_end.pace import STREAM_TOKENS, pace_beside_long_prompts
from tests.end_to_end.same_texts import check_crowd, repeats
from tests.end_to_end.served import FAKE, eventually, nothing_is_left
from tests.integration.processes import Up, slipstream_up

NAME = "SmolLM2-135M-Instruct"
EXACT = ("--dtype", "float32", "--compile", "now")
CONTEXT, BUDGET = 8192, 512
_POLL_S = 0.05


@asynccontextmanager
async def running(*flags: str) -> AsyncIterator[Up]:
    """Run `slipstream up` with these flags."""
    with tempfile.TemporaryDirectory() as folder, slipstream_up(Path(folder), *flags) as up:
        yield up.until_ready(within_s=300)


async def bb_2() -> str:
    """Eight prompts of nine tenths of the context beside a stream; under prefill-first its gaps are longer."""
    paces = {}
    for policy in ("sarathi", "prefill-first"):
        flags = ("--compile", "now", "--log-level", "debug", "--policy", policy)
        async with running(*flags) as up, session_of(up, timeout_s=1800) as session:
            paces[policy] = await pace_beside_long_prompts(up, session, NAME, context=CONTEXT, budget=BUDGET)
    pace, stalled = paces["sarathi"], max(paces["prefill-first"].gaps_s)
    assert pace.tokens == STREAM_TOKENS
    assert pace.ratio <= 2, str(pace)
    assert stalled > 2 * max(pace.full_s), "a policy that does not cut prompts has to be told from one that does"
    return f"{pace}; prefill-first: longest gap {stalled * 1000:.0f} ms"


async def bb_7() -> str:
    """64 streams of 48 tokens, and each of them alone."""
    async with running(*EXACT) as up, session_of(up, timeout_s=1800) as session:
        asked = repeats(64, max_tokens=48)
        ties = await check_crowd(session, NAME, asked, asked)
    assert ties <= len(asked) / 100, ties
    return f"{len(asked)} texts as alone, {ties} ties"


async def bb_8() -> str:
    """300 clients that leave after their first chunk."""
    async with running(*FAKE, "--fake-step-ms", "5", "--max-queue", "300") as up:
        await leave_after_first_chunk(up, 300)
    return "nothing left of 300"


async def bb_12() -> str:
    """No worker for a minute: 16 streams end with one error each, and are served again when it goes on."""
    async with running(*FAKE, "--fake-step-ms", "15") as up, session_of(up, timeout_s=300) as session:
        streams = [await stream(session, prompt=f"n {n}", max_tokens=4000).__aenter__() for n in range(16)]
        began_s = monotonic()
        worker = up.part("worker")
        os.kill(worker, signal.SIGSTOP)
        read = await asyncio.gather(*map(read_all, streams))
        took_s = monotonic() - began_s
        for events in read:
            assert events[-1] == "[DONE]"
            assert ['"error"' in event for event in events] == [False] * (len(events) - 2) + [True, False]
        assert NO_WORKER_S < took_s < NO_WORKER_S + 10, took_s
        assert await _ready(session) == 503
        os.kill(worker, signal.SIGCONT)
        async with asyncio.timeout(30):
            while await _ready(session) != 200:  # noqa: ASYNC110 - another process says so
                await asyncio.sleep(_POLL_S)
        await serves(session)
        await eventually(nothing_is_left, up)
    return f"16 streams ended with an error after {took_s:.1f} s"


async def _ready(session: aiohttp.ClientSession) -> int:
    async with session.get("/ready") as response:
        return response.status


async def bb_14() -> str:
    """800 requests at once with room for 160, and a hundred refusals one by one."""
    flags = ("--max-num-seqs", "32", "--max-queue", "128", "--fake-step-ms", "5")
    async with running(*FAKE, *flags) as up:
        return str(await flood(up, 32, 128, timed=100))


async def bb_22() -> str:
    """50 rounds of three requests for each of 64 slots, every third of which goes away."""
    async with running(*FAKE, "--fake-step-ms", "2", "--max-num-seqs", "64") as up:
        await leave_again_and_again(up, 64, rounds=50)
    return "50 rounds of 192 drained"


CASES: dict[str, Callable[[], Awaitable[str]]] = {
    "bb-2": bb_2, "bb-7": bb_7, "bb-8": bb_8, "bb-12": bb_12, "bb-14": bb_14, "bb-22": bb_22,
}  # fmt: skip


async def _passes(name: str) -> bool:
    try:
        print(f"{name}: {await CASES[name]()}", flush=True)
    except Exception:  # noqa: BLE001 - the other cases are run all the same
        print(f"{name} FAILED: {traceback.format_exc()}", flush=True)
        return False
    return True


def main(arguments: Sequence[str]) -> int:
    """Run the cases that were named, or all, and say what came of each."""
    parser = argparse.ArgumentParser("python -m tests.long.black_box", description=__doc__)
    parser.add_argument("case", nargs="*", help=f"{', '.join(CASES)} (default: all, about ten minutes)")
    cases = parser.parse_args(arguments).case or list(CASES)
    unknown = sorted(set(cases) - set(CASES))
    if unknown:
        parser.error(f"there is no case {unknown[0]}")
    passed = [asyncio.run(_passes(name)) for name in cases]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
