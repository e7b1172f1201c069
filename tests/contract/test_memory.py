"""What only memory can show: an hour passes at once, and dead letters tell what was wrong with them."""

from shared.bus.memory import MemoryBus, MemoryServer
from shared.bus.port import DEAD_PART_TTL_S, Entry, Part, Write
from shared.ids import START, EntryId


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_the_streams_of_a_part_that_stopped_beating_expire() -> None:
    clock = Clock()
    bus = MemoryBus(MemoryServer(clock))
    await bus.make_stream("plans:1")
    await bus.make_stream("plans:2")
    await bus.beat(Part("worker-1", "members", ("plans:1",)), b"one")
    clock.now_s = DEAD_PART_TTL_S - 1
    await bus.publish([Write("plans:1", b"a"), Write("plans:2", b"b")])
    assert await bus.length("plans:1") == 1
    clock.now_s = DEAD_PART_TTL_S
    await bus.publish([Write("plans:1", b"a"), Write("plans:2", b"b")])
    assert await bus.length("plans:1") == 0
    assert await bus.length("plans:2") == 2


async def test_ids_are_made_of_the_clock_s_milliseconds_and_begin_after_the_start() -> None:
    clock = Clock()
    bus = MemoryBus(MemoryServer(clock))
    assert await bus.enqueue("s", [b"a", b"b"], bound=None) == ("0-1", "0-2")
    clock.now_s = 1.5
    assert await bus.enqueue("s", [b"c", b"d"], bound=None) == ("1500-0", "1500-1")
    clock.now_s = 1.0
    assert await bus.enqueue("s", [b"e"], bound=None) == ("1500-2",)


async def test_dead_letters_tell_what_was_wrong_with_them() -> None:
    server = MemoryServer()
    entry = Entry("s", EntryId("7-1"), b"\xc1")
    await MemoryBus(server).dead_letter(entry, "not MessagePack")
    assert list(server.dead_letters) == [(entry, "not MessagePack")]
    assert await MemoryBus(server).read({"s": START}, block_s=0) == []
