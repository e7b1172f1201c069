"""Answers, whole and streamed, over real HTTP with a pool played by hand."""

import asyncio

import pytest
from openai import AsyncOpenAI
from structlog.testing import capture_logs

from services.worker.fake_tokenizer import EOS_ID
from shared.protocol.messages import CancelRequest, PoolReport, Sampling, SubmitRequest
from tests.integration.gateway_pool import LENGTH_SERVED, MODEL, Setting, each_event, events, gateway, text_of, until


async def cut_short(setting: Setting) -> None:
    await setting.pool.tokens(await setting.pool.next(SubmitRequest), b"o", finish="length")


async def answered(setting: Setting, text: bytes) -> SubmitRequest:
    submit = await setting.pool.next(SubmitRequest)
    for index in range(len(text)):
        await setting.pool.tokens(submit, text[index : index + 1], first=index)
    await setting.pool.tokens(submit, [EOS_ID], first=len(text), finish="stop")
    return submit


async def test_a_chat_streams_one_role_one_reason_and_the_same_head_on_every_chunk() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        tasks.create_task(answered(setting, "日本 ok".encode()))
        async with setting.client.chat(stream=True) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            chunks = await events(response)
    assert text_of(chunks) == "日本 ok"
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks].count("assistant") == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]] == [
        "stop"
    ]
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(route: str) -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        tasks.create_task(answered(setting, b"four"))
        post = getattr(setting.client, route)
        async with post(stream=True, stream_options={"include_usage": True}) as response:
            chunks = await events(response)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert text_of(chunks) == "four"


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_every_chunk_of_text_counts_the_tokens_so_far_when_asked_to(route: str) -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        tasks.create_task(answered(setting, b"four"))
        post = getattr(setting.client, route)
        options = {"include_usage": True, "continuous_usage_stats": True}
        async with post(stream=True, stream_options=options) as response:
            chunks = await events(response)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"] is not None]
    assert counts == sorted(counts)
    assert len(counts) > 1
    assert counts[-1] == 5


async def test_whole_answers_have_openais_shape() -> None:
    async with gateway() as setting:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answered(setting, b"Paris"))
            async with setting.client.chat() as response:
                chat = await response.json()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answered(setting, b" there"))
            async with setting.client.complete() as response:
                completion = await response.json()
    assert (chat["object"], chat["model"], len(chat["choices"])) == ("chat.completion", MODEL, 1)
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert chat["choices"][0]["message"]["content"] == "Paris"
    assert chat["choices"][0]["finish_reason"] == "stop"
    assert completion["object"] == "text_completion"
    assert completion["choices"][0]["text"] == " there"
    assert completion["usage"]["total_tokens"] == 2 + 7


async def test_the_worker_is_asked_for_what_the_client_asked_for() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": -3, "max_tokens": 12, "ignore_eos": True}
        asked = tasks.create_task(answered(setting, b"x"))
        async with setting.client.complete(prompt=[104, 105], **fields) as response:
            assert response.status == 200
    submit = asked.result()
    assert submit.sampling == Sampling(0.5, 0.9, 7, -3)
    assert (submit.prompt_ids, submit.max_tokens, submit.ignore_eos) == ((104, 105), 12, True)
    assert (submit.attempt, submit.output_ids, submit.arrival) == (1, (), "")


async def test_what_is_left_out_is_null_and_takes_the_room_there_is() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(answered(setting, b"x"))
        fields = dict.fromkeys(["temperature", "top_p", "stop", "seed", "max_tokens", "stream"])
        async with setting.client.chat(**fields) as response:
            assert response.status == 200
    submit = asked.result()
    assert submit.max_tokens == LENGTH_SERVED - len(submit.prompt_ids)
    assert submit.sampling.temperature == 1.0


async def test_tokens_leave_as_they_come() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.complete(stream=True).__aenter__())
        submit = await setting.pool.next(SubmitRequest)
        assert not opening.done(), "the status line goes out with the first token"
        await setting.pool.tokens(submit, b"a")
        async with await opening as response:
            stream = each_event(response)
            assert text_of([await anext(stream)]) == "a"
            await setting.pool.tokens(submit, b"b", first=1)
            assert text_of([await anext(stream)]) == "b"
            await setting.pool.tokens(submit, b"c", first=2, finish="length")
            rest = [event async for event in stream]
    assert rest[-1] == "[DONE]"
    assert text_of(rest[:-1]) == "c"
    assert rest[-2]["choices"][0]["finish_reason"] == "length"


async def test_a_stop_string_across_tokens_never_leaks_and_stops_the_computation() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.complete(stream=True, stop=["DEF", "zz"]).__aenter__())
        submit = await setting.pool.next(SubmitRequest)
        await setting.pool.tokens(submit, b"ABCDxDE")
        await setting.pool.tokens(submit, b"Fgh", first=7)
        async with await opening as response:
            chunks = await events(response)
        assert text_of(chunks) == "ABCDx"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert (await setting.pool.next(CancelRequest)).request == submit.request


@pytest.mark.slow
async def test_a_status_line_goes_out_after_ten_seconds_without_a_token() -> None:
    async with gateway() as setting, setting.client.complete(stream=True) as response:
        assert response.status == 200
        submit = await setting.pool.next(SubmitRequest)
        await setting.pool.tokens(submit, b"late", finish="length")
        assert text_of(await events(response)) == "late"


async def test_every_end_is_counted_once_and_logged_once() -> None:
    with capture_logs() as logs:
        async with gateway() as setting:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(answered(setting, b"ok"))
                async with setting.client.complete() as response:
                    assert response.status == 200
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(cut_short(setting))
                async with setting.client.complete(max_tokens=1) as response:
                    assert (await response.json())["choices"][0]["finish_reason"] == "length"
            async with setting.client.complete(max_tokens=0) as response:
                assert response.status == 400
            finished = [
                await setting.client.metric(f'slipstream_requests_finished_total{{reason="{reason}"}}')
                for reason in ("stop", "length", "rejected", "abort", "error")
            ]
            assert finished == [1, 1, 1, 0, 0]
            assert await setting.client.metric("slipstream_generation_tokens_total") == 4
            assert await setting.client.metric("slipstream_prompt_tokens_total") == 4
    ended = [entry for entry in logs if entry["event"] == "request_finished"]
    assert [(entry["reason"], entry["tokens"]) for entry in ended] == [("stop", 3), ("length", 1)]
    assert all(entry["ttft_s"] == 0 for entry in ended), "the clock stands"


async def test_the_figures_of_the_pool_are_those_of_the_last_list() -> None:
    async with gateway() as setting:
        await setting.pool.held(
            report=PoolReport(1, LENGTH_SERVED, running=3, waiting=4, blocks_used=5, blocks_total=60)
        )

        async def is_shown() -> bool:
            return await setting.client.metric("slipstream_requests_running") == 3

        await until(is_shown)
        assert await setting.client.metric("slipstream_requests_waiting") == 4
        assert await setting.client.metric("slipstream_kv_blocks_used") == 5
        assert await setting.client.metric("slipstream_kv_blocks_total") == 60


async def test_openais_own_client_streams_a_chat() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        tasks.create_task(answered(setting, b"Paris."))
        base_url = f"http://127.0.0.1:{setting.port.result()}/v1"
        async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "capital?"}], stream=True
            )
            said = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(said) == "Paris."
