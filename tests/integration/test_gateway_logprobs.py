"""Logprobs in OpenAI's two shapes, streamed and whole, each token told with its own text (BB-19)."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from shared.protocol.messages import Finish, Logprobs, Ranked, SubmitRequest, TokenBatch, TokenRow
from tests.integration.gateway_pool import MODEL, WORKER, Setting, events, gateway, text_of

CUTE = "né👍"


async def told(
    setting: Setting, to: SubmitRequest, data: bytes, *, first: int = 0, finish: Finish | None = None
) -> None:
    """Bring tokens as a worker would: each with its own place as its logprob, and the next letter as likelier."""
    logprobs = tuple(
        Logprobs(-float(place), (Ranked(byte + 1, -0.25), Ranked(byte, -float(place)))[: to.sampling.logprobs])
        for place, byte in enumerate(data, start=first)
    )
    row = TokenRow(to.request, to.attempt, first, tuple(data), finish, logprobs=logprobs)
    await setting.pool.say(TokenBatch(WORKER, (row,)), to.gateway)


async def answer_with(setting: Setting, text: str) -> SubmitRequest:
    submit = await setting.pool.next(SubmitRequest)
    for place, byte in enumerate(text.encode()):
        await told(setting, submit, bytes([byte]), first=place)
    await told(setting, submit, b"!", first=len(text.encode()), finish="length")
    return submit


async def choices(setting: Setting, route: str, text: str, **fields: Any) -> list[Any]:
    """Return the choices of one answer, or of all chunks of a stream."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer_with(setting, text))
        async with getattr(setting.client, route)(**fields) as response:
            assert response.status == 200, await response.text()
            chunks = await events(response) if fields.get("stream") else [await response.json()]
    return [choice for chunk in chunks for choice in chunk["choices"]]


@pytest.mark.parametrize("text", ["hi", CUTE])
async def test_bb_19_a_completion_tells_parallel_lists_and_a_stream_tells_the_same(text: str) -> None:
    async with gateway() as setting:
        (whole,) = await choices(setting, "complete", text, logprobs=2)
        pieces = await choices(setting, "complete", text, logprobs=2, stream=True)
    lists = whole["logprobs"]
    data = f"{text}!".encode()
    assert {len(one) for one in lists.values()} == {len(data)}
    assert lists["token_logprobs"] == [-float(place) for place in range(len(data))]
    assert lists["text_offset"] == sorted(lists["text_offset"])
    assert [lists["text_offset"][place] for place in (0, 1, -1)] == [0, 1, len(text)]
    for name, of_whole in lists.items():
        streamed = [one for piece in pieces if piece["logprobs"] for one in piece["logprobs"][name]]
        assert streamed == of_whole, name
    assert "".join(piece["text"] for piece in pieces) == whole["text"] == f"{text}!"


async def test_bb_19_a_completion_names_the_likeliest_and_always_the_token_itself() -> None:
    async with gateway() as setting:
        for logprobs, likeliest in ((0, {"h": -0.0}), (1, {"i": -0.25, "h": -0.0}), (2, {"i": -0.25, "h": -0.0})):
            (whole,) = await choices(setting, "complete", "h", logprobs=logprobs)
            assert whole["logprobs"]["top_logprobs"][0] == likeliest
            assert whole["logprobs"]["tokens"] == ["h", "!"]


async def test_bb_19_a_chat_tells_an_entry_for_each_token_with_its_bytes_and_a_stream_tells_the_same() -> None:
    async with gateway() as setting:
        (whole,) = await choices(setting, "chat", CUTE, logprobs=True, top_logprobs=2)
        pieces = await choices(setting, "chat", CUTE, logprobs=True, top_logprobs=2, stream=True)
    content = whole["logprobs"]["content"]
    assert whole["logprobs"]["refusal"] is None
    assert bytes(byte for entry in content for byte in entry["bytes"]) == f"{CUTE}!".encode()
    assert [entry["token"] for entry in content][:2] == ["n", "\N{REPLACEMENT CHARACTER}"]
    assert content[0]["top_logprobs"] == [
        {"token": "o", "logprob": -0.25, "bytes": [ord("o")]},
        {"token": "n", "logprob": 0.0, "bytes": [ord("n")]},
    ]
    assert [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]] == content


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_told_that_was_not_asked_for(*, stream: bool) -> None:
    async with gateway() as setting:
        for route in ("chat", "complete"):
            for choice in await choices(setting, route, "hi", stream=stream):
                assert choice["logprobs"] is None
        (whole,) = await choices(setting, "chat", "hi", logprobs=True)
        assert [entry["top_logprobs"] for entry in whole["logprobs"]["content"]] == [[], [], []]


@pytest.mark.parametrize("stream", [False, True])
async def test_bb_15_tokens_of_a_stop_string_are_not_told(*, stream: bool) -> None:
    async with gateway() as setting:
        pieces = await choices(setting, "complete", "so END", logprobs=0, stop="END", stream=stream)
        tokens = [token for piece in pieces if piece["logprobs"] for token in piece["logprobs"]["tokens"]]
        assert text_of([{"choices": pieces}]) == "".join(tokens) == "so "


async def test_logprobs_of_a_recovered_answer_are_those_of_the_tokens_that_were_accepted() -> None:
    async with gateway() as setting:

        async def lose_the_first_attempt() -> None:
            submit = await setting.pool.next(SubmitRequest)
            await told(setting, submit, b"ab")
            await told(setting, submit, b"d", first=3)
            again = await setting.pool.next(SubmitRequest)
            assert (again.attempt, again.output_ids) == (2, tuple(b"ab"))
            await told(setting, again, b"bc", first=1, finish="length")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(lose_the_first_attempt())
            async with setting.client.complete(logprobs=0) as response:
                (choice,) = (await response.json())["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["token_logprobs"] == [0.0, -1.0, -2.0]


async def test_openais_own_client_reads_logprobs_on_both_routes() -> None:
    async with gateway() as setting:
        base_url = f"http://127.0.0.1:{setting.port.result()}/v1"
        async with (
            AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(answer_with(setting, "hi"))
            chat = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1
            )
            assert chat.choices[0].logprobs is not None
            assert [entry.token for entry in chat.choices[0].logprobs.content or ()] == ["h", "i", "!"]
            tasks.create_task(answer_with(setting, "hi"))
            text = await client.completions.create(model=MODEL, prompt="hi", logprobs=1)
            assert text.choices[0].logprobs is not None
            assert text.choices[0].logprobs.tokens == ["h", "i", "!"]
