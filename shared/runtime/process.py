"""The life of a service's process: start, signals, one clear sentence when it cannot start, a clean end."""

import asyncio
import gc
import signal
import sys
from collections.abc import Awaitable, Callable

from shared.errors import StartupError

EXIT_CANNOT_START = 78
"""What a part exits with when starting it again would not help (EX_CONFIG): its supervisor gives up at once."""

Service = Callable[[asyncio.Event], Awaitable[None]]


async def _until_signalled(service: Service) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    await service(stopping)


def run(service: Service) -> int:
    """Run a service until it returns and give the exit status; the event it is handed is set by SIGINT or SIGTERM."""
    status = 0
    try:
        asyncio.run(_until_signalled(service))
    except* StartupError as group:
        for error in _leaves(group):
            sys.stderr.write(f"slipstream: {error}\n")
        status = EXIT_CANNOT_START
    return status


def settle() -> None:
    """Let the garbage collector never look again at what there is now: what a service has loaded stays as long as it.

    A look at all of it takes a gateway 40 to 80 ms, in which nothing else happens, and comes when much is made at once.
    """
    gc.collect()
    gc.freeze()


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
