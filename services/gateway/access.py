"""Who gets in: what is open to everybody, whose request it is, and how much each client may have under way."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from aiohttp import web
from aiohttp.typedefs import Middleware

from services.gateway.errors import Handler
from services.gateway.keys import KeyRing
from services.gateway.tenants import Tenant
from shared.errors import KeyLimited

ALWAYS_OPEN = frozenset({"/health", "/ready"})
"""What tells whoever runs this that it lives must not need a key."""

_TENANT = web.RequestKey("tenant", Tenant)


def tenant_at(request: web.Request) -> Tenant:
    """Return whose request it is. The access middleware has looked."""
    return request[_TENANT]


class Access:
    """Asks for a key on every path but the open ones, also on those that do not exist."""

    def __init__(self, keys: KeyRing, open_paths: frozenset[str]) -> None:
        self._keys = keys
        self.open_paths = ALWAYS_OPEN | open_paths

    @property
    def middleware(self) -> Middleware:
        """Return what aiohttp calls before a route."""

        @web.middleware
        async def ask_for_key(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.path not in self.open_paths:
                request[_TENANT] = self._keys.tenant(request.headers.get("Authorization"))
            return await handler(request)

        return ask_for_key


class Turnstile:
    """Counts the requests that each client has under way, streamed or not."""

    def __init__(self) -> None:
        self.under_way = 0
        self._of: Counter[str] = Counter()

    def enter(self, tenant: Tenant) -> AbstractContextManager[None]:
        """Return what counts a request while it is under way. Raises KeyLimited if its client has as many as it may."""
        if tenant.max_streams is not None and self._of[tenant.name] >= tenant.max_streams:
            raise KeyLimited(f"{tenant.max_streams} requests of this key are under way, as many as it may have")
        return self._counted(tenant)

    @contextmanager
    def _counted(self, tenant: Tenant) -> Iterator[None]:
        self._of[tenant.name] += 1
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            self._of[tenant.name] -= 1
            if not self._of[tenant.name]:
                del self._of[tenant.name]
