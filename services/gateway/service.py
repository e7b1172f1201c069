"""The life of a gateway: listen, register, serve, drain, leave."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from services.gateway.app import listen, make_app, make_runner
from services.gateway.desk import Desk
from services.gateway.door import Door
from services.gateway.finder import TokenizerFinder
from services.gateway.lives import Lives
from services.gateway.metrics import Metrics
from services.gateway.owed import Owed
from services.gateway.pool import SILENT_S, Pool
from services.gateway.reader import Reader
from services.gateway.writer import Writer
from shared.bus.port import Bus
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable, NotServing
from shared.runtime.clock import Clock, monotonic, until_next, wall_clock_s
from shared.runtime.part import wait_for_bus
from shared.runtime.settings import GatewaySettings

WATCH_S = 1.0
FLUSH_S = 2.0

log = structlog.get_logger()


async def serve(settings: GatewaySettings, stopping: asyncio.Event) -> None:
    """Serve HTTP until stopping is set and running streams have had their time. Raises StartupError."""
    bus = RedisBus(settings.redis_url)
    try:
        await serve_on(bus, settings, stopping)
    finally:
        await bus.close()


async def serve_on(
    bus: Bus,
    settings: GatewaySettings,
    stopping: asyncio.Event,
    *,
    clock: Clock = monotonic,
    on_listening: Callable[[int], None] = lambda _: None,
) -> None:
    """Serve on this bus; ``on_listening`` is told the port."""
    gateway = _Gateway(bus, settings, clock)
    await wait_for_bus(bus, stopping)
    runner = make_runner(make_app(gateway.desk))
    await runner.setup()
    try:
        port = await listen(runner, settings.host, settings.port)
        log.info("listening", host=settings.host, port=port)
        on_listening(port)
        await gateway.run(stopping, runner.cleanup)
    finally:
        if runner.server is not None:
            await runner.cleanup()


class _Gateway:
    """The parts of one gateway and the tasks that run them."""

    def __init__(self, bus: Bus, settings: GatewaySettings, clock: Clock) -> None:
        model, metrics, self._pool = settings.model_name, Metrics(), Pool()
        self._drain_s = settings.drain_s
        self._clock = clock
        self._writer = Writer(bus, model, max_queue=settings.max_queue, metrics=metrics)
        self._owed: Owed = self._writer.owed
        self._lives = Lives(bus, model, self._writer, Reader(bus, self._owed, self._pool, metrics, clock))
        self._finder = TokenizerFinder(bus, model, self._pool)
        self.desk = Desk(model, wall_clock_s(), self._pool, self._owed, metrics, clock, Door(settings.max_queue))

    async def run(self, stopping: asyncio.Event, close_http: Callable[[], Awaitable[None]]) -> None:
        """Run until stopping is set, then drain. The socket stays open meanwhile: who asks is told."""
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(work)
                for work in (self._lives.run(), self._writer.run(), self._finder.run(), self._watch())
            ]
            await stopping.wait()
            await self._drain()
            await close_http()
            await self._writer.flush(within_s=FLUSH_S)
            for task in background:
                task.cancel()
        await self._leave()

    async def _watch(self) -> None:
        """End every answer when the scheduler has been silent for too long."""
        while True:
            if len(self._owed) and self._pool.silence_s(self._clock()) > SILENT_S:
                log.error("scheduler_silent", owed=len(self._owed))
                self._owed.fail_all(NotServing(f"there was no word from a scheduler for {SILENT_S:.0f} s"))
            await asyncio.sleep(until_next(WATCH_S, monotonic()))

    async def _drain(self) -> None:
        """Refuse newcomers, give running answers their time, then end them with an error."""
        self._pool.is_draining = True
        log.info("draining", owed=len(self._owed), drain_s=self._drain_s)
        try:
            async with asyncio.timeout(self._drain_s):
                await self._owed.all_ended()
        except TimeoutError:
            log.warning("drain_cut_short", owed=len(self._owed))
        self._owed.fail_all(NotServing("the gateway is stopping"))

    async def _leave(self) -> None:
        try:
            await self._lives.leave()
        except BusUnavailable as error:
            log.warning("not_left", error=str(error))  # its beat expires anyway
