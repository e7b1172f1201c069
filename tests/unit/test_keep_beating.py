"""A part keeps itself known: its values follow its registration, and nothing that was not heard is taken for good."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shared.bus.memory import MemoryBus, MemoryServer
from shared.bus.port import Part
from shared.errors import BusUnavailable, DeclaredDead
from shared.runtime.part import keep_beating

WITHIN_S = 10.0
PART = Part("worker-1", "members", ("plans:1",), {"tokenizer": b"files"})


class Deaf(MemoryBus):
    """A bus that loses the answers to some of the next beats or values; what they ask for is done all the same."""

    def __init__(self, server: MemoryServer, *, beats: int = 0, values: int = 0) -> None:
        super().__init__(server)
        self._beats, self._values = beats, values
        self.beaten = 0
        self.stored = 0

    async def beat(self, part: Part, registration: bytes) -> bool:
        is_anew = await super().beat(part, registration)
        self.beaten += 1
        if self.beaten <= self._beats:
            raise BusUnavailable("the answer was lost")
        return is_anew

    async def put(self, key: str, data: bytes) -> None:
        self.stored += 1
        if self.stored <= self._values:
            raise BusUnavailable("not stored")
        await super().put(key, data)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not await holds():  # noqa: ASYNC110 - the bus raises no event of ours
            await asyncio.sleep(0.01)


async def beat_until(bus: MemoryBus, holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        beating = tasks.create_task(keep_beating(bus, PART, b"one"))
        await until(holds)
        beating.cancel()


async def test_values_are_stored_though_the_answer_to_the_beat_that_registered_was_lost() -> None:
    bus = Deaf(MemoryServer(), beats=1)

    async def stored() -> bool:
        return await bus.get("tokenizer") == b"files"

    await beat_until(bus, stored)
    assert bus.beaten == 2


async def test_values_that_could_not_be_stored_are_stored_as_soon_as_they_can_be() -> None:
    bus = Deaf(MemoryServer(), values=2)

    async def stored() -> bool:
        return await bus.get("tokenizer") == b"files"

    await beat_until(bus, stored)
    assert bus.stored == 3


async def test_values_are_stored_once_while_the_server_remembers_the_part() -> None:
    bus = Deaf(MemoryServer())

    async def beaten() -> bool:
        return bus.beaten >= 3

    await beat_until(bus, beaten)
    assert bus.stored == 1


async def test_a_part_declared_dead_stops_beating() -> None:
    bus = MemoryBus(MemoryServer())
    await bus.declare_dead(PART.id)
    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.timeout(WITHIN_S):
            await keep_beating(bus, PART, b"one")
    assert raised.group_contains(DeclaredDead, match=PART.id)


async def test_whoever_asks_is_told_when_the_server_may_have_forgotten() -> None:
    bus, told = Deaf(MemoryServer(), beats=1), asyncio.Event()
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        beating = tasks.create_task(keep_beating(bus, PART, b"one", told.set))
        await told.wait()
        beating.cancel()
    assert bus.beaten == 2
