"""The life of a scheduler: a standby until the lease is free, then the leader until it is lost."""

import asyncio
from contextlib import suppress

import structlog

from services.scheduler.leading import Leading
from shared.bus.port import RENEWAL_S, Bus, Lease, Part
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable, DeclaredDead, LeaseLost
from shared.protocol import names
from shared.runtime.clock import Clock, monotonic
from shared.runtime.part import Identity, keep_beating, registration, wait_for_bus
from shared.runtime.settings import SchedulerSettings

log = structlog.get_logger()


async def serve(settings: SchedulerSettings, stopping: asyncio.Event) -> None:
    """Lead or stand by until stopping is set. Raises StartupError."""
    bus = RedisBus(settings.redis_url)
    try:
        await serve_on(bus, settings, stopping)
    finally:
        await bus.close()


async def serve_on(bus: Bus, settings: SchedulerSettings, stopping: asyncio.Event, *, clock: Clock = monotonic) -> None:
    """Lead or stand by on this bus."""
    await wait_for_bus(bus, stopping)
    identity = Identity("scheduler")
    while not stopping.is_set():
        part = Part(identity.next_life(), names.members("scheduler", settings.model_name))
        try:
            await _live(bus, settings, part, stopping, clock)
        except* DeclaredDead:
            log.warning("declared_dead", part=part.id)
        except* LeaseLost as lost:
            log.warning("lease_lost", part=part.id, error=str(lost.exceptions[0]))


async def _live(bus: Bus, settings: SchedulerSettings, part: Part, stopping: asyncio.Event, clock: Clock) -> None:
    """One life, under one id: it ends when stopping is set, with the lease, or when others have given it up."""
    lease = Lease(names.leader(settings.model_name), part.id)
    async with asyncio.TaskGroup() as tasks:
        beating = tasks.create_task(keep_beating(bus, part, registration("scheduler", settings.model_name)))
        leading = tasks.create_task(_stand_by_then_lead(bus, settings, lease, clock))
        await stopping.wait()
        beating.cancel()
        leading.cancel()
    with suppress(BusUnavailable):  # both run out by themselves
        await bus.drop_lease(lease)
        await bus.leave(part)


async def _stand_by_then_lead(bus: Bus, settings: SchedulerSettings, lease: Lease, clock: Clock) -> None:
    log.info("standing_by", part=lease.owner)
    while True:
        if await _is_free(bus, lease):
            break
        await asyncio.sleep(RENEWAL_S)
    log.info("leading", part=lease.owner, policy=settings.policy, kv=settings.kv_manager)
    await Leading(bus, settings, lease, clock).run()


async def _is_free(bus: Bus, lease: Lease) -> bool:
    try:
        return await bus.take_lease(lease)
    except BusUnavailable as error:
        log.warning("bus_unavailable", error=str(error))
        return False
