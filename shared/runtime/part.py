"""Identity and heartbeat of a process: who it is to the others, and how they know that it lives (DESIGN §4)."""

import asyncio
import os
import secrets
import socket
from collections.abc import Callable

import structlog

from shared.bus.port import BEAT_S, Bus, Part
from shared.errors import BusUnavailable, StartupError
from shared.protocol import names
from shared.protocol.codec import encode
from shared.protocol.messages import Registration
from shared.runtime.clock import monotonic, until_next

INSTANCE_VARIABLE = "SLIPSTREAM_INSTANCE"
"""Set by a supervisor, so that it knows the ids of a process it saw die: they are ``{kind}-{instance}.{life}``."""

BUS_START_S = 30.0
"""How long a Redis that is still starting is waited for."""
_RETRY_S = 0.2

log = structlog.get_logger()


class Identity:
    """The ids of one process. Each life has a new one: nothing is inherited, so nothing of the dead needs cleaning."""

    def __init__(self, kind: names.Kind) -> None:
        self._stem = f"{kind}-{os.environ.get(INSTANCE_VARIABLE) or secrets.token_hex(8)}"
        self._lives = 0

    def next_life(self) -> str:
        """Return an id that nobody has had before."""
        self._lives += 1
        return f"{self._stem}.{self._lives}"


def registration(kind: names.Kind, model: str, *, tokenizer: str = "") -> bytes:
    """Return what the others may know of this process, encoded."""
    return encode(Registration(kind, model, socket.gethostname(), os.getpid(), tokenizer))


async def wait_for_bus(bus: Bus, stopping: asyncio.Event) -> None:
    """Wait until Redis answers, or stopping is set. Raises StartupError if it does not, or if it would lose work."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + BUS_START_S
    told = False
    while not stopping.is_set():
        try:
            await bus.check()
        except BusUnavailable as error:
            if loop.time() > deadline_s:
                raise StartupError(str(error)) from error
            if not told:
                log.warning("bus_awaited", error=str(error), at_most_s=BUS_START_S)
            told = True
            await asyncio.sleep(_RETRY_S)
        else:
            return


def _do_nothing() -> None:
    """Be what happens if nobody asks for more."""


async def keep_beating(bus: Bus, part: Part, value: bytes, on_anew: Callable[[], None] = _do_nothing) -> None:
    """Beat until cancelled, and store the part's values whenever it had to be registered anew.

    ``on_anew`` is called each time that may have been so: the server may have forgotten all that was written to it.
    Raises `DeclaredDead`, in a group, when this part was given up.
    """
    anew = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_beat(bus, part, value, anew, on_anew))
        # a task of its own: values may be large, and beats must not wait for them
        tasks.create_task(_store(bus, part, anew))


async def _beat(bus: Bus, part: Part, value: bytes, anew: asyncio.Event, on_anew: Callable[[], None]) -> None:
    """Beat until cancelled. An unanswered beat is tried again soon, for it runs out."""
    silent = False
    while True:
        try:
            # after silence too: what was not heard may have been that it was registered anew
            if await bus.beat(part, value) or silent:
                anew.set()
                on_anew()
            silent = False
        except BusUnavailable as error:
            if not silent:
                log.warning("beat_unanswered", part=part.id, error=str(error))
            silent = True
        await asyncio.sleep(_RETRY_S if silent else until_next(BEAT_S, monotonic()))


async def _store(bus: Bus, part: Part, anew: asyncio.Event) -> None:
    """Store the values whenever the part was registered anew: a server that came back empty has forgotten them too."""
    silent = False
    while True:
        await anew.wait()
        anew.clear()
        try:
            for key, data in part.values.items():
                await bus.put(key, data)
            silent = False
        except BusUnavailable as error:
            if not silent:
                log.warning("values_not_stored", part=part.id, error=str(error))
            silent = True
            anew.set()
            await asyncio.sleep(_RETRY_S)
