"""Reads the waiting line and the workers' results into one bounded queue, each entry once and in order."""

import asyncio

from shared.bus.port import Bus, Entry
from shared.errors import BusUnavailable
from shared.ids import START, EntryId

BLOCK_S = 0.25
"""How long one read waits: so late at most a stream that was just added is heard."""
QUEUE_ENTRIES = 1024
RETRY_S = 0.1


class Reading:
    """Cursors over the streams that are read. ``entries`` is full when the leader is behind: then reading waits."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._cursors: dict[str, EntryId] = {}
        self.entries: asyncio.Queue[Entry] = asyncio.Queue(QUEUE_ENTRIES)

    def follow(self, stream: str) -> None:
        """Read a stream from its beginning, from the next read on."""
        self._cursors.setdefault(stream, START)

    def leave(self, stream: str) -> None:
        """Read a stream no more."""
        self._cursors.pop(stream, None)

    async def run(self) -> None:
        """Read until cancelled; while Redis does not answer, try again."""
        while True:
            cursors = dict(self._cursors)
            try:
                entries = await self._bus.read(cursors, block_s=BLOCK_S)
            except BusUnavailable:
                await asyncio.sleep(RETRY_S)  # the leader's own writes notice an outage, and say so
                continue
            for entry in entries:
                if entry.stream in self._cursors:
                    self._cursors[entry.stream] = entry.id
                    await self.entries.put(entry)
