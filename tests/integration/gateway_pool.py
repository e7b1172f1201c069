"""A gateway over real HTTP, and the pool behind it played by hand: scheduler and worker in one."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import pytest

from services.gateway.service import serve_on
from services.gateway.tokenizer import ModelTokenizer
from services.worker.fake_tokenizer import fake_tokenizer_files
from shared.bus.memory import MemoryBus, MemoryServer
from shared.bus.port import Part, Write
from shared.errors import BusUnavailable
from shared.ids import START, EntryId, GatewayId, WorkerId
from shared.protocol import names
from shared.protocol.codec import decode, encode
from shared.protocol.messages import (
    CancelRequest,
    Finish,
    Held,
    HeldRequest,
    Message,
    PoolReport,
    SubmitRequest,
    TokenBatch,
    TokenizerFiles,
    TokenRow,
)
from shared.runtime.part import registration
from shared.runtime.settings import GatewaySettings

MODEL = "m"
WAIT_S = 10.0
LENGTH_SERVED = 200
WORKER = WorkerId("worker-1.1")

_M = TypeVar("_M", SubmitRequest, CancelRequest)


class HandClock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class SlowTokenizer:
    """Holds every text that is turned into tokens, and every one that is made of them, until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for name in ("encode", "decode"):
            monkeypatch.setattr(ModelTokenizer, name, self._held(getattr(ModelTokenizer, name)))

    def _held(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any, **kwargs: Any) -> Any:
            self._loop.call_soon_threadsafe(self.begun.set)
            assert self.go_on.wait(WAIT_S)
            return work(*args, **kwargs)

        return held


class FlakyBus(MemoryBus):
    """A bus whose writes can be made to fail: ``lost`` ones are applied, but nobody hears so."""

    writes: str = "pass"

    async def enqueue(self, stream: str, data: Sequence[bytes], *, bound: int | None) -> tuple[EntryId, ...] | None:
        if self.writes == "fail":
            raise BusUnavailable("no answer")
        entries = await super().enqueue(stream, data, bound=bound)
        if self.writes == "lost":
            raise BusUnavailable("the answer was lost")
        return entries


class HandPool:
    """Reads ``requests`` and writes to the gateway what a leader and a worker would."""

    def __init__(self, server: MemoryServer) -> None:
        self.server = server
        self.bus = MemoryBus(server)
        self.report = PoolReport(workers=1, length_served=LENGTH_SERVED)
        self._cursor = START
        self._read: list[tuple[EntryId, Message]] = []

    async def publish_tokenizer(self, files: TokenizerFiles | None = None, content_hash: str = "h1") -> None:
        await self.bus.put(names.tokenizer(content_hash), encode(files or fake_tokenizer_files()))
        worker = Part(WORKER, names.members("worker", MODEL))
        await self.bus.beat(worker, registration("worker", MODEL, tokenizer=content_hash))

    async def gateway(self, but: GatewayId | None = None) -> GatewayId:
        """Wait for a living gateway, another than the one named."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for found in await self.bus.parts(names.members("gateway", MODEL)):
                    if found != but:
                        return GatewayId(found)
                await asyncio.sleep(0.01)

    async def say(self, message: Message, gateway: GatewayId | None = None) -> None:
        stream = names.tokens(gateway or await self.gateway())
        await self.bus.publish([Write(stream, encode(message))])

    async def held(
        self, *held: SubmitRequest, read_to: EntryId | None = None, report: PoolReport | None = None
    ) -> None:
        listed = tuple(HeldRequest(one.request, one.attempt) for one in held)
        await self.say(Held(read_to, listed, report or self.report))

    async def tokens(
        self,
        to: SubmitRequest,
        text: bytes | list[int],
        *,
        first: int = 0,
        finish: Finish | None = None,
        cached: int = 0,
        **by: WorkerId,
    ) -> None:
        row = TokenRow(to.request, to.attempt, first, tuple(text), finish, cached)
        await self.say(TokenBatch(by.get("worker", WORKER), (row,)), to.gateway)

    async def next(self, kind: type[_M]) -> _M:
        """Wait for the next message of a kind in ``requests`` and settle it. Others stay for later."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for place, (_, message) in enumerate(self._read):
                    if isinstance(message, kind):
                        del self._read[place]
                        return message
                await self._read_more()

    async def nothing_more(self) -> bool:
        """Tell whether ``requests`` holds nothing that was not asked for with `next`."""
        entries = await self.bus.read({names.requests(MODEL): self._cursor}, block_s=0)
        return not entries and not self._read

    @property
    def read_to(self) -> EntryId:
        return self._cursor

    async def _read_more(self) -> None:
        stream = names.requests(MODEL)
        for entry in await self.bus.read({stream: self._cursor}, block_s=0.5):
            self._read.append((entry.id, decode(entry.data)))
            self._cursor = entry.id
            await self.bus.trim(stream, entry.id)


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that can only be asked for."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if await is_so():
                return
            await asyncio.sleep(0.01)


class Client:
    """An HTTP client of one gateway."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    def chat(self, **fields: Any) -> Any:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.session.post("/v1/chat/completions", json=body)

    def complete(self, **fields: Any) -> Any:
        return self.session.post("/v1/completions", json={"model": MODEL, "prompt": "hi", **fields})

    async def ready(self) -> tuple[int, str | None]:
        async with self.session.get("/ready") as response:
            return response.status, (await response.json())["reason"]

    async def until_ready(self, *, status: int = 200) -> None:
        async def is_so() -> bool:
            return (await self.ready())[0] == status

        await until(is_so)

    async def metric(self, name: str) -> float:
        async with self.session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).rpartition(" ")[2])


class Setting:
    """One gateway that runs, its pool, its client."""

    def __init__(self, server: MemoryServer) -> None:
        self.pool = HandPool(server)
        self.bus = FlakyBus(server)
        self.clock = HandClock()
        self.stopping = asyncio.Event()
        self.times_loaded = 0
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.client: Client
        self.ended: asyncio.Task[None]

    async def serve(self, **settings: Any) -> None:
        chosen = GatewaySettings(model=MODEL, host="127.0.0.1", port=0, **settings)
        await serve_on(
            self.bus,
            chosen,
            self.stopping,
            clock=self.clock,
            on_listening=self.port.set_result,
            on_loaded=self._note_loaded,
        )

    def _note_loaded(self) -> None:
        self.times_loaded += 1

    async def bring_up(self) -> None:
        await self.pool.publish_tokenizer()
        await self.pool.held()
        await self.client.until_ready()


@asynccontextmanager
async def gateway(*, is_up: bool = True, **settings: Any) -> AsyncIterator[Setting]:
    """Run a gateway on the memory bus, on a free port, through the runner of production."""
    setting = Setting(MemoryServer())
    async with asyncio.TaskGroup() as tasks:
        setting.ended = tasks.create_task(setting.serve(**settings))
        port = await asyncio.wait_for(setting.port, WAIT_S)
        timeout = aiohttp.ClientTimeout(total=2 * WAIT_S)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as session:
            setting.client = Client(session)
            if is_up:
                await setting.bring_up()
            try:
                yield setting
            finally:
                setting.stopping.set()
        async with asyncio.timeout(WAIT_S):
            await setting.ended


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    """Read a stream to its end mark, which must be its last event."""
    found = [event async for event in each_event(response)]
    assert found[-1] == "[DONE]"
    return found[:-1]


async def each_event(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Read a stream event by event."""
    async for line in response.content:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            yield "[DONE]" if data == b"[DONE]" else json.loads(data)


def text_of(chunks: list[Any]) -> str:
    """Return the text of a chat's or a completion's chunks."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
