from collections.abc import Awaitable, Callable

import pytest

from shared.bus.port import DEAD_PART_TTL_S, EXPIRY_S, Bus, Part, Write
from shared.errors import DeclaredDead
from shared.ids import START
from shared.protocol import names

Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
LifeS = Callable[[str], float | None]
ONE = Part("worker-1", "members", ("plans:1", "results:1"))
TWO = Part("worker-2", "members")


async def test_parts_that_beat_are_found_with_their_registrations(bus: Bus, other: Bus) -> None:
    await bus.beat(TWO, b"two")
    await bus.beat(ONE, b"\x00one")
    assert list((await other.parts("members")).items()) == [("worker-1", b"\x00one"), ("worker-2", b"two")]
    assert await other.parts("others") == {}


async def test_the_parts_of_several_sets_are_found_in_one_go(
    bus: Bus, pass_time: Callable[[float], None], eventually: Eventually, members_of: Callable[[str], set[str]]
) -> None:
    three = Part("gateway-3", "others")
    for part in (TWO, ONE, three):
        await bus.beat(part, part.id.encode())
    assert await bus.parts_of_each("others", "nobody", "members") == [
        {"gateway-3": b"gateway-3"},
        {},
        {"worker-1": b"worker-1", "worker-2": b"worker-2"},
    ]
    pass_time(EXPIRY_S)

    async def gone() -> bool:
        return await bus.parts_of_each("members", "others") == [{}, {}]

    await eventually(gone)
    assert members_of("members") == members_of("others") == set()


async def test_the_last_registration_counts(bus: Bus) -> None:
    await bus.beat(ONE, b"before")
    await bus.beat(ONE, b"after")
    assert await bus.parts("members") == {"worker-1": b"after"}


async def test_a_beat_says_whether_the_part_was_registered_anew(
    bus: Bus, pass_time: Callable[[float], None], eventually: Eventually
) -> None:
    assert await bus.beat(ONE, b"one")
    assert not await bus.beat(ONE, b"one")
    assert await bus.beat(TWO, b"two")
    pass_time(EXPIRY_S)

    async def gone() -> bool:
        return await bus.parts("members") == {}

    await eventually(gone)
    assert await bus.beat(ONE, b"one")


async def test_a_beat_lasts_for_the_expiry_and_a_part_s_streams_for_an_hour(bus: Bus, life_s: LifeS) -> None:
    await bus.make_stream("plans:1")
    await bus.beat(ONE, b"one")
    beat_s, stream_s = life_s(names.beat("worker-1")), life_s("plans:1")
    assert beat_s is not None
    assert stream_s is not None
    assert EXPIRY_S - 1 < beat_s <= EXPIRY_S
    assert DEAD_PART_TTL_S - 1 < stream_s <= DEAD_PART_TTL_S


async def test_a_beat_makes_the_streams_that_are_missing_and_keeps_those_that_are_there(bus: Bus, other: Bus) -> None:
    stream = ONE.streams[0]
    await bus.beat(ONE, b"one")
    await other.publish([Write(stream, b"kept")])
    await bus.beat(ONE, b"one")
    assert [entry.data for entry in await bus.read({stream: START}, block_s=0)] == [b"kept"]


async def test_a_part_that_stops_beating_is_dropped_and_may_beat_again(
    bus: Bus, pass_time: Callable[[float], None], eventually: Eventually, members_of: Callable[[str], set[str]]
) -> None:
    await bus.beat(ONE, b"one")
    assert members_of("members") == {"worker-1"}

    async def gone() -> bool:
        return await bus.parts("members") == {}

    assert not await gone()
    pass_time(EXPIRY_S)
    await eventually(gone)
    assert members_of("members") == set()
    await bus.beat(ONE, b"again")
    assert await bus.parts("members") == {"worker-1": b"again"}


async def test_a_part_declared_dead_never_beats_again(bus: Bus, other: Bus, life_s: LifeS) -> None:
    await bus.beat(ONE, b"one")
    await bus.beat(TWO, b"two")
    await other.declare_dead("worker-1")
    assert await other.parts("members") == {"worker-2": b"two"}
    for _ in range(2):
        with pytest.raises(DeclaredDead):
            await bus.beat(ONE, b"one")
    assert await other.parts("members") == {"worker-2": b"two"}
    dead_s = life_s(names.dead("worker-1"))
    assert dead_s is not None
    assert DEAD_PART_TTL_S - 1 < dead_s <= DEAD_PART_TTL_S


async def test_who_has_not_beaten_yet_can_be_declared_dead(bus: Bus) -> None:
    await bus.declare_dead("worker-1")
    with pytest.raises(DeclaredDead, match="worker-1"):
        await bus.beat(ONE, b"one")


async def test_a_part_that_leaves_takes_its_streams_along(bus: Bus, other: Bus) -> None:
    for stream in ONE.streams:
        await bus.make_stream(stream)
    await bus.beat(ONE, b"one")
    await bus.publish([Write("plans:1", b"p")])
    await bus.leave(ONE)
    assert await other.parts("members") == {}
    await other.publish([Write("plans:1", b"p"), Write("results:1", b"r")])
    assert await other.read({"plans:1": START, "results:1": START}, block_s=0) == []


async def test_leaving_without_ever_having_beaten_does_nothing(bus: Bus) -> None:
    await bus.leave(ONE)
    assert await bus.parts("members") == {}


async def test_values_are_kept_for_good_and_the_last_one_counts(bus: Bus, other: Bus, life_s: LifeS) -> None:
    assert await bus.get("tokenizer") is None
    await bus.put("tokenizer", b"before")
    await bus.put("tokenizer", bytes(range(256)) * 4000)
    assert await other.get("tokenizer") == bytes(range(256)) * 4000
    assert life_s("tokenizer") in (None, float("inf"))


async def test_an_answering_server_that_evicts_nothing_passes_the_check(bus: Bus) -> None:
    await bus.check()
