"""`kill -9` of any part under streams: each stream goes on to the very text that it would have had undisturbed."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from services.worker.executor import LEAST
from services.worker.fake_executor import fake_next_token
from tests.end_to_end.served import FAKE, MODEL, client_of, eventually, nothing_is_left
from tests.end_to_end.undisturbed import expected_texts, stream, texts_across
from tests.integration.processes import Up, slipstream_up

pytestmark = pytest.mark.timeout(120)

STREAMS, TOKENS = 8, 150
PROMPTS, PROMPT_TOKENS = 4, 2000


EXPECTED = expected_texts(STREAMS, TOKENS)


@pytest.mark.parametrize("part", ["scheduler", "worker"])
async def test_streams_go_on_when_a_part_is_killed(part: str, short_folder: Path) -> None:
    with slipstream_up(short_folder, *FAKE, "--fake-step-ms", "15") as up:
        up.until_ready()
        assert await texts_across(up, lambda: os.kill(up.part(part), signal.SIGKILL), STREAMS, TOKENS) == EXPECTED
        found = await eventually(nothing_is_left, up)
        assert found['slipstream_requests_finished_total{reason="length"}'] == STREAMS
        assert found['slipstream_requests_finished_total{reason="error"}'] == 0
        # a new scheduler goes on with what the workers hold; only with a worker is anything lost and submitted again
        assert bool(up.events("attempt_lost")) == (part == "worker")


async def test_the_logprobs_of_a_prompt_are_told_once_when_the_worker_is_killed_in_the_middle_of_it(
    short_folder: Path,
) -> None:
    prompts = [likely_in_part(f"prompt {number}") for number in range(PROMPTS)]
    with slipstream_up(short_folder, *FAKE, "--fake-step-ms", "20", "--max-num-batched-tokens", "32") as up:
        up.until_ready()
        answers = [asyncio.ensure_future(echoed_logprobs(up, prompt)) for prompt in prompts]
        await eventually(lambda found: found["slipstream_requests_running"] > 0, up)  # of 5 s of prompts
        os.kill(up.part("worker"), signal.SIGKILL)
        async with asyncio.timeout(60):
            found = await asyncio.gather(*answers)
        assert up.events("attempt_lost")
        await eventually(nothing_is_left, up)
    for prompt, logprobs in zip(prompts, found, strict=True):
        expected = [0.0 if fake_next_token(prompt[:at]) == prompt[at] else LEAST for at in range(1, len(prompt))]
        assert logprobs[: len(prompt)] == [None, *expected]
        assert len(logprobs) == len(prompt) + 2
        assert {0.0, LEAST} == set(expected)


def likely_in_part(beginning: str) -> list[int]:
    """Return a prompt that goes on as the fake executor would, but for some bytes."""
    ids = list(beginning.encode())
    while len(ids) < PROMPT_TOKENS:
        ids.append(fake_next_token(ids) if len(ids) % 7 else ord("#"))
    return ids


async def echoed_logprobs(up: Up, prompt: list[int]) -> list[float | None]:
    async with client_of(up) as client:
        answer = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=2, echo=True, logprobs=0, extra_body={"ignore_eos": True}
        )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    logprobs: list[float | None] = list(choice.logprobs.token_logprobs or ())
    return logprobs


async def test_streams_go_on_when_one_of_two_workers_is_killed(short_folder: Path) -> None:
    with slipstream_up(short_folder, *FAKE, "--fake-step-ms", "15", "--workers", "2", "--max-num-seqs", "4") as up:
        up.until_ready()
        assert (
            await texts_across(up, lambda: os.kill(up.running("worker")[0], signal.SIGKILL), STREAMS, TOKENS)
            == EXPECTED
        )


async def test_an_answer_in_json_is_the_same_whether_its_worker_is_killed_or_not(short_folder: Path) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 40}
    shape = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": numbers}}
    with slipstream_up(short_folder, *FAKE, "--fake-step-ms", "10") as up:
        up.until_ready()
        runs = asyncio.Event()

        async def answer() -> str:
            async with client_of(up) as client:
                pieces = await client.completions.create(
                    model=MODEL, prompt="p", max_tokens=2000, stream=True, extra_body={"response_format": shape}
                )
                text = ""
                async for piece in pieces:
                    text += piece.choices[0].text
                    if len(text) > 20:
                        runs.set()
            return text

        async with asyncio.timeout(90):
            undisturbed = await answer()
            assert len(json.loads(undisturbed)) == 40
            runs.clear()
            again = asyncio.ensure_future(answer())
            await runs.wait()
            os.kill(up.part("worker"), signal.SIGKILL)
            assert await again == undisturbed
        assert up.events("attempt_lost")


async def test_a_killed_gateway_is_started_again_and_what_it_owed_is_computed_no_further(short_folder: Path) -> None:
    with slipstream_up(short_folder, *FAKE, "--fake-step-ms", "15") as up:
        up.until_ready()
        old = up.part("gateway")
        request = asyncio.ensure_future(stream(up, "prompt", TOKENS, asyncio.Event()))
        await eventually(lambda found: found["slipstream_requests_running"] == 1, up)
        os.kill(old, signal.SIGKILL)
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the client makes of a broken connection
            await request
        assert await stream_once_served(up) == EXPECTED[0]
        await eventually(nothing_is_left, up)


async def stream_once_served(up: Up) -> str:
    """Stream as soon as the gateway is back."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await stream(up, "prompt 0", TOKENS, asyncio.Event())
            except Exception:  # noqa: BLE001 - not yet: refused, or not ready
                await asyncio.sleep(0.1)


async def test_streams_go_on_when_the_server_dies_and_a_gateway_started_after_that_serves(short_folder: Path) -> None:
    with slipstream_up(short_folder, *FAKE, "--fake-step-ms", "15") as up:
        up.until_ready()
        assert (
            await texts_across(up, lambda: os.kill(up.part("valkey-server"), signal.SIGKILL), STREAMS, TOKENS)
            == EXPECTED
        )
        await eventually(nothing_is_left, up)
        os.kill(up.part("gateway"), signal.SIGKILL)
        assert await stream_once_served(up) == EXPECTED[0]
        await eventually(nothing_is_left, up)


async def test_who_waited_when_the_server_died_is_served_though_nobody_else_comes(short_folder: Path) -> None:
    with slipstream_up(short_folder, *FAKE, "--fake-step-ms", "10", "--max-num-seqs", "1") as up:
        up.until_ready()
        runs = asyncio.Event()
        first = asyncio.ensure_future(stream(up, "prompt 0", TOKENS, runs))
        async with asyncio.timeout(60):
            await runs.wait()
        waits = asyncio.ensure_future(stream(up, "prompt 1", TOKENS, asyncio.Event()))
        await eventually(lambda found: found["slipstream_requests_waiting"] == 1, up)
        os.kill(up.part("valkey-server"), signal.SIGKILL)
        async with asyncio.timeout(30):
            assert list(await asyncio.gather(first, waits)) == EXPECTED[:2]
