"""A step that does not come to an end: nothing can stop its thread, so the process goes, and is started again."""

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import structlog

from services.worker.step_thread import StepThread

EXIT_HUNG = 70
"""What a worker ends with when its step hangs (EX_SOFTWARE): its supervisor starts it again."""
_LAST_CALL_S = 1.0
"""What an idle thread gets to show that it is idle when the process shall stop."""

log = structlog.get_logger()


def _leave(status: int) -> NoReturn:
    """End the process at once: a normal exit would wait for the hung thread."""
    sys.stderr.flush()
    os._exit(status)


@dataclass(frozen=True, slots=True)
class HungStep:
    """For how long a step of a life that has ended may go on, and what happens then."""

    wait_s: float = 30.0
    leave: Callable[[int], NoReturn] = _leave

    async def or_idle(self, thread: StepThread, then: Callable[[], None], stopping: asyncio.Event) -> None:
        """Run ``then`` on the thread once its step has ended; end the process if that takes too long."""
        running = asyncio.ensure_future(thread.call(then))
        stop = asyncio.ensure_future(stopping.wait())
        try:
            await asyncio.wait({running, stop}, timeout=self.wait_s, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({running}, timeout=_LAST_CALL_S)
            if not running.done():
                log.error("step_hangs", waited_s=self.wait_s, stopping=stopping.is_set())
                self.leave(EXIT_HUNG)
            await running
        finally:
            running.cancel()
            stop.cancel()
