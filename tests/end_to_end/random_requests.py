"""Answers to drawn requests in four ways: whole and streamed, alone and not."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.end_to_end.drawn_requests import Drawn, Fields
from tests.integration.gateway_pool import events

OTHERS = 16
CLOSE = 1e-3
Call = tuple[str, str]
"""A function and its arguments; every call has an id of its own."""


@dataclass
class Choice:
    """One answer of a request, as whoever reads it has it."""

    text: str = ""
    finish: str | None = None
    tokens: tuple[str, ...] = ()
    offsets: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    calls: tuple[Call, ...] = ()

    def is_like(self, other: "Choice") -> bool:
        """Equal, log-probabilities to three digits: another batch rounds otherwise."""
        return self._exact == other._exact and all(map(_are_close, self.logprobs, other.logprobs))

    @property
    def _exact(self) -> tuple[object, ...]:
        return self.text, self.finish, self.tokens, self.offsets, len(self.logprobs), self.calls


def _are_close(one: float | None, other: float | None) -> bool:
    return one == other if one is None or other is None else abs(one - other) <= CLOSE


@dataclass(frozen=True)
class Came:
    """An answer: its choices in order, and what was counted."""

    choices: tuple[Choice, ...]
    counted: tuple[int, int]

    def is_like(self, other: "Came") -> bool:
        """Equal but for rounding."""
        return self.counted == other.counted and all(
            mine.is_like(theirs) for mine, theirs in zip(self.choices, other.choices, strict=True)
        )


# -- asking -----------------------------------------------------------------------------------------------------------


async def ask_whole(session: aiohttp.ClientSession, model: str, drawn: Drawn) -> Came:
    """Ask for an answer in one piece."""
    async with session.post(drawn.path, json={"model": model, **drawn.fields}) as response:
        answer = await response.json()
        assert response.status == 200, (drawn, answer)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return Came(tuple(map(_with(Choice()), answer["choices"])), _counted(answer["usage"]))


async def ask_stream(session: aiohttp.ClientSession, model: str, drawn: Drawn) -> Came:
    """Ask for the same as a stream, and put its pieces together."""
    body = {"model": model, **drawn.fields, "stream": True, "stream_options": drawn.stream_options}
    async with session.post(drawn.path, json=body) as response:
        assert response.status == 200, (drawn, await response.text())
        chunks = await events(response)
    choices: dict[int, Choice] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choices[piece["index"]] = _with(choices.get(piece["index"], Choice()))(piece)
    assert sorted(choices) == list(range(len(choices)))
    return Came(tuple(choices[index] for index in sorted(choices)), _counted(chunks[-1]["usage"]))


def _with(so_far: Choice) -> Any:
    """Return what adds a piece of an answer, or all of it, to what there is."""

    def add(piece: Fields) -> Choice:
        assert so_far.finish is None, "nothing comes after the end"
        said = piece.get("message") or piece.get("delta") or {"content": piece.get("text")}
        tokens, offsets, logprobs = _told(piece.get("logprobs"))
        return Choice(
            so_far.text + (said.get("content") or ""),
            piece["finish_reason"],
            so_far.tokens + tokens,
            so_far.offsets + offsets,
            so_far.logprobs + logprobs,
            _called(so_far.calls, said.get("tool_calls") or ()),
        )

    return add


def _told(logprobs: Fields | None) -> tuple[tuple[str, ...], tuple[int, ...], tuple[float | None, ...]]:
    if not logprobs:
        return (), (), ()
    if "content" in logprobs:
        entries = logprobs["content"]
        return tuple(entry["token"] for entry in entries), (), tuple(entry["logprob"] for entry in entries)
    return tuple(logprobs["tokens"]), tuple(logprobs["text_offset"]), tuple(logprobs["token_logprobs"])


def _called(so_far: tuple[Call, ...], pieces: Sequence[Fields]) -> tuple[Call, ...]:
    """Add pieces of calls, or whole ones, to those that there are."""
    calls = list(so_far)
    for piece in pieces:
        function = piece["function"]
        if "id" in piece:
            assert piece.get("index", len(calls)) == len(calls)
            calls.append((function["name"], function["arguments"]))
        else:
            name, arguments = calls[piece["index"]]
            calls[piece["index"]] = (name, arguments + function["arguments"])
    return tuple(calls)


def _counted(usage: Fields) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"]


# -- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Two ways to ask the same that came to different answers."""

    drawn: Drawn
    way: str
    expected: Came
    got: Came

    def __str__(self) -> str:
        return f"{self.way}: {self.drawn}\n    alone and whole: {self.expected}\n    {self.way}: {self.got}"


async def differences(session: aiohttp.ClientSession, model: str, requests: Sequence[Drawn]) -> list[Difference]:
    """Ask each request whole and as a stream, alone and with 16 others, and return what is not as alone and whole."""
    expected = [await ask_whole(session, model, drawn) for drawn in requests]
    found = []
    for drawn, whole in zip(requests, expected, strict=True):
        if drawn.can_stream:
            found += _difference(drawn, "alone, streamed", whole, await ask_stream(session, model, drawn))
    for drawn, whole, ways in zip(requests, expected, await _crowded(session, model, requests), strict=True):
        for way, came in ways.items():
            found += _difference(drawn, way, whole, came)
    return found


def _difference(drawn: Drawn, way: str, expected: Came, got: Came) -> list[Difference]:
    return [] if got.is_like(expected) else [Difference(drawn, way, expected, got)]


async def _crowded(session: aiohttp.ClientSession, model: str, requests: Sequence[Drawn]) -> list[dict[str, Came]]:
    """Keep 17 requests under way until each has been asked in both ways; the first ones then keep the last company."""
    places = asyncio.Semaphore(OTHERS + 1)

    async def ask(drawn: Drawn) -> dict[str, Came]:
        ways = {}
        async with places:
            ways["in a crowd, whole"] = await ask_whole(session, model, drawn)
            if drawn.can_stream:
                ways["in a crowd, streamed"] = await ask_stream(session, model, drawn)
        return ways

    async def keep_company() -> None:
        while True:
            for drawn in requests:
                await ask(drawn)

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask(drawn)) for drawn in requests]
        company = [tasks.create_task(keep_company()) for _ in range(OTHERS)]
        came = [await one for one in asked]
        for one in company:
            one.cancel()
    return came
