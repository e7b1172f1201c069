"""A running `slipstream up` as clients see it: the official client, raw HTTP, and the gateway's own figures."""

import asyncio
import re
from collections.abc import Callable

import aiohttp
from openai import AsyncOpenAI, OpenAI

from tests.integration.processes import Up

MODEL = "m"
FAKE = ("--executor", "fake", "--served-model-name", MODEL)
WITHIN_S = 30.0
_POLL_S = 0.05


def url_of(up: Up) -> str:
    """Return the base URL of the gateway."""
    host, port = up.address
    return f"http://{host}:{port}"


def client_of(up: Up) -> AsyncOpenAI:
    """Return the official client, which must not hide a failure by trying again."""
    return AsyncOpenAI(base_url=f"{url_of(up)}/v1", api_key="none", max_retries=0, timeout=120)


def blocking_client_of(up: Up) -> OpenAI:
    """Return the same without asyncio."""
    return OpenAI(base_url=f"{url_of(up)}/v1", api_key="none", max_retries=0, timeout=120)


async def figures(up: Up) -> dict[str, float]:
    """Return the gateway's metrics by name, labels included."""
    async with aiohttp.ClientSession() as session, session.get(f"{url_of(up)}/metrics") as response:
        text = await response.text()
    return {name: float(value) for name, value in re.findall(r"^(slipstream_\S+) (\S+)$", text, re.MULTILINE)}


async def eventually(holds: Callable[[dict[str, float]], bool], up: Up) -> dict[str, float]:
    """Ask for the figures until they are as they should be. Raises AssertionError with the last ones after 30 s."""
    found: dict[str, float] = {}
    for _ in range(int(WITHIN_S / _POLL_S)):
        found = await figures(up)
        if holds(found):
            return found
        await asyncio.sleep(_POLL_S)
    raise AssertionError(f"never so: {found}")


def nothing_is_left(found: dict[str, float]) -> bool:
    """Return whether nothing runs, nothing waits, and no request holds a block."""
    names = ("slipstream_requests_running", "slipstream_requests_waiting", "slipstream_kv_blocks_used")
    return all(found[name] == 0 for name in names)
