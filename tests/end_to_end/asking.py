"""Raw HTTP requests to a running `slipstream up`, and what an answer must look like whatever it says."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from shared.runtime.clock import monotonic
from tests.end_to_end.served import MODEL, url_of
from tests.integration.processes import Up

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Answer = tuple[int, Any, float]
"""Status, body, and the seconds that it took."""


@asynccontextmanager
async def session_of(up: Up, *, timeout_s: float = 60) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session that makes as many connections as it has requests."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(url_of(up), connector=connector, timeout=timeout) as session:
        yield session


async def post(session: aiohttp.ClientSession, path: str = COMPLETIONS, **fields: Any) -> Answer:
    """Return status, body and the seconds that it took."""
    began_s = monotonic()
    body = {"model": MODEL, **fields}
    async with session.post(path, json=body) as response:
        assert response.content_type == "application/json"
        if response.status in {429, 503}:
            assert float(response.headers["Retry-After"]) > 0
        return response.status, await response.json(), monotonic() - began_s


async def serves(session: aiohttp.ClientSession, within_s: float = 2.0) -> None:
    """Ask for four tokens. Raises AssertionError if they do not come in time."""
    status, answer, took_s = await post(session, prompt="hi", max_tokens=4, ignore_eos=True)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
    assert took_s < within_s


def stream(session: aiohttp.ClientSession, **fields: Any) -> Any:
    """Return the request for a stream that no end-of-turn token ends, to be entered."""
    return session.post(COMPLETIONS, json={"model": MODEL, "stream": True, "ignore_eos": True, **fields})


async def read_all(response: aiohttp.ClientResponse) -> list[str]:
    """Return the data of all events of a stream."""
    return [line.decode().removeprefix("data: ").strip() async for line in response.content if line.startswith(b"data")]
