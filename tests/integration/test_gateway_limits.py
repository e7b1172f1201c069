"""Every limit of the gateway over real HTTP: refused in the envelope, counted by its code, over when it is over."""

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from services.gateway.intake import BODIES_AT_ONCE, LARGE_BYTES, MAX_VALUES, OBJECT_VALUES
from shared.protocol import names
from shared.protocol.messages import CancelRequest, SubmitRequest
from tests.integration.gateway_pool import LENGTH_SERVED, MODEL, WAIT_S, Setting, events, gateway, until

KEYS = """
[tenants.one]
keys = ["sk-one"]
max_streams = 2
max_queued_tokens = 10
least_priority = -5
[tenants.two]
keys = ["sk-two", "sk-deux"]
"""


def by(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def posted(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


@asynccontextmanager
async def deaf(port: int) -> AsyncIterator[asyncio.StreamWriter]:
    """Connect and never read."""
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.setblocking(False)
    await asyncio.get_running_loop().sock_connect(line, ("127.0.0.1", port))
    _, writer = await asyncio.open_connection(sock=line, limit=1)
    try:
        yield writer
    finally:
        writer.transport.abort()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def refused(setting: Setting, code: str) -> float:
    return await setting.client.metric(f'slipstream_http_errors_total{{code="{code}"}}')


@asynccontextmanager
async def asked(setting: Setting, key: str, **fields: Any) -> AsyncIterator[tuple[int, Any]]:
    """Ask for a stream and give status and error of what comes before it."""
    body = {"model": MODEL, "prompt": "hi", "stream": True, **fields}
    async with setting.client.session.post("/v1/completions", json=body, headers=by(key)) as response:
        is_stream = response.content_type == "text/event-stream"
        yield response.status, response if is_stream else (await response.json())["error"]


async def running(setting: Setting, tasks: asyncio.TaskGroup, key: str) -> tuple[SubmitRequest, Any]:
    """Return a stream of this key that has its first token."""
    post = setting.client.session.post(
        "/v1/completions", json={"model": MODEL, "prompt": "hi", "stream": True}, headers=by(key)
    )
    opening = tasks.create_task(post.__aenter__())
    submit = await setting.pool.next(SubmitRequest)
    await setting.pool.tokens(submit, b"a")
    return submit, await opening


async def test_a_key_has_as_many_streams_as_it_may_and_others_are_not_in_its_way(tmp_path: Any) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    async with gateway(api_key_file=str(file), open_paths="/metrics") as setting, asyncio.TaskGroup() as tasks:
        streams = [await running(setting, tasks, "sk-one") for _ in range(2)]
        async with asked(setting, "sk-one") as (status, error):
            assert (status, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
        others = [await running(setting, tasks, key) for key in ("sk-two", "sk-deux", "sk-two")]
        assert {submit.tenant for submit, _ in streams} == {"one"}
        assert {submit.tenant for submit, _ in others} == {"two"}, "the keys of a tenant are one client to the queue"
        await setting.pool.tokens(streams[0][0], b"b", first=1, finish="length")
        await events(streams[0][1])

        async def has_place() -> bool:
            return await setting.client.metric("slipstream_http_requests_open") == 4

        await until(has_place)
        streams[0] = await running(setting, tasks, "sk-one")
        assert await refused(setting, "rate_limit_exceeded") == 1
        assert await setting.client.metric('slipstream_requests_finished_total{reason="rejected"}') == 1
        for submit, response in streams + others:
            await setting.pool.tokens(submit, b"b", first=1, finish="length")
            await events(response)


async def test_the_limit_for_every_key_holds_for_keys_that_nobody_knows() -> None:
    async with gateway(max_streams_per_key=1) as setting, asyncio.TaskGroup() as tasks:
        submit, response = await running(setting, tasks, "sk-any")
        async with asked(setting, "sk-any") as (status, _):
            assert status == 429
        other, another = await running(setting, tasks, "sk-other")
        for one, stream in ((submit, response), (other, another)):
            await setting.pool.tokens(one, b"b", first=1, finish="length")
            await events(stream)


async def test_tokens_in_queue_are_bounded_until_they_have_their_first_answer(tmp_path: Any) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    settings: dict[str, Any] = {"max_queued_tokens": 25, "api_key_file": str(file), "open_paths": "/metrics"}
    async with gateway(**settings) as setting, asyncio.TaskGroup() as tasks:
        body = {"model": MODEL, "prompt": "x" * 8, "stream": True}
        posts = [setting.client.session.post("/v1/completions", json=body, headers=by(k)) for k in ("sk-one", "sk-two")]
        opening = [tasks.create_task(post.__aenter__()) for post in posts]
        waiting = [await setting.pool.next(SubmitRequest) for _ in opening]
        assert await setting.client.metric("slipstream_queued_tokens") == 16
        for key, tokens, status, code in (
            ("sk-one", 3, 429, "rate_limit_exceeded"),
            ("sk-two", 10, 429, "queue_full"),
        ):
            async with asked(setting, key, prompt="x" * tokens) as (got, error):
                assert (got, error["code"]) == (status, code)
        for submit in waiting:
            await setting.pool.tokens(submit, b"a")
        responses = [await one for one in opening]
        assert await setting.client.metric("slipstream_queued_tokens") == 0
        for submit, response in zip(waiting, responses, strict=True):
            await setting.pool.tokens(submit, b"b", first=1, finish="length")
            await events(response)


async def test_a_key_may_not_ask_to_be_more_urgent_than_it_is(tmp_path: Any) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    async with gateway(api_key_file=str(file)) as setting:
        async with asked(setting, "sk-one", priority=-6) as (status, error):
            assert (status, error["param"]) == (400, "priority")
        assert await setting.pool.nothing_more()


async def test_what_waits_for_too_long_is_a_408_or_an_error_event_and_is_cancelled() -> None:
    async with gateway(max_queue_s=5) as setting, asyncio.TaskGroup() as tasks:
        whole = tasks.create_task(setting.client.complete().__aenter__())
        submit = await setting.pool.next(SubmitRequest)
        (running_one, stream) = await running(setting, tasks, "sk")
        setting.clock.now_s += 3
        await setting.pool.held(submit)
        setting.clock.now_s += 2.1
        await setting.pool.held(submit, running_one)
        async with await whole as response:
            assert response.status == 408
            assert (await response.json())["error"]["code"] == "queue_timeout"
            assert "Retry-After" in response.headers
        assert (await setting.pool.next(CancelRequest)).request == submit.request
        assert await refused(setting, "queue_timeout") == 1
        await setting.pool.tokens(running_one, b"b", first=1, finish="length")
        assert "error" not in (await events(stream))[-1], "who has a token waits no more"


async def test_a_length_that_is_announced_is_refused_before_anything_is_sent() -> None:
    async with gateway(max_body_bytes=2000) as setting:
        reader, writer = await asyncio.open_connection("127.0.0.1", setting.port.result())
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n")
        async with asyncio.timeout(5):
            assert b" 413 " in await reader.readline()
        writer.close()
        assert await refused(setting, "request_too_large") == 1


async def test_a_body_in_pieces_is_refused_where_it_becomes_too_large() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b" " * 500

    async with gateway(max_body_bytes=2000) as setting:
        async with setting.client.session.post("/v1/completions", data=pieces()) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (413, "request_too_large")
        assert await setting.client.metric("slipstream_body_bytes") == 0


@pytest.mark.parametrize(("value", "counts"), [("[]", 2), ("{}", OBJECT_VALUES + 1), ("1", 1)])
async def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(value: str, counts: int) -> None:
    async with gateway() as setting:
        many = ",".join([value] * (MAX_VALUES // counts + 1))
        data = f'{{"model":"m","prompt":[{many}]}}'.encode()
        async with setting.client.session.post("/v1/completions", data=io.BytesIO(data)) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (413, "request_too_large")


@asynccontextmanager
async def bringing(setting: Setting, count: int, size: int, path: str = "/v1/completions") -> AsyncIterator[None]:
    """Bring so many bodies of a size, all but the last byte."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()
    lines = [await asyncio.open_connection("127.0.0.1", setting.port.result()) for _ in range(count)]
    for _, writer in lines:
        writer.write(head + b" " * (size - 1))
    try:
        yield
    finally:
        for _, writer in lines:
            writer.close()


async def body_bytes_are(setting: Setting, expected: int) -> None:
    async def is_so() -> bool:
        return await setting.client.metric("slipstream_body_bytes") == expected

    await until(is_so)


async def test_bodies_that_never_end_hold_no_more_memory_than_there_is_for_them_and_leave_room_for_small_ones() -> None:
    size = 2 * LARGE_BYTES
    async with gateway(max_body_bytes=size) as setting, asyncio.TaskGroup() as tasks:
        async with bringing(setting, BODIES_AT_ONCE, size):
            await body_bytes_are(setting, BODIES_AT_ONCE * (size - 1 - LARGE_BYTES))
            async with setting.client.complete(prompt="x" * (size - 100)) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (429, "queue_full")
            small = tasks.create_task(setting.client.complete().__aenter__())
            await setting.pool.tokens(await setting.pool.next(SubmitRequest), b"a", finish="length")
            assert (await small).status == 200
        await body_bytes_are(setting, 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_bodies_that_never_end_take_no_places_from_those_that_are_here(path: str) -> None:
    size = LARGE_BYTES + 2
    async with gateway(max_queue=2) as setting, asyncio.TaskGroup() as tasks, bringing(setting, 40, size, path):
        await body_bytes_are(setting, 40)  # each has begun to be read
        opening = tasks.create_task(setting.client.complete().__aenter__())
        await setting.pool.tokens(await setting.pool.next(SubmitRequest), b"a", finish="length")
        assert (await opening).status == 200
        async with setting.client.session.post("/tokenize", json={"prompt": "hi"}) as response:
            assert response.status == 200


async def test_a_full_line_refuses_a_body_that_has_not_come_yet() -> None:
    async with gateway(max_queue=1) as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.complete().__aenter__())

        async def is_full() -> bool:
            return await setting.bus.length(names.requests(MODEL)) == 1

        await until(is_full)
        reader, writer = await asyncio.open_connection("127.0.0.1", setting.port.result())
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            assert b" 429 " in await reader.readline()
        writer.close()
        await setting.pool.tokens(await setting.pool.next(SubmitRequest), b"a", finish="length")
        assert (await opening).status == 200


@pytest.mark.parametrize("place", ["line", "header", "many headers"])
async def test_headers_are_bounded_counted_and_never_repeated(place: str) -> None:
    secret = "sk-secret-0123456789"  # noqa: S105 - it opens nothing
    long = secret * 100
    sent = {
        "line": f"GET /{long} HTTP/1.1\r\nHost: x\r\n\r\n",
        "header": f"GET / HTTP/1.1\r\nAuthorization: Bearer {long}\r\n\r\n",
        "many headers": "GET / HTTP/1.1\r\n" + f"X: {secret}\r\n" * 200 + "\r\n",
    }[place]
    with capture_logs() as logs:
        async with gateway(max_header_bytes=1024) as setting:
            reader, writer = await asyncio.open_connection("127.0.0.1", setting.port.result())
            writer.write(sent.encode())
            async with asyncio.timeout(5):
                answer = await reader.read()
            writer.close()
            assert int(answer.split()[1]) in {400, 431}
            assert (await refused(setting, "headers_too_large" if b" 431 " in answer else "malformed_request")) == 1
    assert secret.encode() not in answer
    assert secret not in repr(logs)


@pytest.mark.parametrize(
    "line", [b"Authorization Bearer sk-secret", b"Authorization: Bearer sk-secret\x00", b"Authoriz\xe4tion: sk-secret"]
)
async def test_a_malformed_header_is_not_repeated_to_anybody(line: bytes) -> None:
    with capture_logs() as logs:
        async with gateway() as setting:
            reader, writer = await asyncio.open_connection("127.0.0.1", setting.port.result())
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n\r\n")
            async with asyncio.timeout(5):
                answer = await reader.read()
            writer.close()
    assert b" 400 " in answer.splitlines()[0]
    assert b"secret" not in answer
    assert "secret" not in repr(logs)


async def test_a_prompt_too_long_is_counted_by_its_code_and_logged_in_one_line() -> None:
    with capture_logs() as logs:
        async with gateway() as setting:
            async with setting.client.complete(prompt=[1] * LENGTH_SERVED) as response:
                assert response.status == 400
            assert await refused(setting, "context_length_exceeded") == 1
    lines = [entry for entry in logs if entry["event"] == "request_refused"]
    assert len(lines) == 1
    assert (lines[0]["status"], lines[0]["code"], lines[0]["path"]) == (
        400,
        "context_length_exceeded",
        "/v1/completions",
    )
    assert "exc_info" not in lines[0]
    assert 0 < lines[0]["took_ms"] < WAIT_S * 1000


async def test_a_client_that_takes_nothing_is_dropped_after_a_stated_time_and_its_computation_stops() -> None:
    async with gateway(send_timeout_s=0.3) as setting, deaf(setting.port.result()) as writer:
        setting.pool.report = msgspec.structs.replace(setting.pool.report, length_served=40_000_000)
        await setting.pool.held()
        writer.write(posted({"model": MODEL, "prompt": "hi", "stream": True, "max_tokens": 30_000_000}))
        submit = await setting.pool.next(SubmitRequest)
        first = 0
        async with asyncio.timeout(20):
            while await setting.client.metric("slipstream_clients_dropped_total") == 0:
                await setting.pool.tokens(submit, b"\x01" * 20_000, first=first)  # six bytes of JSON each
                first += 20_000
        assert (await setting.pool.next(CancelRequest)).request == submit.request
        assert await setting.client.metric('slipstream_requests_finished_total{reason="abort"}') == 1
        assert await setting.client.metric("slipstream_http_requests_open") == 0


async def test_a_client_that_does_not_take_a_whole_answer_is_dropped_too() -> None:
    async with gateway(send_timeout_s=0.3) as setting, deaf(setting.port.result()) as writer:
        writer.write(posted({"prompt": "\x01" * 900_000, "return_token_strs": True}, "/tokenize"))

        async def is_dropped() -> bool:
            return await setting.client.metric("slipstream_clients_dropped_total") == 1

        await until(is_dropped)
