"""Orders in which the place of a request never changes: by arrival, and by urgency."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence

from shared.scheduling.orders.port import Place
from shared.scheduling.request import Request

AGING_MS = 30_000
"""A request that has waited this long stands where one that is more urgent by one would stand if it came now."""


def by_arrival(request: Request) -> Place:
    """Order ``fcfs``: first come, first served."""
    return 0.0, request.arrival, request.id


def by_urgency(request: Request) -> Place:
    """Order ``priority``: the more urgent first, ties by arrival, and nobody waits for ever.

    Urgency grows with the time spent waiting. At any moment one who came at ``a`` with priority ``p`` has waited
    ``now - a``, so ``p - (now - a) / AGING`` sorts like ``p * AGING + a``: the place is fixed, and a request is only
    ever overtaken by those that come within ``AGING`` for each step of priority between them.
    """
    milliseconds, sequence = request.arrival
    return float(request.priority * AGING_MS + milliseconds), (milliseconds, sequence), request.id


class Fixed:
    """A sorted list. Adding and removing move at most the whole line once in memory, and never compare it all."""

    def __init__(self, place: Callable[[Request], Place], *, takes_places: bool = False) -> None:
        self.place = place
        self.takes_places = takes_places
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.copy())

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        insort(self._requests, request, key=self.place)

    def remove(self, request: Request) -> None:
        """Take a request out. Raises ValueError if it is not there."""
        index = bisect_left(self._requests, self.place(request), key=self.place)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"{request.id} does not wait")
        del self._requests[index]

    def sort(self, running: list[Request]) -> None:
        """Do nothing: who was put in its place is still there."""

    def charge_prompt(self, request: Request, tokens: int, *, overtakes: bool) -> None:
        """Do nothing: what a request costs does not move it."""

    def charge_output(self, requests: Sequence[Request]) -> None:
        """Do nothing."""
