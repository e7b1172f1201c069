"""What must be known of a server before load is sent to it."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

_PATIENCE_S = 10.0


class CannotStart(Exception):
    """The run cannot begin; the text is one sentence for the person who started it."""


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


def open_session(api_key: str | None) -> aiohttp.ClientSession:
    """Return a session that never queues requests behind one another and leaves timeouts to its user.

    Every request has a connection of its own, as every user has: a server that closes one which it had promised to
    keep would otherwise look as if it had failed the next request.
    """
    headers: Mapping[str, Any] = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        headers=headers,
    )


async def choose_model(session: aiohttp.ClientSession, url: str, wanted: str | None) -> str:
    """Return the wanted model, or the first that the server offers. Raises `CannotStart`, also if nobody answers."""
    try:
        status, body = await _models(session, url)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise CannotStart(f"no answer from {url}: {str(error) or 'timed out'}") from error
    if wanted is not None:
        return wanted
    if status != HTTPStatus.OK:
        raise CannotStart(f"{url}/v1/models answers with status {status}: name a model with --model")
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CannotStart(f"{url}/v1/models does not list models: name one with --model") from error
    if not models:
        raise CannotStart(f"{url} serves no model at the moment")
    return models[0].id


async def _models(session: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
    async with session.get(f"{url}/v1/models", timeout=timeout) as response:
        return response.status, await response.read()
