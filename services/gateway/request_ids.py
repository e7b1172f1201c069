"""The id under which a client finds its request again: its own header, or one of ours."""

import secrets

from aiohttp import web

HEADER = "X-Request-Id"
MAX_CHARACTERS = 128

_KEY = web.RequestKey("http_id", str)


def request_id_of(request: web.BaseRequest) -> str:
    """Return the id of a request: the client's, cut, if it can be repeated in a header as it is, else a new one."""
    known: str | None = request.get(_KEY)
    if known is not None:
        return known
    given = request.headers.get(HEADER, "")[:MAX_CHARACTERS]
    chosen = given if given and given.isascii() and given.isprintable() else f"req-{secrets.token_hex(12)}"
    request[_KEY] = chosen
    return chosen


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Put the id on every answer, streams included."""
    response.headers[HEADER] = request_id_of(request)
