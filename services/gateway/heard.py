"""When a request was read, for those who say how long its answer took."""

from aiohttp import web

from shared.runtime.clock import monotonic

HEARD_S = web.RequestKey("heard_s", float)


def ms_since_heard(request: web.BaseRequest) -> float | None:
    """Return the milliseconds since a request was read, its headers whole; None outside of our own connections."""
    heard_s: float | None = request.get(HEARD_S)
    return None if heard_s is None else round((monotonic() - heard_s) * 1000, 3)
