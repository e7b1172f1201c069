"""What a supervisor tells the others about a part that it saw die."""

import pytest
from structlog.testing import capture_logs

from services.supervision import Part
from services.undertaker import Undertaker
from shared.bus import port
from shared.bus.memory import MemoryBus, MemoryServer
from shared.errors import DeclaredDead
from shared.protocol import names
from shared.runtime.part import registration

MODEL = "m"
INSTANCE = "0123456789abcdef"


def part(kind: names.Kind, instance: str, life: int = 1) -> port.Part:
    return port.Part(f"{kind}-{instance}.{life}", names.members(kind, MODEL))


async def beat(bus: MemoryBus, kind: names.Kind, instance: str, life: int = 1) -> port.Part:
    one = part(kind, instance, life)
    await bus.beat(one, registration(kind, MODEL))
    return one


async def test_all_lives_of_the_instance_are_declared_dead_and_nobody_else() -> None:
    bus = MemoryBus(MemoryServer())
    mine = [await beat(bus, "worker", INSTANCE, life) for life in (1, 2)]
    other = await beat(bus, "worker", "another")
    longer = await beat(bus, "worker", INSTANCE + "0")
    await Undertaker(bus, MODEL).bury(Part("worker", (), kind="worker"), INSTANCE)
    assert set(await bus.parts(names.members("worker", MODEL))) == {other.id, longer.id}
    for one in mine:
        with pytest.raises(DeclaredDead):
            await bus.beat(one, b"")


async def test_the_lease_of_a_dead_scheduler_is_free_at_once() -> None:
    bus = MemoryBus(MemoryServer())
    leader = await beat(bus, "scheduler", INSTANCE)
    assert await bus.take_lease(port.Lease(names.leader(MODEL), leader.id))
    await Undertaker(bus, MODEL).bury(Part("scheduler", (), kind="scheduler"), INSTANCE)
    assert await bus.take_lease(port.Lease(names.leader(MODEL), "scheduler-next.1"))


async def test_the_lease_of_another_scheduler_stays() -> None:
    bus = MemoryBus(MemoryServer())
    await beat(bus, "scheduler", INSTANCE)
    assert await bus.take_lease(port.Lease(names.leader(MODEL), "scheduler-leads.1"))
    await Undertaker(bus, MODEL).bury(Part("scheduler", (), kind="scheduler"), INSTANCE)
    assert not await bus.take_lease(port.Lease(names.leader(MODEL), "scheduler-next.1"))


async def test_a_silent_bus_does_not_keep_a_part_from_being_started_again() -> None:
    bus = MemoryBus(MemoryServer())
    await bus.close()
    with capture_logs() as logs:
        await Undertaker(bus, MODEL).bury(Part("worker", (), kind="worker"), INSTANCE)
    assert [(one["event"], one["part"]) for one in logs] == [("death_not_told", "worker")]
