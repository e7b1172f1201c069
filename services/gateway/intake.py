"""Bodies of requests, read without harm: bounded in size, in time, in values, and in memory all together.

JSON is decoded under the interpreter's lock, and what that costs depends on the number of values rather than on the
length: 27 MB of text take 0.02 s, 27 MB of empty lists 4.6 s in which no stream would move and no question be answered.
So how many values a large body can have is looked at before, and large ones are decoded one at a time, in a thread:
between two of them everybody else has a turn.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from aiohttp import web

from shared.errors import BodyTooLarge, Overloaded

BODY_S = 60.0
"""What a client gets to bring a body."""
LARGE_BYTES = 64 * 1024
"""A body up to this is decoded at once: it takes less time than a thread does."""
MAX_VALUES = 1_000_000
"""What a body may hold of commas, lists and objects: about 0.2 s of decoding, and more than any model's context."""
BODIES_AT_ONCE = 8
"""Bodies of the largest size that are in memory at once; smaller ones may be more."""
_WINDOW_BYTES = 1024 * 1024

_T = TypeVar("_T")


class Intake:
    """Reads the bodies of all requests of one gateway."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.held_bytes = 0
        """What the bodies that are being read take now."""
        self._large = asyncio.Semaphore(1)

    async def read(self, request: web.Request, parse: Callable[[bytes], _T]) -> _T:
        """Return what ``parse`` makes of the body. Raises BodyTooLarge, Overloaded, HTTPRequestTimeout, as parse does.

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
            if len(data) <= LARGE_BYTES:
                return parse(data)
            async with self._large:
                return await asyncio.to_thread(_parse_large, data, parse)

    async def _receive(self, request: web.Request, count: Callable[[int], None]) -> bytes:
        data = bytearray()
        async for piece in request.content.iter_any():
            if len(data) + len(piece) > self.max_body_bytes:
                raise self._too_large()
            count(len(piece))
            data += piece
        return bytes(data)

    @contextmanager
    def _counted(self) -> Iterator[Callable[[int], None]]:
        """Count a body's bytes while it is held. What is handed out raises Overloaded when there is no memory left."""
        counted = 0

        def count(size: int) -> None:
            nonlocal counted
            if self.held_bytes + size > BODIES_AT_ONCE * self.max_body_bytes:
                raise Overloaded("too many large requests at once: try again")
            counted += size
            self.held_bytes += size

        try:
            yield count
        finally:
            self.held_bytes -= counted

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is too large: at most {self.max_body_bytes} bytes are read")


def _parse_large(data: bytes, parse: Callable[[bytes], _T]) -> _T:
    if not _has_at_most(data, MAX_VALUES):
        raise BodyTooLarge(f"the body has too many values: at most {MAX_VALUES} are read")
    return parse(data)


def _has_at_most(data: bytes, values: int) -> bool:
    """Say whether there can be so few values in a text of JSON; commas and brackets within strings count too."""
    found = 0
    for start in range(0, len(data), _WINDOW_BYTES):
        end = start + _WINDOW_BYTES
        found += data.count(b",", start, end) + data.count(b"[", start, end) + data.count(b"{", start, end)
        if found > values:
            return False
    return True
