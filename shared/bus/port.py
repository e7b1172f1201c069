"""What a bus promises. One suite of contract tests runs against every implementation.

Streams are append-only lists of entries with ascending ids. A reader makes its own stream; all others write to it only
while it exists. Nothing here retries: a write whose answer was lost raises `BusUnavailable`, and the caller repeats the
same position (every message may come twice).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.ids import EntryId

BEAT_S = 1.0
"""How often a part says that it is alive. Idle, a beat costs a wake-up of the part and of the server."""
EXPIRY_S = 3.0
"""How long a beat lasts: this alone says how soon a death is noticed, and two beats may be lost before."""
LEASE_S = 2.0
RENEWAL_S = 0.5
DEAD_PART_TTL_S = 3600.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a stream."""

    stream: str
    id: EntryId
    data: bytes


@dataclass(frozen=True, slots=True)
class Write:
    """One entry to be appended to a stream that its reader has made."""

    stream: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Part:
    """A process as the bus knows it: its id, the set that names it, the streams that live as long as it does.

    ``values`` it stores for others, by key: they stay when it ends, and it stores them again if the server forgot them.
    """

    id: str
    members: str
    streams: tuple[str, ...] = ()
    values: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lease:
    """Who wants to lead, and under which key."""

    key: str
    owner: str


@dataclass(frozen=True, slots=True)
class LeaderWrite:
    """What a leader publishes in one atomic step: plans or answers, and the entries of ``requests`` they settle."""

    writes: tuple[Write, ...] = ()
    requests: str = ""
    settled: tuple[EntryId, ...] = ()
    trims: Mapping[str, EntryId] = field(default_factory=dict)
    """Streams whose entries up to and including an id have been applied."""
    dead: tuple[str, ...] = ()
    """Parts that the leader has given up: declared dead, as by `Bus.declare_dead`."""


class Bus(Protocol):
    """Streams, leases and heartbeats. Every method raises `BusUnavailable` when the server does not answer."""

    async def check(self) -> None:
        """Raise `BusUnavailable` unless the server answers and never evicts a key (``noeviction``)."""

    async def make_stream(self, stream: str) -> None:
        """Make an empty stream, if there is none: from now on others can write to it."""

    async def publish(self, writes: Sequence[Write], *, trim: tuple[str, EntryId] | None = None) -> None:
        """Append in order, in one pipeline, each only if its stream exists; then trim a stream through an id."""

    async def read(self, cursors: Mapping[str, EntryId], *, block_s: float, count: int = 256) -> list[Entry]:
        """Return entries after each cursor, at most ``count`` per stream; wait up to ``block_s`` for the first.

        Streams may be missing. One call at a time and caller: reading has a connection of its own.
        """

    async def trim(self, stream: str, through: EntryId) -> None:
        """Delete all entries up to and including an id."""

    async def enqueue(self, stream: str, data: Sequence[bytes], *, bound: int | None) -> tuple[EntryId, ...] | None:
        """Append all to the waiting line; or none, and return None, if it would then hold more than ``bound``."""

    async def read_end(self, stream: str, cursor: EntryId) -> EntryId:
        """Return the last id the stream ever gave if nothing stands after the cursor, else the cursor."""

    async def length(self, stream: str) -> int:
        """Return the number of entries of a stream, 0 if it does not exist."""

    async def beat(self, part: Part, registration: bytes) -> bool:
        """Say that a part is alive for ``EXPIRY_S`` more, and make those of its streams that are missing.

        Return whether it was registered anew: at first, after its beat ran out, and when the server came back empty.
        The part's values are not stored. Raises `DeclaredDead` if it has been declared dead.
        """

    async def leave(self, part: Part) -> None:
        """Take a part off the list, with its streams: it ends in good order."""

    async def parts(self, members: str) -> dict[str, bytes]:
        """Return the registrations of all living parts of a set, by id, and drop the others from the set."""

    async def parts_of_each(self, *members: str) -> list[dict[str, bytes]]:
        """Do for several sets in one go what `parts` does for one."""

    async def declare_dead(self, part: str) -> None:
        """Write that a part is dead: it will never beat again under this id."""

    async def take_lease(self, lease: Lease) -> bool:
        """Take a lease for ``LEASE_S``, or find that it is ours already; False while it is somebody else's."""

    async def keep_lease(self, lease: Lease) -> bool:
        """Renew a lease for ``LEASE_S``; False if it is not ours any more, though it may be free."""

    async def drop_lease(self, lease: Lease) -> None:
        """Give a lease back, if it is ours."""

    async def lead(self, lease: Lease, write: LeaderWrite) -> None:
        """Publish in one atomic step, each entry only if its stream exists. Raises `LeaseLost`: nothing was done."""

    async def put(self, key: str, data: bytes) -> None:
        """Store a value for good."""

    async def get(self, key: str) -> bytes | None:
        """Return a stored value, if there is one."""

    async def dead_letter(self, entry: Entry, error: str) -> None:
        """Keep an unreadable entry where a person will find it; the oldest go beyond 10,000."""

    async def close(self) -> None:
        """Close all connections. Calls under way raise `BusUnavailable`."""
