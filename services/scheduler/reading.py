"""Reads the waiting line and the workers' results into one bounded queue, each entry once and in order."""

import asyncio
from collections.abc import Collection

import structlog

from shared.bus.port import Bus, Entry
from shared.errors import BusUnavailable
from shared.ids import START, EntryId

BLOCK_S = 5.0
QUEUE_ENTRIES = 1024
RETRY_S = 0.1

log = structlog.get_logger()


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
                self._wait = None

    def follow_only(self, streams: Collection[str]) -> None:
        """Read all other streams no more."""
        for stream in self._cursors.keys() - streams:
            del self._cursors[stream]

    async def run(self) -> None:
        """Read until cancelled; while Redis does not answer, try again."""
        while True:
            for entry in await self._next():
                if entry.stream in self._cursors:
                    self._cursors[entry.stream] = entry.id
                    await self.entries.put(entry)

    async def _next(self) -> list[Entry]:
        try:
            async with asyncio.timeout(None) as wait:
                return await self._read(wait)
        except TimeoutError:
            return []  # another stream is to be followed
        except BusUnavailable as error:
            log.debug("not_read", error=str(error))  # the leader's own writes notice an outage, and say so
        await asyncio.sleep(RETRY_S)
        return []

    async def _read(self, wait: asyncio.Timeout) -> list[Entry]:
        """Read once; `follow` may end the wait exactly as long as this runs."""
        self._wait = wait
        try:
            return await self._bus.read(dict(self._cursors), block_s=BLOCK_S)
        finally:
            self._wait = None
