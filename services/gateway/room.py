"""Whether the waiting line has room for one more: found out before anything is done for who finds none.

What a request costs before it is in line (its body, its tokens, its submission) is a multiple of what it costs to
refuse it, and in a flood nearly all are refused. The bound itself is kept where the line is: a submission that does not
fit is not written, whatever was found here. That happens only if several gateways, or several answers to one request,
fill the last places.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.gateway.door import Inside
from shared.errors import BusUnavailable, Overloaded


@dataclass(frozen=True, slots=True)
class Counts:
    """What a gateway knows of its own newcomers, beside those who are passing."""

    unwritten: Callable[[], int]
    """Have passed, and are not in the line yet."""
    without_token: Callable[[], int]
    """The same, and those who are in the line, or have left it and wait for their first token."""


@dataclass(frozen=True, slots=True)
class _Question:
    """Of one who came: whether there is room, and how many places it takes if there is."""

    answer: asyncio.Future[bool]
    places: int


class Room:
    """Refuses a newcomer only if at some moment after it came the line, with those on their way, filled the bound.

    That is certain if those on their way alone fill it, and certainly not so while all who have no token do not. In
    between the line is asked how long it is, once for all who came since the last question.
    """

    def __init__(self, bound: int, length: Callable[[], Awaitable[int]], counts: Counts) -> None:
        self._bound = bound
        self._length = length
        """Returns the length of the line at a moment when nothing is being written; or raises BusUnavailable."""
        self._counts = counts
        self._passing = 0
        self._inside = Inside()
        """Who passes, or asks for a place to do so."""
        self._asking: list[_Question] = []
        """At most one of each connection: it brings its next request when this one has been answered."""
        self._is_asked = asyncio.Event()

    async def check(self) -> None:
        """Raise Overloaded if one who came now would be refused, or BusUnavailable. No place is kept for it."""
        await self._find(places=0)

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Count a newcomer while it is decoded and tokenised. Raises Overloaded before that, or BusUnavailable.

        Nobody should pass who waits for a client: a few that never send what they have announced would fill the line.
        """
        with self._inside.one():
            await self._find(places=1)
            try:
                yield
            finally:
                self._passing -= 1

    async def all_out(self) -> None:
        """Wait until nobody passes. The caller bounds the wait."""
        await self._inside.all_out()

    async def run(self) -> None:
        """Ask until cancelled, one question at a time."""
        while True:
            await self._is_asked.wait()
            self._is_asked.clear()
            asking, self._asking = self._asking, []
            try:
                length = await self._length()
            except BusUnavailable as error:
                for one in _still(asking):
                    one.answer.set_exception(BusUnavailable(*error.args))
                continue
            for one in _still(asking):
                has_room = length + self._on_the_way < self._bound
                self._passing += one.places if has_room else 0  # at once: the next of them must know
                one.answer.set_result(has_room)

    @property
    def _on_the_way(self) -> int:
        return self._passing + self._counts.unwritten()

    async def _find(self, places: int) -> None:
        """Take so many places; with none, only see whether there is one."""
        if self._on_the_way >= self._bound:
            raise Overloaded("too many requests at once: try again")
        if self._passing + self._counts.without_token() < self._bound:
            self._passing += places
        elif not await self._ask(places):
            raise Overloaded("the waiting line is full: try again")

    async def _ask(self, places: int) -> bool:
        """Return whether a place was found; then so many are taken. As long as the question may take, this may."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asking.append(_Question(answer, places))
        self._is_asked.set()
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._passing -= places if answer.result() else 0
            raise


def _still(asking: list[_Question]) -> list[_Question]:
    """Return those who still want to know: a client may have left meanwhile."""
    return [one for one in asking if not one.answer.done()]
