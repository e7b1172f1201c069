"""Server-sent events: one constructor call, one way to write an event, one to end."""

from aiohttp_sse import EventSourceResponse


class EventStream:
    """The response of a stream. Its status line goes out when it is prepared.

    Whoever takes nothing for ``send_timeout_s`` is dropped; until then its text waits in one piece, not in a queue.
    """

    def __init__(self, *, send_timeout_s: float) -> None:
        # sep: clients written by hand split on a bare newline; allow_all_methods: POST is refused by default
        self.response = EventSourceResponse(sep="\n", allow_all_methods=True, send_timeout=send_timeout_s)

    async def send(self, *events: bytes) -> None:
        """Write events. Raises ConnectionError or TimeoutError when the client is gone or takes nothing."""
        for event in events:
            await self.response.send(event.decode())

    async def done(self) -> None:
        """Write the end mark."""
        await self.response.send("[DONE]")
