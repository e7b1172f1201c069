"""Connections as bytes: what is no HTTP, and who never finishes what he has to say."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import ANY

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from services.gateway.app import listen, make_runner
from services.gateway.connections import Bounds
from tests.integration.gateway_pool import WAIT_S, gateway

BRIEF_S = 0.2
HEAD = b"GET /fast HTTP/1.1\r\nHost: x\r\n\r\n"
MALFORMED = [
    b"nonsense\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]


class Line:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(WAIT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, body

    async def until_closed(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Line]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Line(reader, writer)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)  # whoever was cut off is told so here


@asynccontextmanager
async def brief(go_on: asyncio.Event | None = None) -> AsyncIterator[int]:
    """Listen with the runner of production and a short time for headers; /slow answers when it may."""
    app = web.Application(client_max_size=2**20)

    async def fast(request: web.Request) -> web.Response:
        return web.Response(body=await request.read() or b"fast")

    async def slow(_: web.Request) -> web.Response:
        assert go_on is not None
        await go_on.wait()
        return web.Response(body=b"slow")

    async def early(_: web.Request) -> web.Response:
        return web.Response(body=b"early")

    async def broken(_: web.Request) -> web.Response:
        raise ValueError("a detail that is nobody's business")

    app.add_routes(
        [
            web.get("/fast", fast),
            web.post("/fast", fast),
            web.get("/slow", slow),
            web.post("/early", early),
            web.get("/broken", broken),
        ]
    )
    runner = make_runner(app, Bounds(headers_s=BRIEF_S))
    await runner.setup()
    try:
        yield await listen(runner, "127.0.0.1", 0)
    finally:
        await runner.cleanup()


async def one_is_given_up(port: int) -> None:
    """Return when a connection that was opened now has been closed for bringing nothing."""
    async with connected(port) as line:
        assert await line.until_closed() == b""


@pytest.mark.parametrize("sent", MALFORMED)
async def test_what_is_no_http_gets_the_envelope_and_a_closed_connection(sent: bytes) -> None:
    async with gateway() as setting:
        async with connected(setting.port.result()) as line:
            line.writer.write(sent)
            status, headers, body = await line.answer()
            assert await line.until_closed() == b""
        assert status == 400
        assert headers["content-type"].startswith("application/json")
        assert headers["x-request-id"].startswith("req-")
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "malformed_request")
        assert set(error) == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]
        async with setting.client.session.get("/health") as response:
            assert response.status == 200


async def test_an_expectation_that_nobody_meets_has_the_envelope_too() -> None:
    async with gateway() as setting, connected(setting.port.result()) as line:
        line.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: magic\r\n\r\n{}")
        status, headers, body = await line.answer()
    assert status == 417
    assert headers["content-type"].startswith("application/json")
    assert "x-request-id" in headers
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_malformed_request_behind_a_good_one_is_answered_after_it() -> None:
    async with gateway() as setting, connected(setting.port.result()) as line:
        line.writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await line.answer())[0] == 200
        line.writer.write(b"nonsense\r\n\r\n")
        assert (await line.answer())[0] == 400
        assert await line.until_closed() == b""


async def test_a_crash_outside_the_applications_own_net_is_a_500_with_the_envelope_and_a_closed_connection() -> None:
    with capture_logs() as logs:
        async with brief() as port, connected(port) as line:
            line.writer.write(b"GET /broken HTTP/1.1\r\nHost: x\r\n\r\n" + HEAD)
            status, headers, body = await line.answer()
            assert await line.until_closed() == b""
    assert status == 500
    assert headers["connection"] == "close"
    assert json.loads(body)["error"]["code"] == "internal_error"
    assert b"detail" not in body
    assert [entry["event"] for entry in logs].count("http_refused") == 1


def test_thirty_seconds_are_enough_for_headers() -> None:
    assert Bounds().headers_s == 30


@pytest.mark.parametrize("sent", [b"", b"GET /fast HT", b"GET /fast HTTP/1.1\r\nHost: x\r\n", b"\r\n\r\n"])
async def test_headers_that_never_end_end_the_connection(sent: bytes) -> None:
    with capture_logs() as logs:
        async with brief() as port, connected(port) as line:
            line.writer.write(sent)
            assert await line.until_closed() == b""
    refused = [entry for entry in logs if entry["event"] == "http_refused"]
    assert [entry["what"] for entry in refused] == ["the headers did not arrive in time"]


async def test_headers_that_come_in_drops_get_no_more_time() -> None:
    async def drip(line: Line) -> None:
        line.writer.write(b"GET /fast HTTP/1.1\r\n")
        while not line.reader.at_eof():
            line.writer.write(b"X: y\r\n")
            await asyncio.sleep(BRIEF_S / 10)

    async with brief() as port, connected(port) as line, asyncio.TaskGroup() as tasks:
        dripping = tasks.create_task(drip(line))
        with suppress(ConnectionResetError):  # drops that were under way when it was closed
            assert await line.until_closed() == b""
        dripping.cancel()


async def test_headers_in_pieces_are_read_as_long_as_they_end_in_time() -> None:
    async with brief() as port, connected(port) as line:
        for piece in (HEAD[:3], HEAD[3:20], HEAD[20:]):
            line.writer.write(piece)
            await line.writer.drain()
        assert (await line.answer())[2] == b"fast"


async def test_an_answer_may_take_longer_than_headers_may() -> None:
    go_on = asyncio.Event()
    async with brief(go_on) as port, connected(port) as line:
        line.writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await one_is_given_up(port)
        go_on.set()
        assert (await line.answer())[2] == b"slow"


async def test_a_body_may_take_longer_than_headers_may() -> None:
    async with brief() as port, connected(port) as line:
        line.writer.write(b"POST /fast HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab")
        await one_is_given_up(port)
        line.writer.write(b"cd")
        assert (await line.answer())[2] == b"abcd"


async def test_between_requests_a_connection_may_be_idle_but_a_request_once_begun_must_end() -> None:
    async with brief() as port, connected(port) as line:
        for _ in range(2):
            line.writer.write(HEAD)
            assert (await line.answer())[2] == b"fast"
            await one_is_given_up(port)
        line.writer.write(HEAD[:10])
        assert await line.until_closed() == b""


async def test_requests_in_one_packet_are_all_answered() -> None:
    async with brief() as port, connected(port) as line:
        line.writer.write(HEAD * 3)
        answers: list[Any] = [await line.answer() for _ in range(3)]
    assert [body for _, _, body in answers] == [b"fast"] * 3


async def test_a_body_of_many_pieces_is_read_in_their_order_though_its_handler_takes_some_while_others_wait() -> None:
    """Many at once, so that pieces wait for their turn; as much as the buffers before the handler hold many times."""
    bodies = [b"".join(b"%03d:%08d," % (line, place) for place in range(75_000)) for line in range(40)]

    async def echoed(port: int, body: bytes) -> bool:
        async with connected(port) as line:
            line.writer.write(b"POST /fast HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            return await line.answer() == (200, ANY, body)

    async with brief() as port:
        assert all(await asyncio.gather(*(echoed(port, body) for body in bodies)))


async def test_the_rest_of_a_body_whose_answer_has_been_given_is_no_beginning_of_a_request() -> None:
    async with brief() as port, connected(port) as line:
        line.writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
        assert (await line.answer())[2] == b"early"
        line.writer.write(b"late")
        await line.writer.drain()
        await one_is_given_up(port)
        await one_is_given_up(port)
        line.writer.write(HEAD)
        assert (await line.answer())[2] == b"fast"
