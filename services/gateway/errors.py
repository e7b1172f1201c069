"""The one place that turns errors into HTTP: always OpenAI's envelope, never a traceback."""

import math
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from services.gateway.formats import ErrorBody, ErrorEnvelope, to_json
from services.gateway.heard import ms_since_heard
from services.gateway.metrics import Metrics
from services.gateway.request_ids import request_id_of
from shared.errors import BusUnavailable, GenerationFailed, InvalidKey, NotServing, RequestRejected, Unavailable

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

INTERNAL = "internal_error"
HEADERS_TOO_LARGE = "headers_too_large"
MAX_METHOD, MAX_PATH = 16, 200
_CODES = {404: "not_found", 405: "method_not_allowed", 408: "timeout", 413: "request_too_large"}

log = structlog.get_logger()


def envelope(error: Exception) -> ErrorEnvelope:
    """Return what a client is told of an error."""
    match error:
        case RequestRejected():
            return _envelope(str(error), "invalid_request_error", error.param, error.code)
        case Unavailable():
            kind = "rate_limit_error" if error.status == web.HTTPTooManyRequests.status_code else "server_error"
            return _envelope(str(error), kind, None, error.code)
        case GenerationFailed():
            return _envelope(str(error), "server_error", None, error.code)
        case _:
            return _envelope("internal error", "server_error", None, INTERNAL)


def answer_to(error: Exception) -> web.Response:
    """Return an error as an HTTP answer, for a response that has not begun."""
    headers = {}
    match error:
        case RequestRejected() | GenerationFailed():
            status = error.status
            if isinstance(error, InvalidKey):
                headers["WWW-Authenticate"] = "Bearer"
            if isinstance(error, GenerationFailed):
                headers["X-Should-Retry"] = "false"  # official clients would send what broke a step three times
        case Unavailable():
            status = error.status
            headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        case _:
            status = web.HTTPInternalServerError.status_code
    return _response(status, envelope(error), headers)


class Refusals:
    """Answers every error with the envelope, counts it, and logs it in one line."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    @property
    def middleware(self) -> Middleware:
        """Return what aiohttp calls before a route."""

        @web.middleware
        async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                return await handler(request)
            except Exception as error:  # noqa: BLE001 - this is where every error ends, and none is swallowed
                return self._answer(request, error)

        return errors_as_json

    def _answer(self, request: web.Request, error: Exception) -> web.Response:
        """Return the answer; what nobody expected is logged with its traceback."""
        code, response = _told(request, error)
        self._metrics.refused(code)
        where = {"method": request.method[:MAX_METHOD], "path": request.path[:MAX_PATH]}
        if code == INTERNAL:
            log.error("request_crashed", **where, exc_info=error)
        else:
            what = {"status": response.status, "code": code, "took_ms": ms_since_heard(request)}
            log.info("request_refused", **where, **what, http_id=request_id_of(request))
        return response


def _told(request: web.Request, error: Exception) -> tuple[str, web.Response]:
    match error:
        case RequestRejected() | Unavailable() | GenerationFailed():
            return error.code or "invalid_value", answer_to(error)
        case BusUnavailable():
            return NotServing.code, answer_to(NotServing("not serving: Redis does not answer"))
        case web.HTTPException():
            return _CODES.get(error.status, "http"), answer_to_http(request, error)
        case web.RequestPayloadError() | ConnectionResetError():
            told = _envelope(f"the body could not be read: {error}", "invalid_request_error", None, "malformed_request")
            return "malformed_request", _response(web.HTTPBadRequest.status_code, told)
        case _:
            return INTERNAL, answer_to(error)


def answer_to_http(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    """Return one of aiohttp's own refusals with the envelope."""
    messages = {
        404: f"there is nothing at {request.path[:MAX_PATH]}",
        405: f"{request.method} is not allowed at {request.path[:MAX_PATH]}",
        413: "the body is too large",
    }
    message = messages.get(error.status, error.reason)
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return _response(error.status, _envelope(message, "invalid_request_error", None, _CODES.get(error.status)), headers)


def code_of_malformed(status: int) -> str:
    """Return the code of the error that is told to who sent what is no HTTP."""
    if status >= web.HTTPInternalServerError.status_code:
        return INTERNAL
    is_too_large = status == web.HTTPRequestHeaderFieldsTooLarge.status_code
    return HEADERS_TOO_LARGE if is_too_large else "malformed_request"


def answer_to_malformed(status: int, error: BaseException | None) -> web.Response:
    """Return the answer to what is no HTTP, or to what went wrong before there was a request."""
    code = code_of_malformed(status)
    if code == INTERNAL:
        return _response(status, _envelope("internal error", "server_error", None, code))
    # not in aiohttp's words: they quote what was sent, and a key may stand in it
    message = f"this is no HTTP request that can be read: {type(error).__name__ if error else 'malformed'}"
    return _response(status, _envelope(message, "invalid_request_error", None, code))


def _envelope(message: str, kind: str, param: str | None, code: str | None) -> ErrorEnvelope:
    return ErrorEnvelope(ErrorBody(message, kind, param, code))


def _response(status: int, body: ErrorEnvelope, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=to_json(body), content_type="application/json", headers=headers)
