"""A small server on a real socket that behaves, or misbehaves, as it is told."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from loadgen.client import Client, Record
from loadgen.prompts import Request
from loadgen.run import Result, measure
from loadgen.server import open_session
from loadgen.settings import RunSettings
from shared.runtime.clock import monotonic

Script = Callable[["Stream"], Awaitable[None]]
STEP_S = 0.05


class Stream:
    """One answer of the server, written by hand."""

    def __init__(
        self, response: web.StreamResponse, transport: asyncio.Transport | None, asked: dict[str, Any]
    ) -> None:
        self.response = response
        self.transport = transport
        self.asked = asked
        self.tokens = 0

    async def raw(self, data: bytes) -> None:
        await self.response.write(data)

    async def event(self, data: dict[str, Any]) -> None:
        await self.raw(f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode())

    async def text(self, text: str, *, tokens: int = 1, finish: str | None = None) -> None:
        self.tokens += tokens
        content = {"delta": {"content": text}} if "messages" in self.asked else {"text": text}
        await self.event({"choices": [{"index": 0, **content, "finish_reason": finish}], "usage": self.usage})

    @property
    def usage(self) -> dict[str, int]:
        prompt = len(self.asked.get("prompt", "123456789"))
        return {"prompt_tokens": prompt, "completion_tokens": self.tokens, "total_tokens": prompt + self.tokens}

    async def end(self) -> None:
        await self.event({"choices": [], "usage": self.usage})
        await self.raw(b"data: [DONE]\n\n")


class Server:
    """Answers each request by a script. Records what was asked, and how many at a time."""

    def __init__(self) -> None:
        self.script: Script = steady
        self.refusal: web.Response | None = None
        self.content_type = "text/event-stream"
        self.asked: list[dict[str, Any]] = []
        self.peers: set[object] = set()
        self.headers: list[dict[str, str]] = []
        self.now_running = 0
        self.most_running = 0
        self.left = asyncio.Event()
        self.models: list[str] = ["tiny", "other"]
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.peers.add(request.transport and request.transport.get_extra_info("peername"))
        self.headers.append(dict(request.headers))
        if self.refusal is not None:
            return web.Response(
                status=self.refusal.status,
                body=self.refusal.body,
                headers={"Retry-After": "7"},
                content_type="text/json",
            )
        self.now_running += 1
        self.most_running = max(self.most_running, self.now_running)
        response = web.StreamResponse(headers={"Content-Type": self.content_type})
        try:
            await response.prepare(request)
            await self.script(Stream(response, request.transport, self.asked[-1]))
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise
        finally:
            self.now_running -= 1
        return response

    async def list_models(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        return web.json_response({"object": "list", "data": [{"id": model} for model in self.models]})


async def steady(stream: Stream) -> None:
    """One token at once and the others at known distances."""
    for number in range(stream.asked["max_tokens"]):
        if number:
            await asyncio.sleep(STEP_S)
        await stream.text(f" {number}", finish="length" if number + 1 == stream.asked["max_tokens"] else None)
    await stream.end()


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    """Listen on a free port."""
    behaviour = Server()
    app = web.Application()
    app.router.add_post("/v1/completions", behaviour.answer)
    app.router.add_post("/v1/chat/completions", behaviour.answer)
    app.router.add_get("/v1/models", behaviour.list_models)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    behaviour.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield behaviour
    finally:
        await runner.cleanup()


def settings(server: Server, **changes: Any) -> RunSettings:
    usual: dict[str, Any] = {
        "url": server.url,
        "requests": 4,
        "prompt_tokens": "5",
        "output_tokens": "3",
        "timeout_s": 20,
    }
    return RunSettings(**usual | changes)


async def run(server: Server, **changes: Any) -> Result:
    async with asyncio.timeout(30):
        return await measure(settings(server, **changes), monotonic)


async def ask(server: Server, *, leaves_early: bool = False, timeout_s: float = 20.0) -> Record:
    """Send one request and return what became of it."""
    target = settings(server, timeout_s=timeout_s).target("tiny")
    request = Request(0, (40, 41, 42), 3, leaves_early=leaves_early)
    async with asyncio.timeout(30), open_session(None) as session:
        return await Client(session, target, monotonic).ask(request, target.body(request), intended_s=monotonic())


def failure(record: Record) -> str | None:
    return record.failure and record.failure.name
