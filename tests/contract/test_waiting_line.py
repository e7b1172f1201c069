import asyncio

from shared.bus.port import Bus, Entry
from shared.ids import START, entry_key
from shared.protocol import names


async def test_enqueue_returns_the_ids_that_readers_see(bus: Bus, other: Bus) -> None:
    ids = await bus.enqueue("line", [b"a", b"b"], bound=5)
    entries = await other.read({"line": START}, block_s=0)
    assert ids == tuple(entry.id for entry in entries)
    assert [entry.data for entry in entries] == [b"a", b"b"]


async def test_enqueue_of_nothing_returns_no_ids(bus: Bus) -> None:
    assert await bus.enqueue("line", [], bound=5) == ()


async def test_enqueue_adds_all_or_none_at_the_bound(bus: Bus) -> None:
    assert await bus.enqueue("line", [b"a", b"b"], bound=3) is not None
    assert await bus.enqueue("line", [b"c", b"d"], bound=3) is None
    assert await bus.length("line") == 2
    assert await bus.enqueue("line", [b"e"], bound=3) is not None
    assert await bus.enqueue("line", [b"f"], bound=3) is None
    assert [entry.data for entry in await bus.read({"line": START}, block_s=0)] == [b"a", b"b", b"e"]


async def test_a_line_that_does_not_exist_counts_as_empty_at_the_bound(bus: Bus) -> None:
    assert await bus.enqueue("line", [b"a", b"b"], bound=1) is None
    assert await bus.enqueue("line", [b"a"], bound=0) is None
    assert await bus.length("line") == 0


async def test_what_is_enqueued_without_a_bound_always_passes(bus: Bus) -> None:
    assert await bus.enqueue("line", [b"a"] * 3, bound=None) is not None
    assert await bus.enqueue("line", [b"cancel"], bound=None) is not None
    assert await bus.length("line") == 4


async def test_room_comes_back_when_an_entry_goes(bus: Bus) -> None:
    ids = await bus.enqueue("line", [b"a"], bound=1)
    assert ids is not None
    await bus.trim("line", ids[0])
    assert await bus.enqueue("line", [b"b"], bound=1) is not None


async def test_many_who_enqueue_at_once_never_exceed_the_bound(bus: Bus, other: Bus) -> None:
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tries = [
            tasks.create_task(one.enqueue("line", [b"x", b"y"], bound=31)) for _ in range(30) for one in (bus, other)
        ]
    taken = [ids for one in tries if (ids := one.result()) is not None]
    assert len(taken) == 15
    assert await bus.length("line") == 30
    assert all(entry_key(first) < entry_key(second) for first, second in taken)


async def test_dead_letters_are_kept_and_the_oldest_go_beyond_the_bound(bus: Bus) -> None:
    for number in range(names.DEAD_LETTER_ENTRIES // 2000):
        await bus.enqueue(names.DEAD_LETTER, [b"%d" % number] * 2000, bound=None)
    await bus.dead_letter(Entry("s", START, b"\xc1"), "not MessagePack")
    await bus.dead_letter(Entry("s", START, b"\xc2"), "not MessagePack")
    assert await bus.length(names.DEAD_LETTER) == names.DEAD_LETTER_ENTRIES
    kept = await bus.read({names.DEAD_LETTER: START}, block_s=0, count=names.DEAD_LETTER_ENTRIES)
    assert [entry.data for entry in kept[-3:]] == [b"4", b"\xc1", b"\xc2"]


async def test_a_dead_letter_needs_no_stream_to_be_made(bus: Bus) -> None:
    await bus.dead_letter(Entry("s", START, b"\xc1"), "not MessagePack")
    assert await bus.length(names.DEAD_LETTER) == 1
