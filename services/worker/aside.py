"""A long computation beside the step thread and the event loop, that no exit has to wait for."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

_T = TypeVar("_T")
_threads: list[threading.Thread] = []


async def aside(function: Callable[[], _T], name: str) -> _T:
    """Return what a function returns on a thread of its own. If this is cancelled, the thread is left to itself.

    A daemon thread: a process that stops does not wait for what nobody needs any more.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
            _tell(loop, partial(_settle, done, done.set_exception, error))
        else:
            _tell(loop, partial(_settle, done, done.set_result, result))

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    _threads[:] = [*filter(threading.Thread.is_alive, _threads), thread]
    return await done


def leave_if_under_way() -> None:
    """End the process at once, in good order, if a computation goes on that nobody awaits.

    At a normal end Python would stop its thread in the middle of torch's code, which aborts the process then.
    """
    if any(thread.is_alive() for thread in _threads):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _settle(done: "asyncio.Future[Any]", settle: Callable[[Any], None], what: object) -> None:
    if not done.cancelled():
        settle(what)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():  # else nobody waits any more
            raise
