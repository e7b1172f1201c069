"""The HTTP application: its routes, who gets in, and how it listens."""

import asyncio
import errno
import logging
import socket
from dataclasses import dataclass

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client.aiohttp import make_aiohttp_handler

from services.gateway.access import Access, Turnstile, tenant_at
from services.gateway.bodies import ChatBody, CompletionBody
from services.gateway.connections import Bounds, Runner
from services.gateway.cors import Cors
from services.gateway.desk import Desk
from services.gateway.errors import Handler, Refusals
from services.gateway.facts import Facts, json_response
from services.gateway.formats import ChatFormat, CompletionFormat
from services.gateway.generate import Generation
from services.gateway.keys import KeyRing
from services.gateway.openapi import document
from services.gateway.request_ids import add_request_id
from services.gateway.token_routes import TokenRoutes
from shared.errors import KeyLimited, StartupError

log = structlog.get_logger()

SHUTDOWN_S = 2.0
"""What handlers get to write their last event once their answers are over."""
BACKLOG = 2048
"""Connections that may wait to be accepted, as far as the system lets them (``net.core.somaxconn``).

Beyond it the system drops what a newcomer sends: he tries again after a second, or is reset. aiohttp's 128 is less than
what comes at once when a crowd of clients starts.
"""
ACCEPTED_AT_ONCE = 8
"""Connections that are accepted in one iteration of the loop. asyncio takes up to ``backlog`` of them in one go."""
MAY_BE_OPENED = frozenset({"/metrics", "/openapi.json", "/v1/models"})


@dataclass(frozen=True, slots=True)
class Entrance:
    """Whom an application lets in, and from where."""

    keys: KeyRing
    open_paths: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        closed = sorted(self.open_paths - MAY_BE_OPENED)
        if closed:
            raise StartupError(f"--open-paths: {closed[0]} cannot be opened: only {', '.join(sorted(MAY_BE_OPENED))}")


def make_app(desk: Desk, entrance: Entrance) -> web.Application:
    """Return the application with all routes."""
    cors, access = Cors(entrance.origins), Access(entrance.keys, entrance.open_paths)
    app = web.Application(
        middlewares=[cors.middleware, Refusals(desk.metrics).middleware, access.middleware],
        client_max_size=desk.intake.max_body_bytes,
    )
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(cors.add_headers)
    facts, tokens, gate = Facts(desk), TokenRoutes(desk), _Gate(desk)
    openapi = document(None if entrance.keys.is_open else access.open_paths)

    async def tell_openapi(_: web.Request) -> web.Response:
        return json_response(openapi)

    app.add_routes(
        [
            web.post("/v1/chat/completions", gate.of(Generation(desk, ChatBody, ChatFormat(), "chatcmpl").handle)),
            web.post("/v1/completions", gate.of(Generation(desk, CompletionBody, CompletionFormat(), "cmpl").handle)),
            web.post("/tokenize", tokens.tokenize),
            web.post("/detokenize", tokens.detokenize),
            web.get("/v1/models", facts.models),
            web.get("/v1/models/{name:.+}", facts.model),
            web.get("/health", facts.health),
            web.get("/ready", facts.ready),
            web.get("/metrics", make_aiohttp_handler(desk.metrics.registry)),
            web.get("/openapi.json", tell_openapi),
        ]
    )
    return app


class _Gate:
    """Lets a client's request pass to a route that generates while it has fewer under way than it may."""

    def __init__(self, desk: Desk) -> None:
        self._metrics = desk.metrics
        self._turnstile = Turnstile()
        desk.metrics.show("http_requests_open", "Requests under way here.", lambda: self._turnstile.under_way)

    def of(self, route: Handler) -> Handler:
        async def pass_through(request: web.Request) -> web.StreamResponse:
            try:
                passing = self._turnstile.enter(tenant_at(request))
            except KeyLimited:
                self._metrics.finished("rejected")
                raise
            with passing:
                return await route(request)

        return pass_through


def make_runner(app: web.Application, bounds: Bounds) -> web.AppRunner:
    """Return the runner of production."""
    return Runner(app, bounds=bounds, shutdown_s=SHUTDOWN_S, access_log=None, logger=_server_logger())


class _OneLine(logging.Handler):
    """What aiohttp says of a connection, as one event: it would write a traceback for every malformed request.

    Of such a request only the kind of its fault is kept: aiohttp quotes the line, and a key may stand in it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Log the record."""
        error = record.exc_info[1] if record.exc_info else None
        told = type(error).__name__ if isinstance(error, HttpProcessingError) else repr(error)[:200]
        log.info("http_refused", what=record.getMessage(), error=told)


def _server_logger() -> logging.Logger:
    logger = logging.Logger("aiohttp.server")  # noqa: LOG001 - ours alone: the shared one has handlers of others
    logger.addHandler(_OneLine())
    return logger


class _Site(web.TCPSite):
    """Accepts ``backlog`` connections at a time and lets `BACKLOG` of them wait: to asyncio it is one figure."""

    async def start(self) -> None:
        """Listen, then ask the system again to listen on the same sockets, to let `BACKLOG` wait and not ``backlog``.

        asyncio gives its one figure to the system too, so 8 would be let wait. What is listened on already only gets
        the new length; the socket is doubled for it because what asyncio shows of its own has no ``listen``.
        """
        await super().start()
        assert isinstance(self._server, asyncio.Server)  # noqa: S101 - what create_server has just returned
        for listening in self._server.sockets:
            with listening.dup() as same:
                same.listen(BACKLOG)


async def listen(runner: web.AppRunner, host: str, port: int) -> int:
    """Listen and return the port. Raises StartupError with one sentence for the person who started this."""
    try:
        await _Site(runner, host, port, backlog=ACCEPTED_AT_ONCE).start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(f"port {port} on {host} is already taken") from error
        if isinstance(error, socket.gaierror) or error.errno in {errno.EADDRNOTAVAIL, errno.EACCES}:
            raise StartupError(f"cannot listen on port {port} of {host}: {error.strerror or error}") from error
        raise
    bound: int = runner.addresses[0][1]
    return bound
