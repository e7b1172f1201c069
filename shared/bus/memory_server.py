"""What a Redis server would hold, in memory."""

import asyncio
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.bus.port import Entry
from shared.ids import EntryId, entry_key
from shared.protocol import names

_FOR_EVER = float("inf")
_Key = tuple[int, int]


def _key_of(entry: Entry) -> _Key:
    return entry_key(entry.id)


@dataclass(slots=True)
class _Stream:
    """Entries in ascending order. ``last`` outlives them, so that no id is given twice."""

    entries: list[Entry] = field(default_factory=list)
    last: _Key = (0, 0)
    expires_at: float = _FOR_EVER

    def append(self, name: str, data: bytes, now_ms: int) -> EntryId:
        self.last = max((now_ms, 0), (self.last[0], self.last[1] + 1))
        entry = EntryId(f"{self.last[0]}-{self.last[1]}")
        self.entries.append(Entry(name, entry, data))
        return entry

    def after(self, cursor: EntryId, count: int) -> list[Entry]:
        first = bisect_right(self.entries, entry_key(cursor), key=_key_of)
        return self.entries[first : first + count]

    def trim(self, through: EntryId) -> None:
        del self.entries[: bisect_right(self.entries, entry_key(through), key=_key_of)]

    def delete(self, entry: EntryId) -> None:
        place = bisect_left(self.entries, entry_key(entry), key=_key_of)
        if place < len(self.entries) and self.entries[place].id == entry:
            del self.entries[place]


@dataclass(slots=True)
class _Value:
    data: bytes
    expires_at: float


class MemoryServer:
    """What a Redis server would hold. Nothing in it waits: each method is one atomic step.

    ``clock`` gives seconds, by which keys and streams expire and from which ids are made; without one,
    the event loop's. How long a read waits is the event loop's time in any case.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._values: dict[str, _Value] = {}
        self._sets: dict[str, set[str]] = {}
        self._waiting: dict[str, dict[asyncio.Event, None]] = {}
        self.dead_letters: deque[tuple[Entry, str]] = deque(maxlen=names.DEAD_LETTER_ENTRIES)
        """Unreadable entries as they came, with what was wrong with them."""

    def now_s(self) -> float:
        """Return the time by which keys expire."""
        return self._clock() if self._clock else asyncio.get_running_loop().time()

    # Streams

    def stream(self, name: str) -> _Stream | None:
        """Return a stream, if there is one and it has not expired."""
        found = self._streams.get(name)
        if found is not None and found.expires_at <= self.now_s():
            del self._streams[name]
            return None
        return found

    def make_stream(self, name: str) -> _Stream:
        """Return a stream, an empty one if there was none."""
        return self.stream(name) or self._streams.setdefault(name, _Stream())

    def append(self, name: str, data: bytes) -> None:
        """Append to a stream if there is one."""
        stream = self.stream(name)
        if stream is not None:
            self._append(name, stream, data)

    def enqueue(self, name: str, data: Sequence[bytes], bound: int | None) -> tuple[EntryId, ...] | None:
        """Append all, making the stream; or none if it would then hold more than the bound."""
        stream = self.stream(name)
        if bound is not None and (len(stream.entries) if stream else 0) + len(data) > bound:
            return None
        return tuple(self._append(name, self.make_stream(name), one) for one in data)

    def after(self, cursors: Mapping[str, EntryId], count: int) -> list[Entry]:
        """Return what stands after each cursor."""
        found: list[Entry] = []
        for name, cursor in cursors.items():
            stream = self.stream(name)
            if stream is not None:
                found += stream.after(cursor, count)
        return found

    def trim(self, name: str, through: EntryId) -> None:
        """Delete all entries up to and including an id."""
        stream = self.stream(name)
        if stream is not None:
            stream.trim(through)

    def delete(self, name: str, entries: Sequence[EntryId]) -> None:
        """Delete single entries."""
        stream = self.stream(name)
        if stream is not None:
            for entry in entries:
                stream.delete(entry)

    def dead_letter(self, entry: Entry, error: str) -> None:
        """Keep an unreadable entry; the oldest go beyond the bound."""
        self.dead_letters.append((entry, error))
        stream = self.make_stream(names.DEAD_LETTER)
        self._append(names.DEAD_LETTER, stream, entry.data)
        del stream.entries[: -names.DEAD_LETTER_ENTRIES]

    def expire_stream(self, name: str, after_s: float) -> None:
        """Let a stream expire, if there is one."""
        stream = self.stream(name)
        if stream is not None:
            stream.expires_at = self.now_s() + after_s

    def remove_stream(self, name: str) -> None:
        """Remove a stream with all that it knew."""
        self._streams.pop(name, None)

    def _append(self, name: str, stream: _Stream, data: bytes) -> EntryId:
        entry = stream.append(name, data, int(self.now_s() * 1000))
        for news in self._waiting.get(name, ()):
            news.set()
        return entry

    # Readers that wait

    def wait_for(self, streams: Sequence[str], news: asyncio.Event) -> None:
        """Set the event at every entry that one of the streams gets."""
        for name in streams:
            self._waiting.setdefault(name, {})[news] = None

    def stop_waiting(self, streams: Sequence[str], news: asyncio.Event) -> None:
        """Forget about the event."""
        for name in streams:
            waiting = self._waiting[name]
            del waiting[news]
            if not waiting:
                del self._waiting[name]

    # Keys and sets

    def get(self, key: str) -> bytes | None:
        """Return a value that has not expired."""
        value = self._values.get(key)
        if value is not None and value.expires_at <= self.now_s():
            del self._values[key]
            return None
        return None if value is None else value.data

    def put(self, key: str, data: bytes, *, for_s: float = _FOR_EVER) -> None:
        """Store a value, for a time."""
        self._values[key] = _Value(data, self.now_s() + for_s)

    def remove(self, key: str) -> None:
        """Remove a value."""
        self._values.pop(key, None)

    def members(self, name: str) -> set[str]:
        """Return a set, to be changed in place."""
        return self._sets.setdefault(name, set())
