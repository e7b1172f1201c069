"""A gateway made by hand: it submits requests to the real services and sees token ids, which HTTP does not show."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from shared.bus.port import Bus, Part
from shared.bus.redis_bus import RedisBus
from shared.ids import START, GatewayId, RequestId
from shared.protocol import names
from shared.protocol.codec import decode, encode
from shared.protocol.messages import CancelRequest, RequestRefused, Sampling, SubmitRequest, TokenBatch, TokenRow
from shared.runtime.part import keep_beating, registration
from shared.scheduling import invariants

ANSWER_S = 240.0
GREEDY = Sampling(temperature=0.0)


@dataclass
class Course:
    """What came of one request so far."""

    ids: list[int] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    began: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Wanted:
    """One request: greedy, and never ended by an end-of-turn token, unless said otherwise."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY
    ignore_eos: bool = True
    priority: int = 0
    tenant: str = ""


class TokenClient:
    """Submits and reads under one gateway id; every token is checked to come in order, without gap or repeat."""

    def __init__(self, bus: Bus, model: str) -> None:
        self._bus = bus
        self._model = model
        self.id = GatewayId(f"gateway-test-{secrets.token_hex(4)}")
        self.part = Part(self.id, names.members("gateway", model), (names.tokens(self.id),))
        self._courses: dict[str, Course] = {}

    async def submit(self, *wanted: Wanted) -> list[str]:
        """Submit requests, all in one write so that they are read together, and return their names."""
        named = {RequestId(f"test-{secrets.token_hex(6)}"): one for one in wanted}
        self._courses.update((name, Course()) for name in named)
        messages = [
            SubmitRequest(
                name,
                1,
                self.id,
                one.prompt,
                one.max_tokens,
                one.sampling,
                ignore_eos=one.ignore_eos,
                priority=one.priority,
                tenant=one.tenant,
            )
            for name, one in named.items()
        ]
        assert await self._bus.enqueue(names.requests(self._model), list(map(encode, messages)), bound=None)
        return [str(name) for name in named]

    async def answer(self, name: str) -> tuple[int, ...]:
        """Return a request's tokens once it has ended."""
        async with asyncio.timeout(ANSWER_S):
            await self._courses[name].ended.wait()
        return tuple(self._courses[name].ids)

    async def first_token(self, name: str) -> None:
        """Wait until a request streams."""
        async with asyncio.timeout(ANSWER_S):
            await self._courses[name].began.wait()

    async def cancel(self, name: str) -> None:
        """Leave a request."""
        await self._bus.enqueue(names.requests(self._model), [encode(CancelRequest(RequestId(name), 1))], bound=None)

    async def read(self) -> None:
        """Read tokens until cancelled."""
        stream, cursor = names.tokens(self.id), START
        while True:
            for entry in await self._bus.read({stream: cursor}, block_s=0.5):
                cursor = entry.id
                message = decode(entry.data)
                if isinstance(message, TokenBatch):
                    for row in message.rows:
                        self._take(row)
                assert not isinstance(message, RequestRefused), message

    def _take(self, row: TokenRow) -> None:
        course = self._courses[row.request]
        invariants.tokens_in_order(len(course.ids), row.first_index)
        course.ids.extend(row.token_ids)
        course.began.set()
        if row.finish is not None:
            course.ended.set()


@asynccontextmanager
async def registered(bus: Bus, model: str) -> AsyncIterator[TokenClient]:
    """Register a gateway made by hand for as long as the block runs."""
    client = TokenClient(bus, model)
    value = registration("gateway", model)
    await bus.beat(client.part, value)
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(keep_beating(bus, client.part, value)), tasks.create_task(client.read())]
        yield client
        for task in background:
            task.cancel()
    await bus.leave(client.part)


@asynccontextmanager
async def token_client(redis_url: str, model: str) -> AsyncIterator[TokenClient]:
    """Register a gateway made by hand with a real server."""
    bus = RedisBus(redis_url)
    try:
        async with registered(bus, model) as client:
            yield client
    finally:
        await bus.close()
