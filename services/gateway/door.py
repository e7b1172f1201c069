"""How many requests a route takes in at a time. Who still brings his body is not among them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import Overloaded


class Inside:
    """Counts who is inside, and lets others wait until nobody is."""

    def __init__(self) -> None:
        self._count = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return self._count

    async def all_out(self) -> None:
        """Wait until nobody is inside. The caller bounds the wait."""
        await self._is_empty.wait()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one more."""
        self._count += 1
        self._is_empty.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._is_empty.set()


class Door:
    """Lets at most ``bound`` newcomers in at a time; the others are told at once."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._inside = Inside()

    async def all_out(self) -> None:
        """Wait until nobody is inside. The caller bounds the wait."""
        await self._inside.all_out()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Count a newcomer while it is inside. Raises Overloaded if there are as many as may be."""
        if len(self._inside) >= self._bound:
            raise Overloaded("too many requests at once: try again")
        with self._inside.one():
            yield
