"""The waiting line: every request that is not running, in queue order. Who was preempted has its old place."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from shared.scheduling.request import Request

Place = tuple[tuple[int, int], str]


def place(request: Request) -> Place:
    """Return what the queue order sorts by (fcfs): arrival, and the id where two have the same."""
    return request.arrival, request.id


class WaitingLine:
    """Requests in queue order. Adding and removing move at most the whole line once in memory, never compare it all."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        insort(self._requests, request, key=place)

    def remove(self, request: Request) -> None:
        """Take a request out. Raises ValueError if it is not there."""
        index = bisect_left(self._requests, place(request), key=place)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"{request.id} does not wait")
        del self._requests[index]
