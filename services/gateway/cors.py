"""Pages of other origins, in browsers: refused by the browser unless their origin is named here."""

import re

from aiohttp import web
from aiohttp.typedefs import Middleware

from services.gateway.errors import Handler

ANY = "*"
MAX_AGE_S = 600
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")
_EXPOSED = "X-Request-Id, Retry-After"


class Cors:
    """Tells browsers which pages may read the answers. Keys are asked for all the same: cookies count for nothing."""

    def __init__(self, origins: frozenset[str]) -> None:
        self._origins = origins

    @property
    def middleware(self) -> Middleware:
        """Return what answers a browser that asks first: such a question carries no key."""

        @web.middleware
        async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            is_question = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
            if is_question and self._allowed(request) is not None:
                return web.Response(status=204, headers=_permissions(request))
            return await handler(request)

        return answer_preflight

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Say on every answer, errors and streams included, whether the page that asked may read it."""
        if not self._origins:
            return
        if ANY not in self._origins:
            response.headers.add("Vary", "Origin")
        origin = self._allowed(request)
        if origin is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    def _allowed(self, request: web.Request) -> str | None:
        origin = request.headers.get("Origin")
        if origin is None:
            return None
        return ANY if ANY in self._origins else origin if origin in self._origins else None


def _permissions(request: web.Request) -> dict[str, str]:
    permissions = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": str(MAX_AGE_S)}
    asked = request.headers.get("Access-Control-Request-Headers", "")
    if _HEADER_NAMES.fullmatch(asked):  # "*" would not cover Authorization, and clients send headers of their own
        permissions["Access-Control-Allow-Headers"] = asked
    return permissions
