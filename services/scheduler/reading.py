"""Reads the waiting line and the workers' results into one bounded queue, each entry once and in order."""

import asyncio

from shared.bus.port import Bus, Entry
from shared.errors import BusUnavailable
from shared.ids import START, EntryId

BLOCK_S = 5.0
QUEUE_ENTRIES = 1024
RETRY_S = 0.1


class Reading:
    """Cursors over the streams that are read. ``entries`` is full when the leader is behind: then reading waits."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._cursors: dict[str, EntryId] = {}
        self._wait: asyncio.Timeout | None = None
        self.entries: asyncio.Queue[Entry] = asyncio.Queue(QUEUE_ENTRIES)

    def follow(self, stream: str) -> None:
        """Read a stream from its beginning, from now on: a read that waits is begun again with it."""
        if stream not in self._cursors:
            self._cursors[stream] = START
            if self._wait is not None:
                self._wait.reschedule(asyncio.get_running_loop().time())

    def leave(self, stream: str) -> None:
        """Read a stream no more."""
        self._cursors.pop(stream, None)

    async def run(self) -> None:
        """Read until cancelled; while Redis does not answer, try again."""
        while True:
            for entry in await self._next():
                if entry.stream in self._cursors:
                    self._cursors[entry.stream] = entry.id
                    await self.entries.put(entry)

    async def _next(self) -> list[Entry]:
        try:
            async with asyncio.timeout(None) as self._wait:
                return await self._bus.read(dict(self._cursors), block_s=BLOCK_S)
        except TimeoutError:
            return []  # another stream is to be followed
        except BusUnavailable:
            await asyncio.sleep(RETRY_S)  # the leader's own writes notice an outage, and say so
            return []
        finally:
            self._wait = None
