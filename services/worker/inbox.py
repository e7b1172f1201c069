"""What a worker has read and not begun, in order."""

import asyncio
from collections import deque
from dataclasses import dataclass

from shared.bus.port import Entry
from shared.errors import ProtocolError
from shared.protocol.messages import ClaimWorker, StepPlan


@dataclass(frozen=True, slots=True)
class Read:
    """An entry with what it says, or why that is not for a worker, and when it was read."""

    entry: Entry
    message: ClaimWorker | StepPlan | ProtocolError
    at_s: float


class Inbox:
    """A queue whose head can be looked at. Whoever puts waits while it is full; once closed it is empty for ever."""

    def __init__(self, bound: int) -> None:
        self._reads: deque[Read] = deque()
        self._room = asyncio.Semaphore(bound)
        self._news = asyncio.Event()
        self.is_closed = False

    @property
    def head(self) -> Read | None:
        """What comes next, if there is something."""
        return self._reads[0] if self._reads else None

    async def put(self, read: Read) -> None:
        """Add one as soon as there is room."""
        await self._room.acquire()
        if not self.is_closed:
            self._reads.append(read)
            self.wake()

    def take(self) -> Read:
        """Take the head."""
        self._room.release()
        return self._reads.popleft()

    def close(self) -> None:
        """Forget what is in it and take no more."""
        self.is_closed = True
        self._reads.clear()
        self.wake()

    def wake(self) -> None:
        """Let `changed` return."""
        self._news.set()

    async def changed(self) -> None:
        """Wait until something was put, it was closed, or somebody woke who waits here; since it was last waited."""
        await self._news.wait()
        self._news.clear()
