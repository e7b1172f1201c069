"""What the default model answers, whole and streamed, with a status of 200 or else an error of the test."""

from typing import Any

import aiohttp

from tests.end_to_end.asking import CHAT, COMPLETIONS
from tests.integration.gateway_pool import events

__all__ = ["CHAT", "COMPLETIONS", "HI", "NAME", "chunks", "post", "streamed", "text", "text_of", "whole"]

NAME = "SmolLM2-135M-Instruct"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Name three colours."}]}


async def post(session: aiohttp.ClientSession, path: str, **fields: Any) -> tuple[int, Any]:
    """Return status and body."""
    async with session.post(path, json={"model": NAME, **fields}) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


async def whole(session: aiohttp.ClientSession, path: str, **fields: Any) -> dict[str, Any]:
    """Return an answer."""
    status, answer = await post(session, path, **fields)
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


async def chunks(session: aiohttp.ClientSession, path: str, **fields: Any) -> list[Any]:
    """Return the chunks of a stream that ends with its end mark."""
    async with session.post(path, json={"model": NAME, "stream": True, **fields}) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream"), await response.text()
        return await events(response)


async def streamed(session: aiohttp.ClientSession, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of all chunks."""
    return [choice for chunk in await chunks(session, path, **fields) for choice in chunk["choices"]]


def text_of(choices: list[dict[str, Any]]) -> str:
    """Return the text of the choices of a stream."""
    return "".join(one["text"] if "text" in one else one["delta"].get("content", "") for one in choices)


async def text(session: aiohttp.ClientSession, **fields: Any) -> str:
    """Return the text of the first choice."""
    answer = await whole(session, COMPLETIONS, **fields)
    found: str = answer["choices"][0]["text"]
    return found
