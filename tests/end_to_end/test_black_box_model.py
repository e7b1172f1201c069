"""Black-box cases that need the real model, by number: its texts are the same whatever else runs, and its pace holds.

All sizes that were asked for are run by hand: tests/long/black_box.py and tests/long/random_requests.py.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import pytest

from shared.runtime.clock import monotonic
from tests.end_to_end.asking import COMPLETIONS, session_of
from tests.end_to_end.drawn_requests import draw_requests
from tests.end_to_end.pace import STREAM_TOKENS, pace_beside_long_prompts
from tests.end_to_end.random_requests import differences
from tests.end_to_end.same_texts import check_crowd, repeats
from tests.end_to_end.served import eventually, nothing_is_left
from tests.integration.gateway_pool import events
from tests.integration.processes import Up, slipstream_up

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

NAME = "SmolLM2-135M-Instruct"
BLOCK, POOL_BLOCKS, CONTEXT, BUDGET = 16, 382, 1024, 256


@pytest.fixture(scope="module")
def up(model_folder: Path) -> Iterator[Up]:
    assert model_folder.is_dir()  # fetched and converted, so that this start is a second one
    flags = (
        *("--kv-tokens", str(POOL_BLOCKS * BLOCK), "--max-model-len", str(CONTEXT)),
        *("--max-num-batched-tokens", str(BUDGET), "--max-num-seqs", "64"),
        *("--dtype", "float32", "--compile", "now", "--log-level", "debug"),
    )
    with TemporaryDirectory() as folder, slipstream_up(Path(folder), *flags) as running:
        yield running.until_ready(within_s=180)


@pytest.fixture
async def session(up: Up) -> AsyncIterator[aiohttp.ClientSession]:
    async with session_of(up, timeout_s=200) as opened:
        yield opened
    await eventually(nothing_is_left, up)


async def test_bb_2_beside_long_prompts_no_gap_of_a_stream_is_longer_than_two_full_iterations(
    up: Up, session: aiohttp.ClientSession
) -> None:
    pace = await pace_beside_long_prompts(up, session, NAME, context=CONTEXT, budget=BUDGET)
    assert pace.tokens == STREAM_TOKENS
    assert len(pace.full_s) >= 8 * 3, "each prompt fills three iterations"
    assert pace.ratio <= 2, str(pace)
    print(pace)


async def test_bb_7_sixty_four_streams_at_once_say_what_each_says_alone(session: aiohttp.ClientSession) -> None:
    asked = repeats(64, max_tokens=8)
    assert await check_crowd(session, NAME, asked, asked) == 0


def ids(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, 49_000) for _ in range(count)]


class Told:
    """What a stream told: its text, its id, what was found of its prompt, and when its first token came."""

    def __init__(self, chunks: list[Any], ttft_s: float) -> None:
        self.text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        self.id: str = chunks[0]["id"]
        self.cached: int = chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.ttft_s = ttft_s


async def tell(session: aiohttp.ClientSession, prompt: list[int], tokens: int, salt: str = "") -> Told:
    began_s = monotonic()
    body = {
        "model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, **({"cache_salt": salt} if salt else {}),
    }  # fmt: skip
    async with session.post(COMPLETIONS, json=body) as response:
        assert response.status == 200, await response.text()
        ttft_s = monotonic() - began_s  # the status line goes out with the first token
        return Told(await events(response), ttft_s)


async def submitted(up: Up, count: int) -> None:
    """Return once the scheduler has read so many submissions."""
    async with asyncio.timeout(30):
        while len(up.events("submitted")) < count:  # noqa: ASYNC110 - another process writes them
            await asyncio.sleep(0.01)


async def test_bb_31_a_prompt_says_the_same_cold_and_warm_with_another_end_and_after_it_lost_its_memory(
    up: Up, session: aiohttp.ClientSession
) -> None:
    prompt, tokens = ids(40 * BLOCK, seed=1), 40
    cold = await tell(session, prompt, tokens)
    warm = await tell(session, prompt, tokens)
    assert (cold.cached, warm.cached) == (0, 39 * BLOCK), "the last block is computed: its logits are wanted"
    assert warm.text == cold.text
    assert warm.ttft_s < cold.ttft_s

    diverging = prompt[: 30 * BLOCK] + ids(10 * BLOCK, seed=2)
    found, anew = await tell(session, diverging, tokens), await tell(session, diverging, tokens, "nothing is found")
    assert (found.cached, anew.cached) == (30 * BLOCK, 0)
    assert found.text == anew.text

    # six others, who came before it, leave it a few blocks more than its prompt, and then want them
    before = len(up.events("submitted"))
    others = [asyncio.ensure_future(tell(session, ids(55 * BLOCK, seed=10 + number), 60)) for number in range(6)]
    await submitted(up, before + len(others))
    pressed = await tell(session, prompt, tokens)
    await asyncio.gather(*others)
    preempted = [name for plan in up.events("plan") for name in plan["preempted"]]
    assert pressed.id in preempted
    assert pressed.text == cold.text


async def test_random_requests_say_the_same_streamed_and_whole_alone_and_with_sixteen_others(
    session: aiohttp.ClientSession,
) -> None:
    found = await differences(session, NAME, draw_requests(6, seed=7, max_tokens=16))
    assert not found, "\n".join(map(str, found))
