"""Bodies of requests, read without harm: bounded in size, in time, in values, and in memory all together.

JSON is decoded under the interpreter's lock, and what that costs depends on the number of values rather than on the
length: 27 MB of text take 0.02 s, 27 MB of empty lists 4.6 s in which no stream would move and no question be answered.
An object costs as much as many numbers, and memory that is touched for the first time can cost more than both: 27 MB
of it took 0.3 s on a machine whose host takes back what a guest leaves idle. So a body is not copied, how many values
a large one can have is looked at before, and large ones are decoded one at a time, in a thread: between two of them
everybody else has a turn.

Whoever brings a body slowly takes nothing that others need: no place in line, and of the memory for large bodies only
what it has brought of one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from aiohttp import web

from shared.errors import BodyTooLarge, Overloaded
from shared.runtime.threads import Threads

BODY_S = 60.0
"""What a client gets to bring a body."""
LARGE_BYTES = 64 * 1024
"""A body up to this is decoded at once, in less time than a thread takes, and there is always memory for it: aiohttp
lets every connection keep twice as much."""
MAX_VALUES = 1_000_000
"""What a body may hold of commas, lists and objects: about 0.1 s of decoding, and more than any model's context."""
OBJECT_VALUES = 8
"""What an object counts for: 330,000 messages took 90 MB and, where that was dear, 0.6 s in one go."""
BODIES_AT_ONCE = 8
"""Bodies of the largest size that are in memory at once; smaller ones may be more."""
_WINDOW_BYTES = 1024 * 1024

_T = TypeVar("_T")


class Intake:
    """Reads the bodies of all requests of one gateway."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.held_bytes = 0
        """What the bodies that are here now take, beyond what each may take in any case."""
        self._most_held_bytes = BODIES_AT_ONCE * max(0, max_body_bytes - LARGE_BYTES)
        self._large = Threads(1, "large-body")
        """One at a time, also when a client leaves: the thread is taken until it has really ended."""

    @asynccontextmanager
    async def received(self, request: web.Request) -> AsyncIterator[bytearray]:
        """Receive a body, and count it until this is left. Raises BodyTooLarge, Overloaded, HTTPRequestTimeout.

        A length that is announced is refused before anything is read.
        """
        if (request.content_length or 0) > self.max_body_bytes:
            raise self._too_large()
        with self._counted() as count:
            try:
                async with asyncio.timeout(BODY_S):
                    data = await self._receive(request, count)
            except TimeoutError:
                raise web.HTTPRequestTimeout(reason="the body did not arrive in time") from None
            yield data

    async def decoded(self, data: bytearray, parse: Callable[[bytearray], _T]) -> _T:
        """Return what ``parse`` makes of a body. Raises BodyTooLarge if it has too many values, and what parse does."""
        if len(data) <= LARGE_BYTES:
            return parse(data)
        return await asyncio.get_running_loop().run_in_executor(self._large, _parse_large, data, parse)

    async def _receive(self, request: web.Request, count: Callable[[int], None]) -> bytearray:
        data = bytearray()
        async for piece in request.content.iter_any():
            if len(data) + len(piece) > self.max_body_bytes:
                raise self._too_large()
            count(len(data) + len(piece))
            data += piece
        return data

    @contextmanager
    def _counted(self) -> Iterator[Callable[[int], None]]:
        """Count a body while it is here. What is handed out takes its length; raises Overloaded if there is no room."""
        counted = 0

        def count(length: int) -> None:
            nonlocal counted
            more = max(0, length - LARGE_BYTES) - counted
            if self.held_bytes + more > self._most_held_bytes:
                raise Overloaded("too many large requests at once: try again")
            counted += more
            self.held_bytes += more

        try:
            yield count
        finally:
            self.held_bytes -= counted

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is too large: at most {self.max_body_bytes} bytes are read")


def _parse_large(data: bytearray, parse: Callable[[bytearray], _T]) -> _T:
    if not _has_at_most(data, MAX_VALUES):
        raise BodyTooLarge(f"the body has too many values: at most {MAX_VALUES} are read")
    return parse(data)


def _has_at_most(data: bytearray, values: int) -> bool:
    """Say whether there can be so few values in a text of JSON; commas and brackets within strings count too."""
    found = 0
    for start in range(0, len(data), _WINDOW_BYTES):
        end = start + _WINDOW_BYTES
        found += data.count(b",", start, end) + data.count(b"[", start, end)
        found += OBJECT_VALUES * data.count(b"{", start, end)
        if found > values:
            return False
    return True
