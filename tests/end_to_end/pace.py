"""Black-box case BB-2: the pace of a stream while long prompts come in, beside the iterations of the same run."""

import asyncio
import random
import statistics
from dataclasses import dataclass
from itertools import pairwise

import aiohttp

from shared.runtime.clock import monotonic
from tests.end_to_end.asking import COMPLETIONS
from tests.integration.processes import Up

STREAM_TOKENS, TOKENS_BEFORE, PROMPTS = 300, 20, 8
SHARE_OF_CONTEXT = 0.9
_FIRST_ID, _LAST_ID = 100, 49_000


@dataclass(frozen=True)
class Pace:
    """Gaps of the stream while prompts came in, and the iterations that had the whole token budget."""

    tokens: int
    gaps_s: list[float]
    full_s: list[float]

    @property
    def ratio(self) -> float:
        """The longest gap, in longest full iterations."""
        return max(self.gaps_s) / max(self.full_s)

    def __str__(self) -> str:
        return (
            f"longest gap {max(self.gaps_s) * 1000:.0f} ms of {len(self.gaps_s)}, median "
            f"{statistics.median(self.gaps_s) * 1000:.0f} ms; {len(self.full_s)} full iterations, median "
            f"{statistics.median(self.full_s) * 1000:.0f} ms, longest {max(self.full_s) * 1000:.0f} ms; "
            f"longest gap / longest full iteration {self.ratio:.2f}"
        )


async def pace_beside_long_prompts(
    up: Up, session: aiohttp.ClientSession, model: str, *, context: int, budget: int
) -> Pace:
    """Stream, send long prompts one after another once it runs, and return its pace from the first of them on."""
    earlier = len(up.events("step_executed"))
    runs = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(_moments_s(session, model, runs))
        await asyncio.wait_for(runs.wait(), 60)
        began_s = monotonic()
        for number in range(PROMPTS):
            await _prefill(session, model, int(SHARE_OF_CONTEXT * context), seed=number)
        ended_s = monotonic()
        moments_s = await reading
    gaps_s = [after - before for before, after in pairwise(moments_s) if after > began_s and before < ended_s]
    steps = up.events("step_executed")[earlier:]
    return Pace(len(moments_s), gaps_s, [event["step_ms"] / 1000 for event in steps if event["tokens"] == budget])


async def _moments_s(session: aiohttp.ClientSession, model: str, runs: asyncio.Event) -> list[float]:
    """Read the stream; return when each token came, as the counts in its chunks say, and say when it is under way."""
    body = {
        "model": model, "prompt": "count", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True,
        "temperature": 0, "logprobs": 0,
    }  # fmt: skip
    moments_s: list[float] = []
    async with session.post(COMPLETIONS, json=body) as response:
        assert response.status == 200
        async for line in response.content:
            # with logprobs there is a chunk for each token, even if its text is still to come
            if line.startswith(b"data: {") and b'"token_logprobs"' in line:
                moments_s.append(monotonic())
                if len(moments_s) == TOKENS_BEFORE:
                    runs.set()
    return moments_s


async def _prefill(session: aiohttp.ClientSession, model: str, tokens: int, seed: int) -> None:
    draw = random.Random(f"pace/{seed}")
    ids = [draw.randrange(_FIRST_ID, _LAST_ID) for _ in range(tokens)]
    async with session.post(COMPLETIONS, json={"model": model, "prompt": ids, "max_tokens": 1}) as response:
        answer = await response.json()
    assert answer["usage"]["prompt_tokens"] == tokens
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
