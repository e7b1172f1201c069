import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shared.bus.port import LEASE_S, Bus, LeaderWrite, Lease, Part, Write
from shared.errors import DeclaredDead, LeaseLost
from shared.ids import START, EntryId

Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
OURS = Lease("leader:m", "scheduler-1")
THEIRS = Lease("leader:m", "scheduler-2")


async def data_in(bus: Bus, stream: str) -> list[bytes]:
    return [entry.data for entry in await bus.read({stream: START}, block_s=0)]


async def test_a_lease_has_one_owner(bus: Bus, other: Bus) -> None:
    assert await bus.take_lease(OURS)
    assert not await other.take_lease(THEIRS)
    assert await bus.take_lease(OURS)


async def test_leases_under_different_keys_are_independent(bus: Bus, other: Bus) -> None:
    assert await bus.take_lease(OURS)
    assert await other.take_lease(Lease("leader:other", "scheduler-2"))


async def test_many_who_want_a_lease_at_once_are_served_one(bus: Bus, other: Bus) -> None:
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tries = [
            tasks.create_task(one.take_lease(Lease("leader:m", f"scheduler-{number}-{place}")))
            for number in range(10)
            for place, one in enumerate((bus, other))
        ]
    assert sum(one.result() for one in tries) == 1


async def test_a_lease_that_is_not_renewed_goes_to_the_next(
    bus: Bus, other: Bus, pass_time: Callable[[float], None], eventually: Eventually
) -> None:
    assert await bus.take_lease(OURS)
    pass_time(LEASE_S)
    await eventually(lambda: other.take_lease(THEIRS))
    assert not await bus.take_lease(OURS)


async def test_renewing_a_lease_makes_it_last(
    bus: Bus, pass_time: Callable[[float], None], life_s: Callable[[str], float | None]
) -> None:
    assert await bus.take_lease(OURS)
    pass_time(LEASE_S / 2)
    assert await bus.keep_lease(OURS)
    left_s = life_s(OURS.key)
    assert left_s is not None
    assert LEASE_S - 0.9 < left_s <= LEASE_S


async def test_a_lease_that_is_gone_is_not_kept_though_it_is_free(bus: Bus, other: Bus) -> None:
    assert not await bus.keep_lease(OURS)
    assert await bus.take_lease(OURS)
    assert not await other.keep_lease(THEIRS)
    await bus.drop_lease(OURS)
    assert not await bus.keep_lease(OURS)
    assert await other.take_lease(THEIRS)


async def test_a_dropped_lease_is_free_at_once(bus: Bus, other: Bus) -> None:
    await bus.take_lease(OURS)
    await bus.drop_lease(OURS)
    assert await other.take_lease(THEIRS)


async def test_nobody_drops_the_lease_of_another(bus: Bus, other: Bus) -> None:
    await bus.take_lease(OURS)
    await other.drop_lease(THEIRS)
    assert not await other.take_lease(THEIRS)


async def test_dropping_a_lease_that_nobody_has_does_nothing(bus: Bus) -> None:
    await bus.drop_lease(OURS)
    assert await bus.take_lease(OURS)


async def test_a_leader_writes_settles_and_trims_in_one_step(bus: Bus) -> None:
    await bus.take_lease(OURS)
    await bus.make_stream("plans:1")
    await bus.make_stream("plans:2")
    line = await bus.enqueue("line", [b"a", b"b", b"c", b"d"], bound=None)
    results = await bus.enqueue("results:1", [b"r1", b"r2", b"r3"], bound=None)
    more = await bus.enqueue("results:2", [b"r4"], bound=None)
    assert line
    assert results
    assert more
    await bus.lead(
        OURS,
        LeaderWrite(
            writes=(Write("plans:1", b"p1"), Write("plans:2", b"p2"), Write("plans:1", b"p3")),
            requests="line",
            settled=(line[2], line[0], EntryId("1-1")),
            trims={"results:1": results[1], "results:2": more[0]},
        ),
    )
    assert await data_in(bus, "plans:1") == [b"p1", b"p3"]
    assert await data_in(bus, "plans:2") == [b"p2"]
    assert await data_in(bus, "line") == [b"b", b"d"]
    assert await data_in(bus, "results:1") == [b"r3"]
    assert await data_in(bus, "results:2") == []


async def test_a_leader_writes_only_to_streams_that_exist(bus: Bus) -> None:
    await bus.take_lease(OURS)
    await bus.make_stream("plans:1")
    gone = {"results:gone": EntryId("1-1")}
    writes = (Write("plans:gone", b"p"), Write("plans:1", b"p"))
    await bus.lead(OURS, LeaderWrite(writes, requests="gone", settled=(EntryId("1-1"),), trims=gone))
    assert await bus.length("plans:gone") == 0
    assert await data_in(bus, "plans:1") == [b"p"]


async def test_a_leader_may_write_nothing(bus: Bus) -> None:
    await bus.take_lease(OURS)
    await bus.lead(OURS, LeaderWrite())


@pytest.mark.parametrize("owner", [None, THEIRS])
async def test_nothing_is_done_for_who_does_not_hold_the_lease(bus: Bus, owner: Lease | None) -> None:
    if owner is not None:
        await bus.take_lease(owner)
    await bus.make_stream("plans:1")
    line = await bus.enqueue("line", [b"a"], bound=None)
    results = await bus.enqueue("results:1", [b"r"], bound=None)
    assert line
    assert results
    with pytest.raises(LeaseLost):
        await bus.lead(OURS, LeaderWrite((Write("plans:1", b"p"),), "line", line, {"results:1": results[0]}))
    assert await data_in(bus, "plans:1") == []
    assert await data_in(bus, "line") == [b"a"]
    assert await data_in(bus, "results:1") == [b"r"]


async def test_read_end_passes_over_entries_that_were_settled(bus: Bus) -> None:
    await bus.take_lease(OURS)
    line = await bus.enqueue("line", [b"a", b"b", b"c"], bound=None)
    assert line
    await bus.lead(OURS, LeaderWrite(requests="line", settled=(line[1], line[2])))
    assert await bus.read_end("line", START) == START
    assert await bus.read_end("line", line[0]) == line[2]
    await bus.lead(OURS, LeaderWrite(requests="line", settled=(line[0],)))
    assert await bus.read_end("line", START) == line[2]
    assert await bus.enqueue("line", [b"d"], bound=1)


async def test_a_leader_settles_as_many_as_there_are(bus: Bus) -> None:
    await bus.take_lease(OURS)
    line = await bus.enqueue("line", [b"x"] * 9000, bound=None)
    assert line
    await bus.lead(OURS, LeaderWrite(requests="line", settled=line[1:]))
    assert await bus.length("line") == 1


async def test_parts_that_a_leader_gives_up_are_dead_with_its_write_or_not_at_all(bus: Bus, other: Bus) -> None:
    part = Part("worker-1", "members:w")
    await bus.beat(part, b"one")
    with pytest.raises(LeaseLost):
        await bus.lead(OURS, LeaderWrite(dead=(part.id,)))
    await bus.beat(part, b"one")
    await bus.take_lease(OURS)
    await bus.lead(OURS, LeaderWrite(dead=(part.id, "worker-2")))
    assert await other.parts(part.members) == {}
    with pytest.raises(DeclaredDead):
        await bus.beat(part, b"one")
