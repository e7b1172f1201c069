"""How many requests a route takes in at a time. Who still brings his body is not among them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import Overloaded


class Door:
    """Lets at most ``bound`` newcomers in at a time; the others are told at once."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._passing = 0
        self._nobody_passes = asyncio.Event()
        self._nobody_passes.set()

    async def all_out(self) -> None:
        """Wait until nobody is inside. The caller bounds the wait."""
        await self._nobody_passes.wait()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Count a newcomer while it is inside. Raises Overloaded if there are as many as may be."""
        if self._passing >= self._bound:
            raise Overloaded("too many requests at once: try again")
        self._passing += 1
        self._nobody_passes.clear()
        try:
            yield
        finally:
            self._passing -= 1
            if not self._passing:
                self._nobody_passes.set()
