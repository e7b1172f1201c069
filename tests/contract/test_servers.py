"""What only a real server can do to us: stop, die, come back, be set up wrongly, forget scripts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import pytest
import redis

from shared.bus.port import Bus, Entry, Lease, Part, Write
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable, StartupError
from shared.ids import START, EntryId
from shared.protocol import names
from shared.runtime.part import keep_beating

Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
LEASE = Lease("leader:m", "scheduler-1")


class Server(Protocol):
    url: str
    raw: redis.Redis

    def connect(self, *, answer_s: float = ...) -> Bus: ...
    def blocked_readers(self) -> int: ...
    def frozen(self) -> AbstractContextManager[None]: ...
    def down(self) -> AbstractContextManager[None]: ...
    def kill(self) -> None: ...


@pytest.fixture
async def bus(server: Server) -> AsyncIterator[Bus]:
    connection = server.connect()
    yield connection
    await connection.close()


@pytest.fixture
async def hasty(server: Server) -> AsyncIterator[Bus]:
    """Return a bus that waits 0.3 s for an answer."""
    connection = server.connect(answer_s=0.3)
    yield connection
    await connection.close()


async def test_a_call_while_the_server_is_down_fails_and_the_next_one_after_it_is_back_works(
    server: Server, bus: Bus
) -> None:
    await bus.put("k", b"v")
    with server.down():
        for call in (bus.get("k"), bus.take_lease(LEASE), bus.read({"s": START}, block_s=0.1), bus.check()):
            with pytest.raises(BusUnavailable):
                await call
    assert await bus.get("k") is None
    assert await bus.take_lease(LEASE)


async def test_a_restart_between_two_calls_is_not_even_noticed(server: Server, bus: Bus) -> None:
    await bus.make_stream("s")
    await bus.read({"s": START}, block_s=0)

    def restart() -> None:
        with server.down():
            pass

    await asyncio.to_thread(restart)
    await bus.make_stream("s")
    await bus.publish([Write("s", b"a")])
    assert [entry.data for entry in await bus.read({"s": START}, block_s=1)] == [b"a"]


async def test_a_part_stores_its_values_again_in_a_server_that_comes_back_empty(
    server: Server, bus: Bus, eventually: Eventually
) -> None:
    part = Part("worker-1", "members", ("plans:1",), {"tokenizer": b"files", "other": bytes(1_000_000)})

    async def stored() -> bool:
        try:
            return [await bus.get(key) for key in ("tokenizer", "other")] == [b"files", bytes(1_000_000)]
        except BusUnavailable:  # a connection to the server that is no more
            return False

    async with asyncio.TaskGroup() as tasks:
        beating = tasks.create_task(keep_beating(bus, part, b"one"))
        await eventually(stored)
        with server.down():
            pass
        await eventually(stored)
        assert await bus.parts("members") == {"worker-1": b"one"}
        beating.cancel()


async def test_a_server_that_dies_under_a_blocked_read_ends_it(
    server: Server, bus: Bus, eventually: Eventually
) -> None:
    async def read() -> None:
        with pytest.raises(BusUnavailable):
            await bus.read({"s": START}, block_s=30)

    async def blocked() -> bool:
        return server.blocked_readers() == 1

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        await eventually(blocked)
        with server.down():
            pass
    assert await bus.length("s") == 0


async def test_a_server_that_dies_under_a_write_fails_it(server: Server, bus: Bus) -> None:
    await bus.make_stream("s")
    sent = asyncio.Event()

    async def publish() -> None:
        sent.set()
        with pytest.raises(BusUnavailable):
            await bus.publish([Write("s", b"a" * 1_000_000), Write("s", b"b")])

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        with server.frozen():
            tasks.create_task(publish())
            await sent.wait()
            with server.down():
                pass
    assert await bus.length("s") == 0


async def test_a_server_that_stands_still_fails_calls_in_bounded_time(server: Server, hasty: Bus) -> None:
    await hasty.put("k", b"v")
    with server.frozen():
        async with asyncio.timeout(3):
            with pytest.raises(BusUnavailable, match=r"within 0\.3 s"):
                await hasty.get("k")
            with pytest.raises(BusUnavailable, match=r"within 0\.5 s"):
                await hasty.read({"s": START}, block_s=0.1)
            with pytest.raises(BusUnavailable):
                await hasty.take_lease(LEASE)


async def test_the_late_answer_of_a_failed_call_is_not_taken_for_the_next_one_s(server: Server, hasty: Bus) -> None:
    await hasty.put("k", b"right")
    await hasty.put("other", b"wrong")
    with server.frozen(), pytest.raises(BusUnavailable):
        await hasty.get("other")
    assert await hasty.get("k") == b"right"


async def test_a_write_whose_answer_is_late_is_sent_once(server: Server, hasty: Bus, eventually: Eventually) -> None:
    async def arrived() -> bool:
        return await hasty.length("s") > 0

    await hasty.make_stream("s")
    with server.frozen(), pytest.raises(BusUnavailable):
        await hasty.publish([Write("s", b"once")])
    await eventually(arrived)
    assert await hasty.length("s") == 1


async def test_closing_ends_a_call_that_the_server_does_not_answer(server: Server, bus: Bus) -> None:
    await bus.check()
    waiting = asyncio.Event()

    async def get() -> None:
        waiting.set()
        with pytest.raises(BusUnavailable, match="closed"):
            await bus.get("k")

    with server.frozen():
        async with asyncio.timeout(3), asyncio.TaskGroup() as tasks:
            tasks.create_task(get())
            await waiting.wait()
            await bus.close()


async def test_more_callers_than_connections_are_all_served(bus: Bus) -> None:
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        puts = [tasks.create_task(bus.put(f"k{number}", b"%d" % number)) for number in range(100)]
    assert all(put.done() for put in puts)
    assert [await bus.get(f"k{number}") for number in (0, 50, 99)] == [b"0", b"50", b"99"]


async def test_scripts_that_the_server_has_forgotten_are_sent_again(server: Server, bus: Bus) -> None:
    assert await bus.take_lease(LEASE)
    server.raw.script_flush()
    assert await bus.take_lease(LEASE)


async def test_an_answer_that_is_an_error_spoils_no_later_call(bus: Bus) -> None:
    await bus.put("value", b"v")
    await bus.make_stream("s")
    with pytest.raises(BusUnavailable, match="refuses XADD: WRONGTYPE"):
        await bus.publish([Write("value", b"a"), Write("s", b"b")])
    with pytest.raises(BusUnavailable, match="refuses EVALSHA"):
        await bus.enqueue("value", [b"a"], bound=None)
    assert await bus.get("value") == b"v"
    assert [entry.data for entry in await bus.read({"s": START}, block_s=0)] == [b"b"]


@pytest.fixture
def evicting(server: Server) -> Iterator[None]:
    server.raw.config_set("maxmemory-policy", "allkeys-lru")
    yield
    server.raw.config_set("maxmemory-policy", "noeviction")


@pytest.mark.usefixtures("evicting")
async def test_a_server_that_may_evict_keys_is_refused(bus: Bus) -> None:
    with pytest.raises(BusUnavailable, match="maxmemory-policy from allkeys-lru to noeviction"):
        await bus.check()


async def test_a_dead_letter_tells_a_person_where_it_came_from(server: Server, bus: Bus) -> None:
    await bus.dead_letter(Entry("plans:é", EntryId("7-1"), b"\xc1"), "not MessagePack: é")
    entries = server.raw.xrange(names.DEAD_LETTER)
    assert entries
    told = {b"d": b"\xc1", b"stream": "plans:é".encode(), b"id": b"7-1", b"error": "not MessagePack: é".encode()}
    assert [fields for _, fields in entries] == [told]


async def test_a_database_number_in_the_url_is_honoured(server: Server, bus: Bus) -> None:
    second = RedisBus(f"{server.url.removesuffix('/0')}{'&' if '?' in server.url else '?'}db=1")
    await second.put("k", b"second")
    assert await bus.get("k") is None
    await second.close()


@pytest.fixture
def guarded(server: Server) -> Iterator[None]:
    server.raw.config_set("requirepass", "p ss")
    yield
    server.raw.config_set("requirepass", "")


@pytest.mark.usefixtures("guarded")
async def test_a_password_in_the_url_is_honoured_and_one_that_is_missing_is_said(server: Server, bus: Bus) -> None:
    with pytest.raises(BusUnavailable, match=r"(?i)authenticat"):
        await bus.check()
    knowing = RedisBus(server.url.replace("://", "://:p%20ss@"))
    await knowing.check()
    await knowing.close()


async def test_nobody_listening_is_said_in_one_sentence_without_the_password() -> None:
    bus = RedisBus("redis://:secret@127.0.0.1:1/0")
    with pytest.raises(BusUnavailable, match=r"^Redis at 127\.0\.0\.1:1 is not available: ") as failure:
        await bus.check()
    assert "secret" not in str(failure.value)


@pytest.mark.parametrize(
    "url", ["http://localhost", "localhost:6379", "redis://localhost?protocol=9", "unix://x?hat=1"]
)
def test_a_url_that_cannot_be_used_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(StartupError, match="Redis URL"):
        RedisBus(url)
