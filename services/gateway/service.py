"""The life of a gateway: listen, register, serve, drain, leave."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from services.gateway.app import Entrance, listen, make_app, make_runner
from services.gateway.connections import Bounds
from services.gateway.desk import Desk
from services.gateway.finder import TokenizerFinder
from services.gateway.intake import Intake
from services.gateway.keys import KeyRing, read_keys
from services.gateway.lives import Lives
from services.gateway.metrics import Metrics
from services.gateway.owed import Owed
from services.gateway.pool import SILENT_S, Pool
from services.gateway.reader import Reader
from services.gateway.room import Counts, Room
from services.gateway.writer import Writer
from shared.bus.port import Bus
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable, NotServing, QueuedTooLong
from shared.runtime.clock import Clock, monotonic, until_next, wall_clock_s
from shared.runtime.part import wait_for_bus
from shared.runtime.process import settle
from shared.runtime.settings import GatewaySettings

WATCH_S, IDLE_WATCH_S = 0.25, 1.0
"""How late an answer may be ended for which nobody waits any more; the latter if it comes to an idle gateway."""
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
FLUSH_S = 2.0

log = structlog.get_logger()


async def serve(settings: GatewaySettings, stopping: asyncio.Event) -> None:
    """Serve HTTP until stopping is set and running streams have had their time. Raises StartupError."""
    bus = RedisBus(settings.redis_url)
    try:
        await serve_on(bus, settings, stopping, on_loaded=settle)
    finally:
        await bus.close()


async def serve_on(
    bus: Bus,
    settings: GatewaySettings,
    stopping: asyncio.Event,
    *,
    clock: Clock = monotonic,
    on_listening: Callable[[int], None] = lambda _: None,
    on_loaded: Callable[[], None] = lambda: None,
) -> None:
    """Serve on this bus; ``on_listening`` is told the port, ``on_loaded`` is called before anybody is served."""
    entrance = _entrance(settings)
    gateway = _Gateway(bus, settings, clock, on_loaded)
    await wait_for_bus(bus, stopping)
    gateway.desk.pool.bus_answered_s = clock()  # the first read waits for seconds if nobody has written yet
    metrics = gateway.desk.metrics
    bounds = Bounds(
        header_bytes=settings.max_header_bytes,
        send_s=settings.send_timeout_s,
        on_refused=metrics.refused,
        on_dropped=metrics.dropped,
    )
    runner = make_runner(make_app(gateway.desk, entrance), bounds)
    await runner.setup()
    try:
        port = await listen(runner, settings.host, settings.port)
        log.info("listening", host=settings.host, port=port)
        on_listening(port)
        await gateway.run(stopping, runner.cleanup)
    finally:
        if runner.server is not None:
            await runner.cleanup()


def _entrance(settings: GatewaySettings) -> Entrance:
    keys = _keys(settings)
    if keys.is_open and settings.host not in LOOPBACK:
        log.warning("open_to_everybody", host=settings.host)
    return Entrance(keys, _listed(settings.open_paths), _listed(settings.cors_origins))


def _keys(settings: GatewaySettings) -> KeyRing:
    key = settings.api_key.get_secret_value() if settings.api_key is not None else None
    return read_keys(key, settings.api_key_file, settings.max_streams_per_key)


def _listed(text: str) -> frozenset[str]:
    return frozenset(filter(None, (part.strip() for part in text.split(","))))


class _Gateway:
    """The parts of one gateway and the tasks that run them."""

    def __init__(self, bus: Bus, settings: GatewaySettings, clock: Clock, on_loaded: Callable[[], None]) -> None:
        model, metrics, self._pool = settings.model_name, Metrics(), Pool()
        self._drain_s = settings.drain_s
        self._max_queue_s = settings.max_queue_s
        self._clock = clock
        self._writer = Writer(bus, model, max_queue=settings.max_queue, metrics=metrics)
        self._owed: Owed = self._writer.owed
        self._lives = Lives(bus, model, self._writer, Reader(bus, self._owed, self._pool, metrics, clock))
        self._finder = TokenizerFinder(bus, model, self._pool, on_first=on_loaded)
        intake = Intake(settings.max_body_bytes)
        counts = Counts(lambda: self._writer.unwritten, lambda: len(self._owed.queued))
        self._room = Room(settings.max_queue, self._writer.line_length, counts)
        metrics.show("queued_tokens", "Tokens of prompts that wait here.", lambda: self._owed.queued.tokens)
        metrics.show(
            "queued_requests", "Requests that wait here for their first token.", lambda: len(self._owed.queued)
        )
        metrics.show("body_bytes", "Bytes of bodies that are here, beyond 64 KB of each.", lambda: intake.held_bytes)
        self.desk = Desk(
            model,
            wall_clock_s(),
            self._pool,
            self._owed,
            metrics,
            clock,
            self._room,
            intake,
            settings.max_queue,
            settings.max_queued_tokens,
            settings.send_timeout_s,
        )

    async def run(self, stopping: asyncio.Event, close_http: Callable[[], Awaitable[None]]) -> None:
        """Run until stopping is set, then drain. The socket stays open meanwhile: who asks is told."""
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(work)
                for work in (
                    self._lives.run(),
                    self._writer.run(),
                    self._room.run(),
                    self._finder.run(),
                    self._watch(),
                )
            ]
            await stopping.wait()
            await self._drain()
            await close_http()
            await self._writer.flush(within_s=FLUSH_S)
            for task in background:
                task.cancel()
        await self._leave()

    async def _watch(self) -> None:
        """End every answer when the scheduler has been silent for too long, and what has waited for too long."""
        while True:
            self._end_overdue()
            if len(self._owed) and self._pool.silence_s(self._clock()) > SILENT_S:
                log.error("scheduler_silent", owed=len(self._owed))
                self._owed.fail_all(NotServing(f"there was no word from a scheduler for {SILENT_S:.0f} s"))
            await asyncio.sleep(until_next(WATCH_S if len(self._owed) else IDLE_WATCH_S, monotonic()))

    def _end_overdue(self) -> None:
        for request in self._owed.queued.since_before(self._clock() - self._max_queue_s):
            self._owed.fail(request, QueuedTooLong(f"there was no token within {self._max_queue_s:g} s"))
        for _ in self._owed.end_overdue(self._clock()):
            self.desk.metrics.timed_out()

    async def _drain(self) -> None:
        """Refuse newcomers, give running answers their time, then end them with an error."""
        self._pool.is_draining = True
        log.info("draining", owed=len(self._owed), drain_s=self._drain_s)
        try:
            async with asyncio.timeout(self._drain_s):
                await self.desk.all_answered()
        except TimeoutError:
            log.warning("drain_cut_short", owed=len(self._owed))
        self._owed.fail_all(NotServing("the gateway is stopping"))

    async def _leave(self) -> None:
        try:
            await self._lives.leave()
        except BusUnavailable as error:
            log.warning("not_left", error=str(error))  # its beat expires anyway
