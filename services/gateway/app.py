"""The HTTP application: its routes, and how it listens."""

import errno
import logging
import socket

import structlog
from aiohttp import web
from prometheus_client.aiohttp import make_aiohttp_handler

from services.gateway.bodies import ChatBody, CompletionBody
from services.gateway.connections import Runner
from services.gateway.desk import Desk
from services.gateway.errors import errors_as_json
from services.gateway.formats import ChatFormat, CompletionFormat, Model, ModelList, Ready, to_json
from services.gateway.generate import Generation
from services.gateway.request_ids import add_request_id
from shared.errors import StartupError, UnknownModel

log = structlog.get_logger()

MAX_BODY_BYTES = 8 * 1024 * 1024
HEADERS_S = 30.0
"""What a client gets to bring the headers of a request; after them the body has a bound of its own."""
SHUTDOWN_S = 2.0
"""What handlers get to write their last event once their answers are over."""


class Facts:
    """The routes that only tell what is so."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def health(self, request: web.Request) -> web.Response:  # noqa: ARG002 - the signature of a handler
        """Say that this process is alive."""
        return _json(b'{"status":"ok"}')

    async def ready(self, request: web.Request) -> web.Response:  # noqa: ARG002 - the signature of a handler
        """Say whether a request would be served now; from memory, so that load never delays it."""
        why = self._desk.pool.why_not_serving(self._desk.clock())
        return _json(to_json(Ready(ready=why is None, reason=why)), status=200 if why is None else 503)

    async def models(self, request: web.Request) -> web.Response:  # noqa: ARG002 - the signature of a handler
        """List the one model of this pool."""
        return _json(to_json(ModelList([self._model()])))

    async def model(self, request: web.Request) -> web.Response:
        """Describe one model."""
        name = request.match_info["name"]
        if name != self._desk.model:
            raise UnknownModel(f"the model {name[:256]!r} does not exist here", param="model")
        return _json(to_json(self._model()))

    def _model(self) -> Model:
        desk = self._desk
        return Model(desk.model, desk.created, desk.model, desk.pool.length_served or None)


def make_app(desk: Desk) -> web.Application:
    """Return the application with all routes."""
    facts = Facts(desk)
    app = web.Application(middlewares=[errors_as_json], client_max_size=MAX_BODY_BYTES)
    app.on_response_prepare.append(add_request_id)
    app.add_routes(
        [
            web.post("/v1/chat/completions", Generation(desk, ChatBody, ChatFormat(), "chatcmpl").handle),
            web.post("/v1/completions", Generation(desk, CompletionBody, CompletionFormat(), "cmpl").handle),
            web.get("/v1/models", facts.models),
            web.get("/v1/models/{name:.+}", facts.model),
            web.get("/health", facts.health),
            web.get("/ready", facts.ready),
            web.get("/metrics", make_aiohttp_handler(desk.metrics.registry)),
        ]
    )
    return app


def make_runner(app: web.Application, *, headers_s: float = HEADERS_S) -> web.AppRunner:
    """Return the runner of production."""
    return Runner(app, headers_s=headers_s, shutdown_s=SHUTDOWN_S, access_log=None, logger=_server_logger())


class _OneLine(logging.Handler):
    """What aiohttp says of a connection, as one event: it would write a traceback for every malformed request."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log the record."""
        error = record.exc_info[1] if record.exc_info else None
        log.info("http_refused", what=record.getMessage(), error=repr(error)[:200])


def _server_logger() -> logging.Logger:
    logger = logging.Logger("aiohttp.server")  # noqa: LOG001 - ours alone: the shared one has handlers of others
    logger.addHandler(_OneLine())
    return logger


async def listen(runner: web.AppRunner, host: str, port: int) -> int:
    """Listen and return the port. Raises StartupError with one sentence for the person who started this."""
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(f"port {port} on {host} is already taken") from error
        if isinstance(error, socket.gaierror) or error.errno in {errno.EADDRNOTAVAIL, errno.EACCES}:
            raise StartupError(f"cannot listen on port {port} of {host}: {error.strerror or error}") from error
        raise
    bound: int = runner.addresses[0][1]
    return bound


def _json(body: bytes, *, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")
