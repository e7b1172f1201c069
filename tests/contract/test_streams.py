import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shared.bus.port import Bus, Entry, Write
from shared.errors import BusUnavailable
from shared.ids import START, EntryId, entry_key

ReadersWait = Callable[[int], Awaitable[None]]
NOW = 0.0


async def written(bus: Bus, stream: str, *data: bytes) -> list[Entry]:
    """Make a stream, write to it, and return what stands in it."""
    await bus.make_stream(stream)
    await bus.publish([Write(stream, one) for one in data])
    return await bus.read({stream: START}, block_s=NOW)


def data_of(entries: list[Entry]) -> list[bytes]:
    return [entry.data for entry in entries]


async def test_entries_are_read_in_the_order_written_with_ascending_ids(bus: Bus, other: Bus) -> None:
    entries = await written(bus, "s", *(b"%d" % n for n in range(100)))
    assert data_of(entries) == [b"%d" % n for n in range(100)]
    keys = [entry_key(entry.id) for entry in entries]
    assert keys == sorted(set(keys))
    assert {entry.stream for entry in entries} == {"s"}
    assert await other.read({"s": START}, block_s=NOW) == entries


async def test_a_read_returns_only_what_stands_after_the_cursor(bus: Bus) -> None:
    entries = await written(bus, "s", b"a", b"b", b"c")
    assert await bus.read({"s": entries[0].id}, block_s=NOW) == entries[1:]
    assert await bus.read({"s": entries[2].id}, block_s=NOW) == []


async def test_one_read_serves_several_streams_each_with_its_cursor(bus: Bus) -> None:
    first = await written(bus, "first", b"a", b"b")
    second = await written(bus, "second", b"c", b"d")
    assert await bus.read({"second": START, "first": first[0].id}, block_s=NOW) == [*second, first[1]]


async def test_count_bounds_each_stream_of_a_read(bus: Bus) -> None:
    first = await written(bus, "first", b"a", b"b", b"c")
    second = await written(bus, "second", b"d")
    found = await bus.read({"first": START, "second": START}, block_s=NOW, count=2)
    assert found == [*first[:2], *second]


async def test_streams_that_do_not_exist_are_read_as_empty(bus: Bus) -> None:
    assert await bus.read({"none": START}, block_s=NOW) == []
    entries = await written(bus, "s", b"a")
    assert await bus.read({"none": START, "s": START}, block_s=0.01) == entries


async def test_a_read_of_no_streams_returns_nothing(bus: Bus) -> None:
    assert await bus.read({}, block_s=0.01) == []


async def test_nothing_is_written_to_a_stream_that_its_reader_has_not_made(bus: Bus) -> None:
    await bus.make_stream("s")
    await bus.publish([Write("none", b"a"), Write("s", b"b"), Write("none", b"c")])
    assert await bus.length("none") == 0
    assert data_of(await bus.read({"none": START, "s": START}, block_s=NOW)) == [b"b"]


async def test_publishing_nothing_does_nothing(bus: Bus) -> None:
    await bus.publish([])
    assert await bus.length("s") == 0


async def test_a_stream_that_was_just_made_is_empty_and_has_given_no_id(bus: Bus) -> None:
    await bus.make_stream("s")
    assert await bus.length("s") == 0
    assert await bus.read({"s": START}, block_s=NOW) == []
    assert await bus.read_end("s", START) == START


async def test_making_a_stream_again_keeps_its_entries(bus: Bus) -> None:
    entries = await written(bus, "s", b"a")
    await bus.make_stream("s")
    assert await bus.read({"s": START}, block_s=NOW) == entries


async def test_trim_deletes_up_to_and_including_the_id(bus: Bus) -> None:
    entries = await written(bus, "s", *(b"%d" % n for n in range(300)))
    assert len(entries) == 256
    await bus.trim("s", entries[4].id)
    assert await bus.read({"s": START}, block_s=NOW, count=251) == entries[5:]
    assert await bus.length("s") == 295


async def test_trim_knows_the_greatest_sequence_of_a_millisecond(bus: Bus) -> None:
    entries = await written(bus, "s", b"a")
    milliseconds, _ = entry_key(entries[0].id)
    await bus.trim("s", EntryId(f"{milliseconds}-{2**64 - 1}"))
    assert await bus.length("s") == 0


async def test_trimming_a_stream_that_does_not_exist_does_nothing(bus: Bus) -> None:
    await bus.trim("none", EntryId("5-0"))
    await bus.publish([], trim=("none", EntryId("5-0")))
    assert await bus.length("none") == 0


async def test_publish_appends_and_trims_another_stream(bus: Bus) -> None:
    plans = await written(bus, "plans", b"1", b"2", b"3")
    await bus.make_stream("results")
    await bus.publish([Write("results", b"done")], trim=("plans", plans[1].id))
    assert await bus.read({"plans": START}, block_s=NOW) == plans[2:]
    assert data_of(await bus.read({"results": START}, block_s=NOW)) == [b"done"]


async def test_ids_go_on_ascending_after_everything_was_trimmed(bus: Bus) -> None:
    entries = await written(bus, "s", b"a", b"b")
    await bus.trim("s", entries[1].id)
    await bus.publish([Write("s", b"c")])
    found = await bus.read({"s": entries[1].id}, block_s=NOW)
    assert data_of(found) == [b"c"]


async def test_read_end_is_the_cursor_while_something_stands_after_it(bus: Bus) -> None:
    entries = await written(bus, "s", b"a", b"b")
    assert await bus.read_end("s", entries[0].id) == entries[0].id
    assert await bus.read_end("s", START) == START


async def test_read_end_is_the_last_id_ever_given_once_nothing_stands_after_the_cursor(bus: Bus) -> None:
    entries = await written(bus, "s", b"a", b"b", b"c")
    await bus.trim("s", entries[2].id)
    assert await bus.read_end("s", START) == entries[2].id
    assert await bus.read_end("s", entries[0].id) == entries[2].id


async def test_read_end_of_a_stream_that_does_not_exist_is_the_cursor(bus: Bus) -> None:
    assert await bus.read_end("none", EntryId("7-3")) == "7-3"


@pytest.mark.parametrize("written_to", ["first", "second"])
async def test_a_blocked_read_wakes_when_one_of_its_streams_is_written(
    bus: Bus, other: Bus, readers_wait: ReadersWait, written_to: str
) -> None:
    await bus.make_stream("first")
    await bus.make_stream("second")
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        read = tasks.create_task(bus.read({"first": START, "second": START}, block_s=9))
        await readers_wait(1)
        await other.publish([Write(written_to, b"news")])
    assert [(entry.stream, entry.data) for entry in read.result()] == [(written_to, b"news")]


async def test_every_reader_that_waits_for_a_stream_wakes(bus: Bus, other: Bus, readers_wait: ReadersWait) -> None:
    await bus.make_stream("s")
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        reads = [tasks.create_task(reader.read({"s": START}, block_s=9)) for reader in (bus, other, bus)]
        await readers_wait(3)
        await bus.publish([Write("s", b"news")])
    assert [data_of(read.result()) for read in reads] == [[b"news"]] * 3


async def test_a_blocked_read_wakes_when_its_stream_is_made_and_written(
    bus: Bus, other: Bus, readers_wait: ReadersWait
) -> None:
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        read = tasks.create_task(bus.read({"late": START}, block_s=9))
        await readers_wait(1)
        await other.enqueue("late", [b"news"], bound=None)
    assert data_of(read.result()) == [b"news"]


@pytest.mark.parametrize("block_s", [0.05, 0.00001])
async def test_a_read_that_waits_in_vain_returns_nothing(bus: Bus, block_s: float) -> None:
    await bus.make_stream("s")
    async with asyncio.timeout(5):
        assert await bus.read({"s": START}, block_s=block_s) == []


async def test_a_read_that_need_not_wait_takes_no_time(bus: Bus) -> None:
    entries = await written(bus, "s", b"a")
    async with asyncio.timeout(5):
        assert await bus.read({"s": START}, block_s=60) == entries


async def test_a_cancelled_read_spoils_no_later_one(bus: Bus, other: Bus) -> None:
    await bus.make_stream("s")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await bus.read({"s": START}, block_s=30)
    await other.publish([Write("s", b"a")])
    await other.publish([Write("s", b"b")])
    assert data_of(await bus.read({"s": START}, block_s=5)) == [b"a", b"b"]


async def test_writes_go_through_while_a_read_waits_on_the_same_bus(bus: Bus, readers_wait: ReadersWait) -> None:
    await bus.make_stream("s")
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        read = tasks.create_task(bus.read({"s": START}, block_s=9))
        await readers_wait(1)
        await bus.put("k", b"v")
        assert await bus.get("k") == b"v"
        await bus.publish([Write("s", b"news")])
    assert data_of(read.result()) == [b"news"]


@pytest.mark.parametrize(
    "data", [b"", bytes(range(256)), b"\r\n$5\r\n", b"\xff" * 9_000_000], ids=["none", "every", "crlf", "large"]
)
async def test_data_comes_out_as_it_went_in(bus: Bus, data: bytes) -> None:
    assert data_of(await written(bus, "s", data, b"next")) == [data, b"next"]


async def test_names_may_hold_any_character(bus: Bus) -> None:
    entries = await written(bus, "slipstream:requests:modèle 模型", b"a")
    assert [entry.stream for entry in entries] == ["slipstream:requests:modèle 模型"]


async def test_closing_wakes_a_blocked_reader(bus: Bus, readers_wait: ReadersWait) -> None:
    async def read_until_closed() -> None:
        with pytest.raises(BusUnavailable, match="closed"):
            await bus.read({"s": START}, block_s=30)

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(read_until_closed())
        await readers_wait(1)
        await bus.close()


async def test_a_closed_bus_refuses_every_call(bus: Bus) -> None:
    await bus.put("k", b"v")
    await bus.close()
    for call in (bus.check(), bus.get("k"), bus.read({"s": START}, block_s=NOW), bus.publish([Write("s", b"a")])):
        with pytest.raises(BusUnavailable, match="closed"):
            await call
    await bus.close()
