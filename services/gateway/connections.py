"""Connections: what is no HTTP is told so in OpenAI's envelope too, and nobody takes for ever to say what he wants.

aiohttp answers in plain text whatever does not reach the application's middleware, and bounds only the time that a
connection is idle.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.streams import StreamReader

from services.gateway.errors import answer_to_http, answer_to_malformed, code_of_malformed
from services.gateway.heard import HEARD_S
from services.gateway.request_ids import HEADER, request_id_of
from services.gateway.turns import Turns
from shared.runtime.clock import monotonic

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a client may take of a connection, and who is told when it takes more."""

    headers_s: float = 30.0
    """For the headers of a request; after them the body has a bound of its own."""
    header_bytes: int = 8190
    send_s: float = 30.0
    """For taking the next piece of an answer."""
    on_refused: Callable[[str], None] = lambda _: None
    """Told the code of a refusal that no route knows of."""
    on_dropped: Callable[[], None] = lambda: None


class Connection(web.RequestHandler):
    """One connection of a client. Its headers are complete within ``headers_s`` seconds, or it is closed.

    They count from its opening, later from the first byte of the next request; between requests it may be idle.
    A request is read when its turn has come: until then its bytes wait as they came, and no more of them are taken.
    The rest of a body needs no turn, unless something before it waits for one: bytes never overtake each other.
    """

    def __init__(self, server: "Connections", *, bounds: Bounds, turns: Turns, **how: Any) -> None:
        super().__init__(server, max_line_size=bounds.header_bytes, max_field_size=bounds.header_bytes, **how)
        self._bounds = bounds
        self._turns = turns
        self._unheard = b""
        self.heard_s = 0.0
        """When bytes were last given to the parser."""
        self._deadline: asyncio.TimerHandle | None = None
        self._is_answering = False
        self._body: StreamReader | None = None
        """Of the request that a handler had last. It may still be coming when the answer has been given."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Begin to wait for the rest of a request if this is its first byte, and read what came in its turn."""
        if not data:  # aiohttp's own call, to go on with what its parser has: that came before what waits here
            super().data_received(data)
            return
        if not self._is_answering and (self._body is None or self._body.is_eof()):
            self._await_headers()
        if self._unheard:
            self._unheard += data
            self._transport.pause_reading()  # aiohttp resumes when its buffer is empty, and knows nothing of ours
        elif self._is_answering or self._turns.take():
            self._read(data)
        else:
            self._unheard = data
            self._transport.pause_reading()
            self._turns.wait(self._hear)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Wait for nothing any more. A time-out is the system's word that the client took nothing for too long."""
        self._stop_waiting()
        if isinstance(exc, TimeoutError):
            self._bounds.on_dropped()
        super().connection_lost(exc)

    def headers_came(self, body: StreamReader) -> None:
        """Note that a request is being answered: however long that takes, and however slowly its body comes."""
        self._is_answering = True
        self._body = body
        self._stop_waiting()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the end of an answer; a refusal by aiohttp itself becomes one of ours."""
        if isinstance(resp, web.HTTPException):
            resp = _with_id(request, answer_to_http(request, resp))
        bound = asyncio.timeout(self._bounds.send_s)
        try:
            async with bound:
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            if not bound.expired():
                raise
            self._drop(request)
            return resp, True
        finally:
            self._is_answering = False

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what aiohttp cannot read, or what went wrong outside the application, and close the connection."""
        super().handle_error(request, status, exc, message)  # logs it; raises if an answer has already begun
        if isinstance(exc, LineTooLong):
            status = web.HTTPRequestHeaderFieldsTooLarge.status_code
        self._bounds.on_refused(code_of_malformed(status))
        response = _with_id(request, answer_to_malformed(status, exc))
        response.force_close()
        return response

    @property
    def _transport(self) -> asyncio.Transport:
        assert self.transport is not None, "only an open connection brings data"  # noqa: S101 - a bug, not input
        return self.transport

    def _hear(self) -> None:
        """Read what has waited, unless the connection has been closed meanwhile."""
        unheard, self._unheard = self._unheard, b""
        if self.transport is None:
            return
        if not (self._reading_paused or self._buffer_paused):  # a handler that takes no more of a body now stays so
            self.transport.resume_reading()
        self._read(unheard)

    def _read(self, data: bytes) -> None:
        self.heard_s = monotonic()
        super().data_received(data)

    def _await_headers(self) -> None:
        if self._deadline is None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self._bounds.headers_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        log.info("http_refused", what="the headers did not arrive in time", waited_s=self._bounds.headers_s)
        self.force_close()

    def _drop(self, request: web.BaseRequest) -> None:
        """Cut off a client that does not take its answer: what is left of it is not kept for it."""
        log.info("client_lost", http_id=request_id_of(request), error="TimeoutError")
        self._bounds.on_dropped()
        if self.transport is not None:
            self.transport.abort()


class Connections(web.Server):
    """Makes the connections of an application out of the server that aiohttp has made for it."""

    def __init__(self, server: web.Server, *, bounds: Bounds, **how: Any) -> None:
        super().__init__(
            _noting_headers(server.request_handler),
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
        )
        self._bounds = bounds
        self._turns = Turns()
        self._how = how

    def __call__(self) -> web.RequestHandler:
        """Return the protocol of a new connection."""
        loop = asyncio.get_running_loop()
        return Connection(self, bounds=self._bounds, turns=self._turns, loop=loop, **self._how)


class Runner(web.AppRunner):
    """The runner of production: a client that leaves cancels its handler, which is off by default."""

    def __init__(self, app: web.Application, *, bounds: Bounds, shutdown_s: float, **how: Any) -> None:
        super().__init__(app, handler_cancellation=True, shutdown_timeout=shutdown_s)
        self._bounds = bounds
        self._how = how

    async def _make_server(self) -> web.Server:
        return Connections(await super()._make_server(), bounds=self._bounds, **self._how)


_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def _noting_headers(handler: _Handler) -> _Handler:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if isinstance(request.protocol, Connection):
            request[HEARD_S] = request.protocol.heard_s
            request.protocol.headers_came(request.content)
        return await handler(request)

    return handle


def _with_id(request: web.BaseRequest, response: web.Response) -> web.Response:
    """Put the request's id on an answer that the application does not know of."""
    response.headers[HEADER] = request_id_of(request)
    return response
