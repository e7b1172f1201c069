"""Refusals over real HTTP: always OpenAI's envelope, before any stream, never a traceback."""

import asyncio
import io
import json
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from services.worker.fake_tokenizer import VOCABULARY, fake_tokenizer_files
from shared.protocol.messages import SubmitRequest
from tests.integration.gateway_pool import LENGTH_SERVED, MODEL, gateway, until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
TEXT = {"model": MODEL, "prompt": "x"}

STREAM: tuple[dict[str, Any], dict[str, Any]] = ({}, {"stream": True})
REFUSED: list[tuple[str, Any, int, str | None, str | None]] = [
    ("chat/completions", b"", 400, None, "invalid_value"),
    ("chat/completions", b"[]", 400, None, "invalid_value"),
    ("chat/completions", b'{"model":"m","messages":[{"role":"user","content":"x"}], x}', 400, None, "invalid_value"),
    ("chat/completions", {**CHAT, "model": "nobody"}, 404, "model", "model_not_found"),
    ("chat/completions", {**CHAT, "n": 0}, 400, "n", "invalid_value"),
    ("chat/completions", {**CHAT, "top_k": 2**63, "top_p": 0.9}, 400, "top_k", "invalid_value"),
    ("chat/completions", {**CHAT, "top_k": 2**64}, 400, "top_k", "invalid_value"),
    ("chat/completions", {**CHAT, "max_tokens": -1}, 400, "max_tokens", "invalid_value"),
    (
        "chat/completions",
        {**CHAT, "response_format": {"type": "nope"}},
        400,
        "response_format.type",
        "invalid_value",
    ),
    ("chat/completions", {**CHAT, "max_tokens": LENGTH_SERVED}, 400, "messages", "context_length_exceeded"),
    ("chat/completions", {**CHAT, "tools": [{}]}, 400, "tools[0].type", "invalid_value"),
    ("completions", {"model": MODEL, "prompt": "x", "tools": [{}]}, 400, "tools", "unsupported_parameter"),
    ("completions", {**TEXT, "n": "a"}, 400, "n", "invalid_value"),
    ("completions", {**TEXT, "prompt": [1] * LENGTH_SERVED}, 400, "prompt", "context_length_exceeded"),
    ("completions", {**TEXT, "max_tokens": 10**12}, 400, "prompt", "context_length_exceeded"),
    ("completions", {**TEXT, "prompt": [VOCABULARY]}, 400, "prompt", "invalid_value"),
    ("completions", {**TEXT, "prompt": ""}, 400, "prompt", "invalid_value"),
    ("completions", {**TEXT, "stop": ["a", ""]}, 400, "stop", "invalid_value"),
]


async def test_every_refusal_is_plain_http_with_the_envelope_and_the_server_lives() -> None:
    async with gateway() as setting:
        for route, body, status, param, code in REFUSED:
            for stream in (0, 1):
                sent = body if isinstance(body, bytes) else json.dumps({**body, **STREAM[stream]}).encode()
                async with setting.client.session.post(f"/v1/{route}", data=sent) as response:
                    text = await response.text()
                assert response.status == status, (body, text)
                assert response.content_type == "application/json"
                error = json.loads(text)["error"]
                assert (error["param"], error["code"]) == (param, code)
                assert set(error) == {"message", "type", "param", "code"}
                assert "Traceback" not in text
        assert await setting.client.metric('slipstream_requests_finished_total{reason="rejected"}') == 2 * len(REFUSED)
        assert await setting.pool.nothing_more(), "no refused request was put in line"


async def test_both_numbers_are_in_the_message_of_a_prompt_that_is_too_long() -> None:
    async with gateway() as setting, setting.client.complete(prompt=[1] * 190, max_tokens=20) as response:
        message = (await response.json())["error"]["message"]
    assert f"maximum context length is {LENGTH_SERVED} tokens" in message
    assert "requested 210 tokens" in message


async def test_unknown_paths_and_wrong_methods_have_the_envelope_too() -> None:
    async with gateway() as setting:
        session = setting.client.session
        for method, path, status in (
            ("GET", "/nowhere", 404),
            ("GET", "/v1/chat/completions", 405),
            ("POST", "/v1/models", 405),
            ("GET", "/v1/models/nobody", 404),
            ("DELETE", "/v1/completions", 405),
        ):
            async with session.request(method, path) as response:
                assert response.status == status
                assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


async def test_a_full_line_is_a_429_before_any_stream_with_a_time_to_try_again() -> None:
    async with gateway(max_queue=2) as setting, asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(setting.client.complete(stream=True).__aenter__()) for _ in range(2)]

        async def is_full() -> bool:
            return await setting.pool.bus.length("slipstream:requests:m") == 2

        await until(is_full)
        for stream in (True, False):
            async with setting.client.complete(stream=stream) as response:
                assert response.status == 429
                assert int(response.headers["Retry-After"]) >= 1
                assert (await response.json())["error"]["code"] == "queue_full"
        for _ in waiting:
            await setting.pool.tokens(await setting.pool.next(SubmitRequest), b"ok", finish="length")
        for one in waiting:
            async with await one as response:
                assert response.status == 200


async def test_a_crash_is_a_500_with_the_envelope_and_one_log_event() -> None:
    no_word = Tokenizer(WordLevel({"a": 0}))  # no word for others: it raises a bare Exception
    async with gateway(is_up=False) as setting:
        files = msgspec.structs.replace(fake_tokenizer_files(), tokenizer_json=no_word.to_str().encode())
        await setting.pool.publish_tokenizer(files)
        await setting.pool.held()
        await setting.client.until_ready()
        with capture_logs() as logs:
            async with setting.client.complete() as response:
                text = await response.text()
        assert response.status == 500
        assert json.loads(text)["error"]["message"] == "internal error"
        assert "Traceback" not in text
        assert [entry["event"] for entry in logs].count("request_crashed") == 1
        async with setting.client.session.get("/health") as response:
            assert response.status == 200


@pytest.mark.parametrize(
    ("given", "expected"), [("mine-1", "mine-1"), ("x" * 500, "x" * 128), ("", None), ("na\u00efve", None)]
)
async def test_answers_carry_a_request_id(given: str, expected: str | None) -> None:
    async with gateway() as setting:
        headers = {"X-Request-Id": given} if given else {}
        for path in ("/health", "/nowhere", "/v1/models"):
            async with setting.client.session.get(path, headers=headers) as response:
                answered = response.headers["X-Request-Id"]
            assert answered == expected if expected else answered.startswith("req-")


async def test_a_body_is_read_whatever_its_type_is_called() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(
            setting.client.session.post(
                "/v1/completions", data=json.dumps(TEXT), headers={"Content-Type": "text/plain"}
            ).__aenter__()
        )
        await setting.pool.tokens(await setting.pool.next(SubmitRequest), b"ok", finish="length")
        async with await opening as response:
            assert response.status == 200


async def test_a_body_that_is_too_large_is_a_413() -> None:
    async with gateway(max_body_bytes=2000) as setting:
        body = io.BytesIO(b" " * 2001)
        async with setting.client.session.post("/v1/completions", data=body) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "request_too_large"


async def test_a_flood_gets_an_answer_each_and_as_many_as_there_is_room_for_are_taken() -> None:
    async with gateway(max_queue=4) as setting, asyncio.TaskGroup() as tasks:
        flood = [tasks.create_task(setting.client.complete(stream=True).__aenter__()) for _ in range(40)]

        async def all_refused_but_four() -> bool:
            return sum(one.done() for one in flood) == 36

        await until(all_refused_but_four)
        for _ in range(4):
            await setting.pool.tokens(await setting.pool.next(SubmitRequest), b"ok", finish="length")
        statuses = []
        for one in flood:
            async with await one as response:
                statuses.append(response.status)
        assert sorted(statuses) == [200] * 4 + [429] * 36
        assert await setting.pool.nothing_more()
