"""Parts as processes: each is started, started again when it dies, and ended in good order when told.

::

    supervisor.keep(part) ──► start ──► runs ──► died ──► others are told ──► pause ──► start …
                                │                  └─ five times in a minute, or it said that it cannot start
                                └─ stop(grace)                └─► supervisor.ending, supervisor.failure
"""

import asyncio
import os
import secrets
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from services.bound_child import bound
from shared.protocol import names
from shared.runtime.clock import Clock
from shared.runtime.part import INSTANCE_VARIABLE
from shared.runtime.process import EXIT_CANNOT_START

FAILURES_MAX = 5
FAILURES_WINDOW_S = 60.0
PAUSE_FIRST_S = 0.2
PAUSE_LONGEST_S = 5.0
KILL_S = 5.0
"""How long the system may take to remove a killed process."""
_STDERR = 2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Part:
    """A process to be kept running. What it prints goes to the file descriptor ``output``: standard output is ours."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    output: int = _STDERR
    kind: names.Kind | None = None
    """Services of ours: what they are on the bus."""
    last_words: Callable[[], str] | None = None
    """What it said last, for parts whose words go elsewhere than to ``output``."""


class PartFailed(Exception):
    """A part cannot be kept running: its sentence is for the person who started it, unless the part has said it."""

    def __init__(self, sentence: str, *, cannot_start: bool) -> None:
        super().__init__(sentence)
        self.cannot_start = cannot_start


OnDeath = Callable[[Part, str], Awaitable[None]]
"""Told of a part and the instance of it that died, before it is started again."""


class Deaths:
    """When a part died, and for how long to wait before it is started again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times: deque[float] = deque()

    def add(self) -> int:
        """Count one more and return how many there were in the last minute."""
        now = self._clock()
        self._times.append(now)
        while now - self._times[0] > FAILURES_WINDOW_S:
            self._times.popleft()
        return len(self._times)

    @property
    def pause_s(self) -> float:
        """Seconds to wait: doubled with each death of the last minute."""
        return min(PAUSE_LONGEST_S, PAUSE_FIRST_S * 2.0 ** (len(self._times) - 1))


class Supervisor:
    """Keeps parts running until somebody sets ``ending``, or until one of them cannot be kept running."""

    def __init__(self, ending: asyncio.Event, on_death: OnDeath, clock: Clock) -> None:
        self.ending = ending
        self.failure: PartFailed | None = None
        self.is_ready = False
        self._on_death = on_death
        self._clock = clock

    def keep(self, tasks: asyncio.TaskGroup, part: Part) -> "Keeper":
        """Start a part, in a task of its own."""
        keeper = Keeper(part, Deaths(self._clock), self._died)
        tasks.create_task(keeper.run())
        return keeper

    async def _died(self, keeper: "Keeper", instance: str, status: int) -> bool:
        """Judge a death; False when the part is not to be started again."""
        part = keeper.part
        deaths = keeper.deaths.add()
        log.warning("part_died", part=part.name, status=status, deaths_in_a_minute=deaths)
        if status == EXIT_CANNOT_START and not self.is_ready:
            self._fail(PartFailed(f"the {part.name} cannot start", cannot_start=True))
            return False
        if deaths >= FAILURES_MAX:
            sentence = f"the {part.name} died {deaths} times in a minute (last with exit status {status}); giving up"
            reason = f": {part.last_words()}" if part.last_words else ""
            self._fail(PartFailed(sentence + reason, cannot_start=False))
            return False
        await self._on_death(part, instance)
        return True

    def _fail(self, failure: PartFailed) -> None:
        self.failure = self.failure or failure
        self.ending.set()


class Keeper:
    """Keeps one part running. To cancel its task is to kill the part at once."""

    def __init__(self, part: Part, deaths: Deaths, died: Callable[["Keeper", str, int], Awaitable[bool]]) -> None:
        self.part = part
        self.deaths = deaths
        self._died = died
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Start the part again and again until `stop` is called or its death is judged final."""
        try:
            while not self._stopping.is_set():
                instance = secrets.token_hex(8)
                status = await self._run_once(instance)
                if self._stopping.is_set() or not await self._died(self, instance, status):
                    return
                with suppress(TimeoutError):  # the pause is over
                    async with asyncio.timeout(self.deaths.pause_s):
                        await self._stopping.wait()
        finally:
            self._ended.set()

    async def stop(self, grace_s: float) -> None:
        """Ask the part to end, and kill it if it has not after ``grace_s``. Return when it is gone."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
        except TimeoutError:
            log.warning("part_killed", part=self.part.name, grace_s=grace_s)
            self._kill()
            async with asyncio.timeout(KILL_S):
                await self._ended.wait()

    async def _run_once(self, instance: str) -> int:
        self._process = process = await asyncio.create_subprocess_exec(
            *bound(self.part.command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self.part.output,
            stderr=self.part.output,
            env={**self.part.environment, INSTANCE_VARIABLE: instance},
            start_new_session=True,  # a terminal's Ctrl-C is for the supervisor alone: parts are drained in order
        )
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)  # `stop` was called while there was nobody to signal
        try:
            return await process.wait()
        finally:
            self._kill()
            self._process = None
            async with asyncio.timeout(KILL_S):
                await process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):  # it ended by itself
                self._process.send_signal(number)

    def _kill(self) -> None:
        """Kill the part with all that it started. Its number stays its group's while anybody of the group lives."""
        if self._process is not None:
            with suppress(ProcessLookupError):  # nobody is left
                os.killpg(self._process.pid, signal.SIGKILL)
