"""Who is heard when many speak at once: a few connections at a time, and between them everything else has its turn.

The loop calls whatever is ready before it looks again. Eight hundred requests that came at once kept it for 170 ms of
processor time in one go, in which no stream moved; so it is given few of them between two looks.
"""

import asyncio
from collections import deque
from collections.abc import Callable

HEARD_AT_ONCE = 4
"""Connections that are heard in one iteration of the loop: about 1.5 ms. A token passes through some six of them."""


class Turns:
    """Lets at most ``at_once`` through in one iteration of the running loop; whoever comes alone is never kept."""

    def __init__(self, at_once: int = HEARD_AT_ONCE) -> None:
        self._at_once = at_once
        self._taken = 0
        self._waiting: deque[Callable[[], None]] = deque()
        """At most one of each connection."""

    def take(self) -> bool:
        """Take a turn now; False if this iteration has none left, or others wait for theirs."""
        if self._waiting or self._taken == self._at_once:
            return False
        self._count()
        return True

    def wait(self, hear: Callable[[], None]) -> None:
        """Call this when its turn has come, in order. Only for whom `take` has told no."""
        self._waiting.append(hear)

    def _count(self) -> None:
        if not self._taken:
            asyncio.get_running_loop().call_soon(self._next)
        self._taken += 1

    def _next(self) -> None:
        """Begin an iteration; it has been counted before anybody is called, so that an error ends only one turn."""
        self._taken = 0
        for _ in range(min(self._at_once, len(self._waiting))):
            self._count()
            self._waiting.popleft()()
