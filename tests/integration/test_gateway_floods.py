"""Many at once: heard a few at a time, so that whoever already has a stream keeps it.

What a flood costs the others is counted in requests and iterations of the loop, never in seconds: the counts are the
same on a machine that is busy.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any

from aiohttp import web

from services.gateway.app import ACCEPTED_AT_ONCE, listen, make_runner
from services.gateway.connections import Bounds
from services.gateway.turns import HEARD_AT_ONCE
from shared.protocol import names
from shared.protocol.messages import SubmitRequest
from tests.integration.gateway_pool import MODEL, WAIT_S, Setting, each_event, gateway, until

CROWD = 200
ASK = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\nsecret"


class Ear:
    """An application that notes in which iteration of the loop each request reached it, and what each accepted."""

    def __init__(self) -> None:
        self.heard: Counter[int] = Counter()
        self.connections = [0]
        """There are after each iteration."""
        app = web.Application()
        app.add_routes([web.post("/", self.hear)])
        self.runner = make_runner(app, Bounds())
        self._iteration = 0

    async def listen(self) -> int:
        await self.runner.setup()
        self._tick()
        return await listen(self.runner, "127.0.0.1", 0)

    def _tick(self) -> None:
        assert self.runner.server is not None
        self._iteration += 1
        self.connections.append(len(self.runner.server.connections))
        self._handle = asyncio.get_running_loop().call_soon(self._tick)

    async def stop(self) -> None:
        self._handle.cancel()
        await self.runner.cleanup()

    async def hear(self, request: web.Request) -> web.Response:
        self.heard[self._iteration] += 1
        return web.Response(body=await request.read())


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Ear, int]]:
    ear = Ear()
    port = await ear.listen()
    try:
        yield ear, port
    finally:
        await ear.stop()


class Line:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def status_and_body(self) -> tuple[int, bytes]:
        async with asyncio.timeout(WAIT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
            length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.startswith(b"content-length"))
            return int(head.split()[1]), await self.reader.readexactly(length)


async def opened(stack: AsyncExitStack, port: int, count: int) -> list[Line]:
    lines = []
    for _ in range(count):
        line = Line(*await asyncio.open_connection("127.0.0.1", port))
        stack.callback(line.writer.close)
        lines.append(line)
    return lines


async def test_of_a_crowd_that_speaks_at_once_few_are_heard_between_two_looks_of_the_loop() -> None:
    async with listening() as (ear, port), AsyncExitStack() as stack:
        lines = await opened(stack, port, CROWD)
        for line in lines:
            line.writer.write(ASK)
        assert [await line.status_and_body() for line in lines] == [(200, b"secret")] * CROWD
    assert ear.heard.total() == CROWD
    assert max(ear.heard.values()) <= HEARD_AT_ONCE


async def test_of_a_crowd_that_connects_at_once_few_are_accepted_between_two_looks_and_none_is_sent_away() -> None:
    async with listening() as (ear, port), AsyncExitStack() as stack:
        connecting = [asyncio.open_connection("127.0.0.1", port) for _ in range(CROWD)]
        lines = [Line(*pair) for pair in await asyncio.gather(*connecting)]
        for line in lines:
            stack.callback(line.writer.close)
            line.writer.write(ASK)
        assert [await line.status_and_body() for line in lines] == [(200, b"secret")] * CROWD
    assert max(after - before for before, after in pairwise(ear.connections)) <= ACCEPTED_AT_ONCE


async def test_what_comes_in_pieces_while_it_waits_for_its_turn_is_read_as_it_came() -> None:
    async with listening() as (_, port), AsyncExitStack() as stack:
        lines = await opened(stack, port, CROWD)
        for piece in (ASK[:9], ASK[9:-4], ASK[-4:]):
            for line in lines:
                line.writer.write(piece)
            await asyncio.sleep(0)
        assert [await line.status_and_body() for line in lines] == [(200, b"secret")] * CROWD


async def test_who_leaves_while_it_waits_for_its_turn_is_in_nobodys_way() -> None:
    async with listening() as (_, port), AsyncExitStack() as stack:
        lines = await opened(stack, port, CROWD)
        for line in lines:
            line.writer.write(ASK)
        await asyncio.sleep(0)
        for line in lines[::2]:
            line.writer.transport.abort()
        assert [await line.status_and_body() for line in lines[1::2]] == [(200, b"secret")] * (CROWD // 2)


def request(**fields: Any) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": "hi", **fields}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def fill(setting: Setting, stack: AsyncExitStack, queue: int) -> list[Line]:
    """Let requests wait until the line is full. Nobody takes them out of it."""
    waiting = await opened(stack, setting.port.result(), queue)
    for line in waiting:
        line.writer.write(request())

    async def is_full() -> bool:
        return await setting.bus.length(names.requests(MODEL)) == queue

    await until(is_full)
    return waiting


async def test_between_two_tokens_of_a_running_stream_only_a_part_of_a_flood_is_answered() -> None:
    """Each token is told when the one before has been read, so that as many come as the loop has room for."""
    async with gateway(max_queue=2) as setting, asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        opening = tasks.create_task(setting.client.complete(stream=True, max_tokens=150).__aenter__())
        submit = await setting.pool.next(SubmitRequest)
        await setting.pool.tokens(submit, b"a")
        events = each_event(await opening)
        assert (await anext(events))["choices"][0]["text"] == "a"
        await fill(setting, stack, 2)
        lines, statuses = await opened(stack, setting.port.result(), CROWD), Counter[int]()

        async def read(line: Line) -> None:
            statuses[(await line.status_and_body())[0]] += 1

        for line in lines:
            tasks.create_task(read(line))
            line.writer.write(request())
        answered = [0]
        while answered[-1] < CROWD:
            await setting.pool.tokens(submit, b"b", first=len(answered))
            assert (await anext(events))["choices"][0]["text"] == "b"
            answered.append(statuses.total())
        assert statuses == {429: CROWD}
        assert max(after - before for before, after in pairwise(answered)) <= CROWD / 2
        await setting.pool.tokens(submit, b"c", first=len(answered), finish="length")
        assert [event async for event in events][-1] == "[DONE]"


async def test_a_full_line_refuses_before_the_body_is_looked_at_and_lets_in_who_finds_room() -> None:
    queue = 3
    async with gateway(max_queue=queue) as setting, AsyncExitStack() as stack:
        waiting = await fill(setting, stack, queue)
        for body in ({}, {"n": "many"}):
            async with setting.client.complete(**body) as response:
                assert response.status == 429
                assert (await response.json())["error"]["code"] == "queue_full"
        submits = [await setting.pool.next(SubmitRequest) for _ in range(queue)]
        # out of the line, all still without a token: there is room, and the body is looked at
        async with setting.client.complete(n="many") as response:
            assert response.status == 400
        waiting += await fill(setting, stack, queue)
        submits += [await setting.pool.next(SubmitRequest) for _ in range(queue)]
        for submit in submits:
            await setting.pool.tokens(submit, b"a", finish="length")
        assert [(await line.status_and_body())[0] for line in waiting] == [200] * (2 * queue)


async def test_as_many_find_room_as_the_line_holds_however_many_come_at_once() -> None:
    queue = 20
    async with gateway(max_queue=queue) as setting, AsyncExitStack() as stack:
        lines = await opened(stack, setting.port.result(), CROWD)
        for line in lines:
            line.writer.write(request())
        statuses: Counter[int] = Counter()
        async with asyncio.TaskGroup() as tasks:

            async def read(line: Line) -> None:
                statuses[(await line.status_and_body())[0]] += 1

            for line in lines:
                tasks.create_task(read(line))

            async def rest_are_told() -> bool:
                return statuses.total() == CROWD - queue

            await until(rest_are_told)
            for _ in range(queue):
                await setting.pool.tokens(await setting.pool.next(SubmitRequest), b"a", finish="length")
        assert statuses == {200: queue, 429: CROWD - queue}
