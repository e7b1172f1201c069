"""The one place that turns errors into HTTP: always OpenAI's envelope, never a traceback."""

import math
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from services.gateway.formats import ErrorBody, ErrorEnvelope, to_json
from shared.errors import BusUnavailable, GenerationFailed, NotServing, RequestRejected, Unavailable

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

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
            return _envelope("internal error", "server_error", None, "internal_error")


def answer_to(error: Exception) -> web.Response:
    """Return an error as an HTTP answer, for a response that has not begun."""
    headers = {}
    match error:
        case RequestRejected() | GenerationFailed():
            status = error.status
        case Unavailable():
            status = error.status
            headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        case _:
            status = web.HTTPInternalServerError.status_code
    return _response(status, envelope(error), headers)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error with the envelope; what nobody expected is logged, once, with its traceback."""
    try:
        return await handler(request)
    except (RequestRejected, Unavailable, GenerationFailed) as error:
        return answer_to(error)
    except BusUnavailable as error:
        return answer_to(NotServing(str(error)))
    except web.HTTPException as error:
        return answer_to_http(request, error)
    except (web.RequestPayloadError, ConnectionResetError) as error:
        return _response(400, _envelope(f"the body could not be read: {error}", "invalid_request_error", None, None))
    except Exception as error:
        log.exception("request_crashed", method=request.method, path=request.path)
        return answer_to(error)


def answer_to_http(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    """Return one of aiohttp's own refusals with the envelope."""
    messages = {
        404: f"there is nothing at {request.path[:200]}",
        405: f"{request.method} is not allowed at {request.path[:200]}",
        413: "the body is too large",
    }
    message = messages.get(error.status, error.reason)
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return _response(error.status, _envelope(message, "invalid_request_error", None, _CODES.get(error.status)), headers)


def answer_to_malformed(status: int, what: str | None) -> web.Response:
    """Return the answer to what is no HTTP, or to what went wrong before there was a request."""
    if status >= web.HTTPInternalServerError.status_code:
        return _response(status, _envelope("internal error", "server_error", None, "internal_error"))
    first_line = (what or "").partition("\n")[0].rstrip(" :.")[:200]
    message = f"this is no HTTP request that can be read: {first_line or 'malformed'}"
    return _response(status, _envelope(message, "invalid_request_error", None, "malformed_request"))


def _envelope(message: str, kind: str, param: str | None, code: str | None) -> ErrorEnvelope:
    return ErrorEnvelope(ErrorBody(message, kind, param, code))


def _response(status: int, body: ErrorEnvelope, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=to_json(body), content_type="application/json", headers=headers)
