"""A long computation beside the step thread and the event loop, that no exit has to wait for."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

_T = TypeVar("_T")


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

    threading.Thread(target=work, name=name, daemon=True).start()
    return await done


def _settle(done: "asyncio.Future[Any]", settle: Callable[[Any], None], what: object) -> None:
    if not done.cancelled():
        settle(what)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():  # else nobody waits any more
            raise
