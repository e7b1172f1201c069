"""The bus in memory: the same promises as Redis, for tests and simulations in one process."""

import asyncio
from collections.abc import Mapping, Sequence

from shared.bus.memory_server import MemoryServer
from shared.bus.port import DEAD_PART_TTL_S, EXPIRY_S, LEASE_S, Entry, LeaderWrite, Lease, Part, Write
from shared.errors import BusUnavailable, DeclaredDead, LeaseLost
from shared.ids import EntryId
from shared.protocol import names

__all__ = ["MemoryBus", "MemoryServer"]


class MemoryBus:
    """One process's connection to a `MemoryServer`."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._waiting: set[asyncio.Event] = set()
        self._closed = False

    async def check(self) -> None:
        """Raise `BusUnavailable` after `close`: memory is never evicted."""
        await self._reach()

    async def make_stream(self, stream: str) -> None:
        """Make an empty stream, if there is none: from now on others can write to it."""
        (await self._reach()).make_stream(stream)

    async def publish(self, writes: Sequence[Write], *, trim: tuple[str, EntryId] | None = None) -> None:
        """Append in order, each only if its stream exists; then trim a stream through an id."""
        server = await self._reach()
        for write in writes:
            server.append(write.stream, write.data)
        if trim is not None:
            server.trim(*trim)

    async def read(self, cursors: Mapping[str, EntryId], *, block_s: float, count: int = 256) -> list[Entry]:
        """Return entries after each cursor, at most ``count`` per stream; wait up to ``block_s`` for the first."""
        server = await self._reach()
        found = server.after(cursors, count)
        if found or block_s <= 0:
            return found
        news = asyncio.Event()
        streams = tuple(cursors)
        self._waiting.add(news)
        server.wait_for(streams, news)
        try:
            async with asyncio.timeout(block_s):
                return await self._news(cursors, count, news)
        except TimeoutError:
            return []
        finally:
            server.stop_waiting(streams, news)
            self._waiting.discard(news)

    async def trim(self, stream: str, through: EntryId) -> None:
        """Delete all entries up to and including an id."""
        (await self._reach()).trim(stream, through)

    async def enqueue(self, stream: str, data: Sequence[bytes], *, bound: int | None) -> tuple[EntryId, ...] | None:
        """Append all to the waiting line; or none, and return None, if it would then hold more than ``bound``."""
        return (await self._reach()).enqueue(stream, data, bound)

    async def read_end(self, stream: str, cursor: EntryId) -> EntryId:
        """Return the last id the stream ever gave if nothing stands after the cursor, else the cursor."""
        found = (await self._reach()).stream(stream)
        if found is None or found.after(cursor, 1):
            return cursor
        return EntryId(f"{found.last[0]}-{found.last[1]}")

    async def length(self, stream: str) -> int:
        """Return the number of entries of a stream, 0 if it does not exist."""
        found = (await self._reach()).stream(stream)
        return 0 if found is None else len(found.entries)

    async def beat(self, part: Part, registration: bytes) -> bool:
        """Say that a part is alive for ``EXPIRY_S`` more, make its missing streams; True if it was registered anew."""
        server = await self._reach()
        if server.get(names.dead(part.id)) is not None:
            raise DeclaredDead(f"{part.id} has been declared dead")
        is_anew = server.get(names.beat(part.id)) is None
        server.put(names.beat(part.id), registration, for_s=EXPIRY_S)
        server.members(part.members).add(part.id)
        for stream in part.streams:
            server.make_stream(stream)
            server.expire_stream(stream, DEAD_PART_TTL_S)
        return is_anew

    async def leave(self, part: Part) -> None:
        """Take a part off the list, with its streams: it ends in good order."""
        server = await self._reach()
        server.members(part.members).discard(part.id)
        server.remove(names.beat(part.id))
        for stream in part.streams:
            server.remove_stream(stream)

    async def parts(self, members: str) -> dict[str, bytes]:
        """Return the registrations of all living parts of a set, by id, and drop the others from the set."""
        (living,) = await self.parts_of_each(members)
        return living

    async def parts_of_each(self, *members: str) -> list[dict[str, bytes]]:
        """Do for several sets in one go what `parts` does for one."""
        server = await self._reach()
        return [_living(server, one) for one in members]

    async def declare_dead(self, part: str) -> None:
        """Write that a part is dead: it will never beat again under this id."""
        _declare_dead(await self._reach(), part)

    async def take_lease(self, lease: Lease) -> bool:
        """Take a lease for ``LEASE_S``, or find that it is ours already; False while it is somebody else's."""
        server = await self._reach()
        owner = lease.owner.encode()
        if server.get(lease.key) not in (None, owner):
            return False
        server.put(lease.key, owner, for_s=LEASE_S)
        return True

    async def keep_lease(self, lease: Lease) -> bool:
        """Renew a lease for ``LEASE_S``; False if it is not ours any more, though it may be free."""
        server = await self._reach()
        owner = lease.owner.encode()
        if server.get(lease.key) != owner:
            return False
        server.put(lease.key, owner, for_s=LEASE_S)
        return True

    async def drop_lease(self, lease: Lease) -> None:
        """Give a lease back, if it is ours."""
        server = await self._reach()
        if server.get(lease.key) == lease.owner.encode():
            server.remove(lease.key)

    async def lead(self, lease: Lease, write: LeaderWrite) -> None:
        """Publish in one atomic step, each entry only if its stream exists. Raises `LeaseLost`: nothing was done."""
        server = await self._reach()
        if server.get(lease.key) != lease.owner.encode():
            raise LeaseLost(f"{lease.key} is no longer held by {lease.owner}")
        for one in write.writes:
            server.append(one.stream, one.data)
        server.delete(write.requests, write.settled)
        for stream, through in write.trims.items():
            server.trim(stream, through)
        for part in write.dead:
            _declare_dead(server, part)

    async def put(self, key: str, data: bytes) -> None:
        """Store a value for good."""
        (await self._reach()).put(key, data)

    async def get(self, key: str) -> bytes | None:
        """Return a stored value, if there is one."""
        return (await self._reach()).get(key)

    async def dead_letter(self, entry: Entry, error: str) -> None:
        """Keep an unreadable entry where a person will find it; the oldest go beyond 10,000."""
        (await self._reach()).dead_letter(entry, error)

    async def close(self) -> None:
        """Close the connection. Calls under way raise `BusUnavailable`."""
        self._closed = True
        for news in self._waiting:
            news.set()

    async def _news(self, cursors: Mapping[str, EntryId], count: int, news: asyncio.Event) -> list[Entry]:
        """Return the first entries that come. They may have been deleted again when this task gets its turn."""
        found: list[Entry] = []
        while not found:
            await news.wait()
            news.clear()
            self._require_open()
            found = self._server.after(cursors, count)
        return found

    async def _reach(self) -> MemoryServer:
        """Give others a turn, as a socket would: a loop that reads and writes must not starve them."""
        await asyncio.sleep(0)
        self._require_open()
        return self._server

    def _require_open(self) -> None:
        if self._closed:
            raise BusUnavailable("The connection to the memory bus has been closed")


def _living(server: MemoryServer, members: str) -> dict[str, bytes]:
    ids = server.members(members)
    beats = {part: server.get(names.beat(part)) for part in sorted(ids)}
    living = {part: registration for part, registration in beats.items() if registration is not None}
    ids.intersection_update(living)
    return living


def _declare_dead(server: MemoryServer, part: str) -> None:
    server.put(names.dead(part), b"1", for_s=DEAD_PART_TTL_S)
    server.remove(names.beat(part))
