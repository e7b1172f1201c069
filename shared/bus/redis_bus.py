"""The bus on Redis 7.0 or newer, or Valkey. Nothing is decoded: what goes in as bytes comes out as bytes."""

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from shared.bus.connections import Answer, Command, Connections, Script
from shared.bus.port import (
    DEAD_PART_TTL_S,
    EXPIRY_S,
    LEASE_S,
    Entry,
    LeaderWrite,
    Lease,
    Part,
    Write,
)
from shared.errors import BusUnavailable, DeclaredDead, LeaseLost
from shared.ids import EntryId, entry_key
from shared.protocol import names

ANSWER_S = 5.0
"""How long the server may take over anything but a read that waits."""

RENEWED_WITHIN_S = 1.0
"""How long it may take over a beat or a lease: a second try must come before they run out."""

_WRITERS = 8
_READERS = 16
_LAST_SEQUENCE = 2**64 - 1
_ANEW = 2
"""What the script of a beat answers when there was none before."""

_BEAT = Script("beat")
_DROP_LEASE = Script("drop_lease")
_ENQUEUE = Script("enqueue")
_KEEP_LEASE = Script("keep_lease")
_LEAD = Script("lead")
_MAKE_STREAM = Script("make_stream")
_PARTS = Script("parts")
_READ_END = Script("read_end")
_TAKE_LEASE = Script("take_lease")


class RedisBus:
    """The bus at a ``redis://``, ``rediss://`` or ``unix://`` URL. Raises `StartupError` for any other.

    Connects when first used, and again whenever a connection was lost. Writes are sent once: a repeat is the caller's.
    """

    def __init__(self, url: str, *, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._writes = Connections(url, limit=_WRITERS)
        self._reads = Connections(url, limit=_READERS)

    async def check(self) -> None:
        """Raise `BusUnavailable` unless the server answers and never evicts a key (``noeviction``)."""
        _, memory = await self._call(("PING",), ("INFO", "memory"))
        policy = _fact(memory, b"maxmemory_policy").decode()
        if policy != "noeviction":
            raise BusUnavailable(
                f"Redis may evict keys and so lose work: set maxmemory-policy from {policy} to noeviction"
            )

    async def make_stream(self, stream: str) -> None:
        """Make an empty stream, if there is none: from now on others can write to it."""
        await self._run(_MAKE_STREAM, [stream])

    async def publish(self, writes: Sequence[Write], *, trim: tuple[str, EntryId] | None = None) -> None:
        """Append in order, in one pipeline, each only if its stream exists; then trim a stream through an id."""
        commands: list[Command] = [("XADD", write.stream, "NOMKSTREAM", "*", "d", write.data) for write in writes]
        if trim is not None:
            commands.append(_trim(*trim))
        if commands:
            await self._call(*commands)

    async def read(self, cursors: Mapping[str, EntryId], *, block_s: float, count: int = 256) -> list[Entry]:
        """Return entries after each cursor, at most ``count`` per stream; wait up to ``block_s`` for the first."""
        if not cursors:
            await asyncio.sleep(block_s)
            return []
        # BLOCK 0 would wait for ever.
        block: Command = ("BLOCK", math.ceil(block_s * 1000)) if block_s > 0 else ()
        command: Command = ("XREAD", "COUNT", count, *block, "STREAMS", *cursors, *cursors.values())
        (answer,) = await self._reads.call(command, within_s=self._answer_s + 2 * block_s)
        return list(_entries(answer))

    async def trim(self, stream: str, through: EntryId) -> None:
        """Delete all entries up to and including an id."""
        await self._call(_trim(stream, through))

    async def enqueue(self, stream: str, data: Sequence[bytes], *, bound: int | None) -> tuple[EntryId, ...] | None:
        """Append all to the waiting line; or none, and return None, if it would then hold more than ``bound``."""
        answer = await self._run(_ENQUEUE, [stream], [-1 if bound is None else bound, *data])
        return None if answer is None else tuple(EntryId(entry.decode()) for entry in answer)

    async def read_end(self, stream: str, cursor: EntryId) -> EntryId:
        """Return the last id the stream ever gave if nothing stands after the cursor, else the cursor."""
        answer: bytes = await self._run(_READ_END, [stream], [cursor])
        return EntryId(answer.decode())

    async def length(self, stream: str) -> int:
        """Return the number of entries of a stream, 0 if it does not exist."""
        (answer,) = await self._call(("XLEN", stream))
        return int(answer)

    async def beat(self, part: Part, registration: bytes) -> bool:
        """Say that a part is alive for ``EXPIRY_S`` more, make its missing streams; True if it was registered anew."""
        keys = [names.dead(part.id), names.beat(part.id), part.members, *part.streams]
        args: list[str | bytes | int] = [part.id, registration, _ms(EXPIRY_S), _ms(DEAD_PART_TTL_S)]
        answer = await self._run(_BEAT, keys, args, within_s=RENEWED_WITHIN_S)
        if not answer:
            raise DeclaredDead(f"{part.id} has been declared dead")
        return bool(answer == _ANEW)

    async def leave(self, part: Part) -> None:
        """Take a part off the list, with its streams: it ends in good order."""
        await self._call(("SREM", part.members, part.id), ("DEL", names.beat(part.id), *part.streams))

    async def parts(self, members: str) -> dict[str, bytes]:
        """Return the registrations of all living parts of a set, by id, and drop the others from the set."""
        (living,) = await self.parts_of_each(members)
        return living

    async def parts_of_each(self, *members: str) -> list[dict[str, bytes]]:
        """Do for several sets in one go what `parts` does for one."""
        answer: list[list[bytes]] = await self._run(_PARTS, members, [names.beat("")])
        return [_registrations(living) for living in answer]

    async def declare_dead(self, part: str) -> None:
        """Write that a part is dead: it will never beat again under this id."""
        await self._call(("SET", names.dead(part), 1, "PX", _ms(DEAD_PART_TTL_S)), ("DEL", names.beat(part)))

    async def take_lease(self, lease: Lease) -> bool:
        """Take a lease for ``LEASE_S``, or find that it is ours already; False while it is somebody else's."""
        return await self._run_on_lease(_TAKE_LEASE, lease)

    async def keep_lease(self, lease: Lease) -> bool:
        """Renew a lease for ``LEASE_S``; False if it is not ours any more, though it may be free."""
        return await self._run_on_lease(_KEEP_LEASE, lease)

    async def _run_on_lease(self, script: Script, lease: Lease) -> bool:
        args: list[str | bytes | int] = [lease.owner, _ms(LEASE_S)]
        return bool(await self._run(script, [lease.key], args, within_s=RENEWED_WITHIN_S))

    async def drop_lease(self, lease: Lease) -> None:
        """Give a lease back, if it is ours."""
        await self._run(_DROP_LEASE, [lease.key], [lease.owner])

    async def lead(self, lease: Lease, write: LeaderWrite) -> None:
        """Publish in one atomic step, each entry only if its stream exists. Raises `LeaseLost`: nothing was done."""
        dead = [key for part in write.dead for key in (names.dead(part), names.beat(part))]
        keys = [lease.key, write.requests, *write.trims, *(one.stream for one in write.writes), *dead]
        least_kept = map(_after, write.trims.values())
        data = (one.data for one in write.writes)
        args: list[str | bytes | int]
        args = [
            lease.owner,
            len(write.trims),
            *least_kept,
            len(write.writes),
            *data,
            _ms(DEAD_PART_TTL_S),
            *write.settled,
        ]
        if not await self._run(_LEAD, keys, args):
            raise LeaseLost(f"{lease.key} is no longer held by {lease.owner}")

    async def put(self, key: str, data: bytes) -> None:
        """Store a value for good."""
        await self._call(("SET", key, data))

    async def get(self, key: str) -> bytes | None:
        """Return a stored value, if there is one."""
        (answer,) = await self._call(("GET", key))
        return None if answer is None else bytes(answer)

    async def dead_letter(self, entry: Entry, error: str) -> None:
        """Keep an unreadable entry where a person will find it; the oldest go beyond 10,000."""
        fields = ("d", entry.data, "stream", entry.stream, "id", entry.id, "error", error)
        await self._call(("XADD", names.DEAD_LETTER, "MAXLEN", "=", names.DEAD_LETTER_ENTRIES, "*", *fields))

    async def close(self) -> None:
        """Close all connections. Calls under way raise `BusUnavailable`."""
        await self._reads.close()
        await self._writes.close()

    async def _call(self, *commands: Command) -> list[Answer]:
        return await self._writes.call(*commands, within_s=self._answer_s)

    async def _run(
        self, script: Script, keys: Sequence[str], args: Sequence[str | bytes | int] = (), *, within_s: float = ANSWER_S
    ) -> Answer:
        return await self._writes.run(script, keys, args, within_s=min(within_s, self._answer_s))


def _ms(seconds: float) -> int:
    return math.ceil(seconds * 1000)


def _after(entry: EntryId) -> str:
    """Return the least id greater than an entry's."""
    milliseconds, sequence = entry_key(entry)
    return f"{milliseconds + 1}-0" if sequence == _LAST_SEQUENCE else f"{milliseconds}-{sequence + 1}"


def _trim(stream: str, through: EntryId) -> Command:
    return ("XTRIM", stream, "MINID", "=", _after(through))


def _fact(info: bytes, name: bytes) -> bytes:
    """Return one fact of an INFO answer, empty if it is not there."""
    lines = (line.partition(b":") for line in info.splitlines())
    return next((value for key, _, value in lines if key == name), b"")


def _registrations(living: Sequence[bytes]) -> dict[str, bytes]:
    """Return what stands in turn, ids and registrations, by id."""
    pairs = zip(living[::2], living[1::2], strict=True)
    return {part.decode(): registration for part, registration in sorted(pairs)}


def _entries(answer: Answer) -> Iterator[Entry]:
    """Yield the entries of an XREAD answer: nothing, pairs of stream and entries (RESP2), or a map of them (RESP3)."""
    streams: Iterable[tuple[bytes, list[tuple[bytes, list[bytes]]]]]
    streams = answer.items() if isinstance(answer, dict) else answer or ()
    for stream, entries in streams:
        name = stream.decode()
        for entry, fields in entries:
            yield Entry(name, EntryId(entry.decode()), fields[1])
