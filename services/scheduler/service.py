"""The life of a scheduler: a standby until the lease is free, then the leader until it is lost."""

import asyncio
from contextlib import suppress

import structlog

from services.scheduler.leading import Leading, Outages
from shared.bus.port import RENEWAL_S, Bus, Lease, Part
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable, DeclaredDead, LeaseLost
from shared.protocol import names
from shared.runtime.clock import Clock, monotonic, until_next
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
    identity, scheduler = Identity("scheduler"), _Scheduler(bus, settings, clock)
    while not stopping.is_set():
        part = Part(identity.next_life(), names.members("scheduler", settings.model_name))
        try:
            await scheduler.live(part, stopping)
        except* DeclaredDead:
            log.warning("declared_dead", part=part.id)
        except* LeaseLost as lost:
            log.warning("lease_lost", part=part.id, error=str(_first_of(lost)))


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group, however deep it lies."""
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


class _Scheduler:
    """What outlives a life: the bus, the settings, and the memory of outages."""

    def __init__(self, bus: Bus, settings: SchedulerSettings, clock: Clock) -> None:
        self._bus, self._settings, self._clock = bus, settings, clock
        self._outages = Outages()

    async def live(self, part: Part, stopping: asyncio.Event) -> None:
        """Live under one id until stopping is set, the lease is lost, or others have given this part up."""
        lease = Lease(names.leader(self._settings.model_name), part.id)
        value = registration("scheduler", self._settings.model_name)
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(one) for one in (keep_beating(self._bus, part, value), self._lead(lease))]
            await stopping.wait()
            for task in work:
                task.cancel()
        with suppress(BusUnavailable):  # both run out by themselves
            await self._bus.drop_lease(lease)
            await self._bus.leave(part)

    async def _lead(self, lease: Lease) -> None:
        """Stand by until the lease is free, then lead until it is lost."""
        log.info("standing_by", part=lease.owner)
        while True:
            if await self._is_taken(lease):
                break
            await asyncio.sleep(until_next(RENEWAL_S, self._clock()))
        log.info("leading", part=lease.owner, policy=self._settings.policy, kv=self._settings.kv_manager)
        await Leading(self._bus, self._settings, lease, self._clock, self._outages).run()

    async def _is_taken(self, lease: Lease) -> bool:
        try:
            return await self._bus.take_lease(lease)
        except BusUnavailable as error:
            log.warning("bus_unavailable", error=str(error))
            self._outages.notice(self._clock())
            return False
