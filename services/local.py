"""`slipstream up`: an embedded Valkey and all services on one machine, started, watched, restarted, ended in order."""

import asyncio
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field

from services.embedded_valkey import EmbeddedValkey, embedded_valkey
from services.listening import choose_port, is_ready, url_of
from services.parts import cores, service_parts, threads_per_worker
from services.supervision import Keeper, Part, PartFailed, Supervisor
from services.undertaker import Undertaker
from shared.bus.port import Bus
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable, StartupError
from shared.runtime import process
from shared.runtime.clock import monotonic
from shared.runtime.settings import UpSettings

EXIT_GAVE_UP = 1
EXIT_INTERRUPTED = 130
_VALKEY_START_S = 10.0
_READY_RETRY_S = 0.1
_STILL_STARTING_S = 30.0
_GRACE_S = 5.0
"""What a part gets to end by itself; the gateway gets it on top of its drain."""
_FAILED_GRACE_S = 2.0
"""The same after a failure: nothing is left to drain for."""


def up(settings: UpSettings) -> int:
    """Run everything until a signal comes or a part cannot be kept running; return the exit status."""
    local = Local(settings)
    return process.run(local.run) or local.status


def say(sentence: str) -> None:
    """Tell the person who started this; standard output is kept for the ready line."""
    sys.stderr.write(f"slipstream: {sentence}\n")
    sys.stderr.flush()


class Local:
    """One `up`, from the first check to the last process that ended."""

    def __init__(self, settings: UpSettings) -> None:
        self.status = 0
        self._settings = settings

    async def run(self, stopping: asyncio.Event) -> None:
        """Run until ``stopping`` is set. Raises `StartupError` for what can be known before anything is started."""
        port = choose_port(self._settings.host, self._settings.port)
        with ExitStack() as at_the_end:
            valkey = None if self._settings.redis_url else at_the_end.enter_context(embedded_valkey())
            redis_url = valkey.url if valkey else self._settings.redis_url
            bus = RedisBus(redis_url)
            try:
                if valkey is None:
                    await _check(bus)
                _say_what_starts(self._settings, embedded=valkey is not None)
                gateway, inner = service_parts(self._settings, redis_url=redis_url, port=port)
                undertaker = Undertaker(bus, self._settings.model_name)
                crew = Crew(Supervisor(stopping, undertaker.bury, monotonic), valkey, inner, gateway)
                await self._until_ended(crew, port)
            finally:
                await bus.close()

    async def _until_ended(self, crew: "Crew", port: int) -> None:
        ending = crew.supervisor.ending
        interruption = Interruption(ending)
        interruption.listen()
        try:
            async with asyncio.TaskGroup() as tasks:
                starting = tasks.create_task(crew.start(tasks, self._settings.host, port))
                await ending.wait()
                starting.cancel()
                await crew.stop(self._settings.drain_s)
        except asyncio.CancelledError:
            if not interruption.is_final:
                raise
            self.status = EXIT_INTERRUPTED
        else:
            self.status = _explain(crew.supervisor.failure)


@dataclass(slots=True)
class Crew:
    """All parts of one `up`, in the order in which they start; they stop in the opposite one."""

    supervisor: Supervisor
    valkey: EmbeddedValkey | None
    inner: tuple[Part, ...]
    gateway: Part
    _keepers: list[list[Keeper]] = field(default_factory=list)

    async def start(self, tasks: asyncio.TaskGroup, host: str, port: int) -> None:
        """Start all and say so when a request would be served."""
        if self.valkey is not None:
            self._keep(tasks, self.valkey.part)
            await _until_answering(self.valkey)
        self._keep(tasks, *self.inner)
        self._keep(tasks, self.gateway)
        await _until_ready(host, port)
        self.supervisor.is_ready = True
        sys.stdout.write(f"ready {url_of(host, port)}\n")
        sys.stdout.flush()

    async def stop(self, drain_s: float) -> None:
        """Stop the gateway, which drains, then scheduler and workers, then Valkey; kill what takes too long."""
        grace_s = _FAILED_GRACE_S if self.supervisor.failure else _GRACE_S
        for tier in reversed(self._keepers):
            is_gateway = tier[0].part is self.gateway
            drains = is_gateway and self.supervisor.failure is None
            async with asyncio.TaskGroup() as stops:
                for keeper in tier:
                    stops.create_task(keeper.stop(grace_s + drain_s if drains else grace_s))

    def _keep(self, tasks: asyncio.TaskGroup, *parts: Part) -> None:
        self._keepers.append([self.supervisor.keep(tasks, part) for part in parts])


class Interruption:
    """The first signal asks for an orderly end; one that comes while things are ending, for an end at once."""

    def __init__(self, ending: asyncio.Event) -> None:
        self.is_final = False
        self._ending = ending
        self._task = asyncio.current_task()

    def listen(self) -> None:
        """Handle signals from now on; SIGHUP only where nobody (``nohup``) asked to ignore it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if not self._ending.is_set():
            say("stopping; once more kills everything at once")
            self._ending.set()
        elif self._task is not None:
            self.is_final = True
            self._task.cancel()


async def _check(bus: Bus) -> None:
    try:
        await bus.check()
    except BusUnavailable as error:
        raise StartupError(str(error)) from error


async def _until_answering(valkey: EmbeddedValkey) -> None:
    try:
        async with asyncio.timeout(_VALKEY_START_S):
            await valkey.until_answering()
    except TimeoutError as error:
        raise StartupError(f"the embedded Valkey does not answer: {valkey.last_words()}") from error


async def _until_ready(host: str, port: int) -> None:
    """Ask until the answer is yes. What fails meanwhile ends this from outside; fetching a model may take long."""
    started = told = monotonic()
    while not await is_ready(host, port):
        if monotonic() - told > _STILL_STARTING_S:
            told = monotonic()
            say(f"still starting after {told - started:.0f} s")
        await asyncio.sleep(_READY_RETRY_S)


def _say_what_starts(settings: UpSettings, *, embedded: bool) -> None:
    workers = "1 worker" if settings.workers == 1 else f"{settings.workers} workers"
    parts = [*(["valkey"] if embedded else []), "scheduler", workers, "gateway"]
    say(f"starting: {', '.join(parts)}; model {settings.model}")
    threads = threads_per_worker(settings) * settings.workers
    if threads > cores():
        say(f"{settings.workers} workers take {threads} threads, but there are {cores()} cores: expect slow steps")
    if sys.platform != "linux":
        say("on this system a kill -9 of this process leaves its parts running")


def _explain(failure: PartFailed | None) -> int:
    """Return the exit status, and say why unless the part has done so."""
    if failure is None:
        return 0
    if failure.cannot_start:
        return process.EXIT_CANNOT_START
    say(str(failure))
    return EXIT_GAVE_UP
