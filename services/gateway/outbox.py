"""What is still to be written to ``requests``, in order."""

import asyncio
from dataclasses import dataclass

from shared.ids import RequestId


@dataclass(frozen=True, slots=True)
class Submit:
    """Write the present attempt of a request: the message is made when it is written, so it is never out of date.

    Its siblings are written with it, all or none.
    """

    request: RequestId
    siblings: tuple[RequestId, ...] = ()

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """Everyone who is written."""
        return (self.request, *self.siblings)


@dataclass(frozen=True, slots=True)
class Cancel:
    """End an attempt and all below it."""

    request: RequestId
    attempt: int

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """Whose attempt is ended."""
        return (self.request,)


Order = Submit | Cancel


class Outbox:
    """An ordered set. Bounded by the requests there are: one submission and one cancellation of each."""

    def __init__(self) -> None:
        self._orders: dict[tuple[type, RequestId], Order] = {}
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._orders)

    def submit(self, request: RequestId, *siblings: RequestId) -> None:
        """Write the present attempt of a request, once, and that of its siblings in the same write."""
        self._orders.setdefault((Submit, request), Submit(request, siblings))
        self._filled.set()

    def cancel(self, request: RequestId, attempt: int) -> None:
        """Cancel an attempt; a submission that still waits here goes."""
        self._orders.pop((Submit, request), None)
        self._orders[(Cancel, request)] = Cancel(request, attempt)
        self._filled.set()

    def forget(self, request: RequestId) -> None:
        """Take back a submission that waits here, if there is one."""
        self._orders.pop((Submit, request), None)

    def submissions(self) -> tuple[RequestId, ...]:
        """Return the requests whose submission waits here."""
        orders = (order for order in self._orders.values() if isinstance(order, Submit))
        return tuple(request for order in orders for request in order.requests)

    async def take(self) -> Order:
        """Wait for an order and remove the oldest."""
        while not self._orders:
            self._filled.clear()
            await self._filled.wait()
        return self._orders.pop(next(iter(self._orders)))

    def put_back(self, order: Order) -> None:
        """Make an order the first again that could not be carried out, unless a newer one has taken its place."""
        key = (type(order), order.request)
        if key not in self._orders:
            self._orders = {key: order, **self._orders}
            self._filled.set()
