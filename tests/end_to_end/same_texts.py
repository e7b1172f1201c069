"""Texts of the real model, alone and in a crowd: equal, or a tie at the first token that differs (DESIGN §4)."""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import aiohttp

from tests.end_to_end.asking import CHAT
from tests.integration.gateway_pool import events

TIE = 1e-3
Fields = dict[str, Any]


def repeats(count: int, max_tokens: int) -> list[Fields]:
    """Return the chats of BB-7: each is to repeat an id of its own."""
    return [
        {
            "messages": [{"role": "user", "content": f"Repeat: id-{number}"}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        for number in range(count)
    ]


async def streamed_text(session: aiohttp.ClientSession, model: str, fields: Fields) -> str:
    """Return the text of a chat's stream, which must end with one reason and its end mark."""
    async with session.post(CHAT, json={"model": model, "stream": True, **fields}) as response:
        assert response.status == 200
        choices = [choice for chunk in await events(response) for choice in chunk["choices"]]
    assert [choice["finish_reason"] is not None for choice in choices] == [False] * (len(choices) - 1) + [True]
    return "".join(choice["delta"].get("content", "") for choice in choices)


async def check_crowd(
    session: aiohttp.ClientSession, model: str, asked: Sequence[Fields], alone: Sequence[Fields]
) -> int:
    """Stream all at once, then some of them alone, one after the other; return how many were ties."""
    texts = await asyncio.gather(*(streamed_text(session, model, fields) for fields in asked))
    together = {repr(fields): text for fields, text in zip(asked, texts, strict=True)}
    verdicts = [await equal_or_tie(session, model, fields, together[repr(fields)]) for fields in alone]
    return verdicts.count("tie")


async def equal_or_tie(session: aiohttp.ClientSession, model: str, fields: Fields, got: str) -> Literal["equal", "tie"]:
    """Say how a greedy chat's text compares with its text alone. Raises AssertionError unless it is equal or a tie."""
    body = {"model": model, **fields, "logprobs": True, "top_logprobs": 2}
    async with session.post(CHAT, json=body) as response:
        (choice,) = (await response.json())["choices"]
    expected: str = choice["message"]["content"]
    if got == expected:
        return "equal"
    so_far = b""
    for entry in choice["logprobs"]["content"]:
        so_far += bytes(entry["bytes"])
        if not got.encode().startswith(so_far):
            first, second = (one["logprob"] for one in entry["top_logprobs"])
            assert first - second <= TIE, f"{got!r} is not {expected!r}: {first - second:.4f} apart"
            return "tie"
    raise AssertionError(f"{got!r} goes on where {expected!r} ends")
