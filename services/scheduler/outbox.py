"""What the leader has to say, gathered until it is published in one atomic write."""

from collections.abc import Iterable

from shared.bus.port import LeaderWrite, Write
from shared.ids import EntryId
from shared.protocol.codec import encode
from shared.protocol.messages import Message


class Outbox:
    """Messages, settled entries of ``requests`` and applied results, in the order in which they came."""

    def __init__(self, requests: str) -> None:
        self._requests = requests
        self._writes: list[Write] = []
        self._settled: list[EntryId] = []
        self._trims: dict[str, EntryId] = {}
        self._dead: list[str] = []

    def say(self, stream: str, message: Message) -> None:
        """Publish a message, if its reader's stream exists."""
        self._writes.append(Write(stream, encode(message)))

    def settle(self, entries: Iterable[EntryId]) -> None:
        """Delete entries of ``requests``: what they asked for has been published."""
        self._settled.extend(entries)

    def applied(self, stream: str, through: EntryId) -> None:
        """Trim a worker's results: they have been applied."""
        self._trims[stream] = through

    def declare_dead(self, part: str) -> None:
        """Say that a part is dead: it will never beat again under its id."""
        self._dead.append(part)

    def take(self, *, may_trim_only: bool = True) -> LeaderWrite | None:
        """Return all that was gathered and begin anew; None if there is nothing, or nothing but what may wait."""
        if not (self._writes or self._settled or self._dead or (self._trims and may_trim_only)):
            return None
        write = LeaderWrite(
            tuple(self._writes), self._requests, tuple(self._settled), dict(self._trims), tuple(self._dead)
        )
        self._writes, self._settled, self._trims, self._dead = [], [], {}, []
        return write
