"""Calls of the bus that are tried again until they work: the server is away for a while, never for good."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

import structlog

from shared.errors import BusUnavailable

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0

log = structlog.get_logger()
_T = TypeVar("_T")


async def unless_stopped(stopping: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Return True once the work is done, or False as soon as ``stopping`` is set: then it is cancelled."""
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(work)
        waiting = tasks.create_task(stopping.wait())
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        is_done = working.done()
        working.cancel()
        waiting.cancel()
    return is_done


async def patiently(call: Callable[[], Awaitable[_T]], event: str) -> _T:
    """Return what the call returns, trying again with growing pauses up to a second; the first failure is logged.

    Ends only by success or by being cancelled: whoever stops the process bounds it.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except BusUnavailable as error:
            if pause_s == _FIRST_PAUSE_S:
                log.warning(event, error=str(error))
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
