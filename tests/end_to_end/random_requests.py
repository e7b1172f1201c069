"""Requests drawn from a seed over all parameters, and their answers in four ways: whole and streamed, alone and not."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.end_to_end.asking import CHAT, COMPLETIONS
from tests.integration.gateway_pool import events

OTHERS = 16
CLOSE = 1e-3
_VOCABULARY = 49_152
_FREQUENT_IDS = 600
"""Ids below this are bytes and short words: an answer is likely to have them."""
_TEXTS = (
    "The capital of France is",
    "Count: one, two, three,",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a",
    "Copy this: 👩‍🚀🇩🇪 日本語 ﷽ 👩‍🚀🇩🇪 日本語 ﷽ 👩‍🚀🇩🇪",
    "yes no yes no yes no yes no",
    "Ein Satz auf Deutsch:  Grüße aus  Köln,\n\n",
)
_STOPS = (".", ",", " the", "\n", "e", "two", "日", " and ", "never to be found", "a t", "👩‍🚀")
Fields = dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """One request."""

    number: int
    path: str
    fields: Fields

    @property
    def can_stream(self) -> bool:
        """False where more answers are computed than told: which are told is known at the end."""
        return bool(self.fields.get("best_of", 1) <= self.fields.get("n", 1))


@dataclass
class Choice:
    """One answer of a request, as whoever reads it has it."""

    text: str = ""
    finish: str | None = None
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()

    def is_like(self, other: "Choice") -> bool:
        """Equal, log-probabilities to three digits: another batch rounds otherwise."""
        same = (self.text, self.finish, self.tokens) == (other.text, other.finish, other.tokens)
        return same and all(abs(a - b) <= CLOSE for a, b in zip(self.logprobs, other.logprobs, strict=True))


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


# -- drawing ----------------------------------------------------------------------------------------------------------


def draw_requests(count: int, seed: int, max_tokens: int) -> list[Drawn]:
    """Return so many requests; each depends on the seed and its number alone."""
    return [_request(number, random.Random(f"{seed}/{number}"), max_tokens) for number in range(count)]


def _request(number: int, draw: random.Random, max_tokens: int) -> Drawn:
    is_chat = draw.random() < 0.4
    most = draw.randint(1, max_tokens)
    fields = (_chat(draw, most) if is_chat else _completion(draw, most)) | {"seed": draw.randrange(-(2**63), 2**63)}
    for optional in (_sampling, _penalties, _biases, _ends, _labels):
        fields |= optional(draw)
    if draw.random() < 0.25:
        fields["min_tokens"] = draw.randint(0, most)
    return Drawn(number, CHAT if is_chat else COMPLETIONS, fields)


def _chat(draw: random.Random, most: int) -> Fields:
    turns = draw.choice((1, 1, 3))
    messages: list[Fields] = [
        {"role": ("user", "assistant")[turn % 2], "content": draw.choice(_TEXTS)} for turn in range(turns)
    ]
    if draw.random() < 0.3:
        messages.insert(0, {"role": draw.choice(("system", "developer")), "content": "You are terse."})
    if draw.random() < 0.2:
        messages[-1]["content"] = [{"type": "text", "text": text} for text in draw.sample(_TEXTS, 2)]
    fields = {"messages": messages, draw.choice(("max_tokens", "max_completion_tokens")): most}
    if draw.random() < 0.3:
        fields["n"] = draw.randint(1, 3)
    if draw.random() < 0.4:
        fields |= {"logprobs": True, "top_logprobs": draw.choice((0, 1, 5, 20))}
    return fields


def _completion(draw: random.Random, most: int) -> Fields:
    fields: Fields = {"prompt": _prompt(draw), "max_tokens": most}
    if draw.random() < 0.4:
        fields["n"] = draw.randint(1, 3)
    if draw.random() < 0.3:
        fields["best_of"] = fields.get("n", 1) + draw.randint(0, 2)
    if draw.random() < 0.4:
        fields["logprobs"] = draw.randint(0, 5)
    return fields


def _prompt(draw: random.Random) -> Any:
    kind = draw.choice(("text", "ids", "texts", "lists"))
    if kind == "text":
        return draw.choice(_TEXTS)
    if kind == "texts":
        return draw.sample(_TEXTS, draw.randint(1, 3))
    lists = [[draw.randrange(3, _VOCABULARY) for _ in range(draw.randint(1, 60))] for _ in range(draw.randint(1, 3))]
    return lists if kind == "lists" else lists[0]


def _sampling(draw: random.Random) -> Fields:
    fields: Fields = {"temperature": draw.choice((0, 0, 0.0001, 0.5, 0.8, 1, 1.5, 2))}
    optional = {
        "top_p": draw.choice((0.05, 0.5, 0.9, 1)),
        "top_k": draw.choice((-1, 0, 1, 5, 50)),
        "min_p": draw.choice((0, 0.05, 0.3, 1)),
    }
    return fields | {name: value for name, value in optional.items() if draw.random() < 0.35}


def _penalties(draw: random.Random) -> Fields:
    optional = {
        "presence_penalty": round(draw.uniform(-2, 2), 2),
        "frequency_penalty": round(draw.uniform(-2, 2), 2),
        "repetition_penalty": round(draw.uniform(0.8, 1.6), 2),
    }
    return {name: value for name, value in optional.items() if draw.random() < 0.25}


def _biases(draw: random.Random) -> Fields:
    if draw.random() > 0.25:
        return {}
    ids = draw.sample(range(_FREQUENT_IDS), draw.randint(1, 20))
    return {"logit_bias": {str(one): draw.choice((-100, -5, 1.5, 5, 10)) for one in ids}}


def _ends(draw: random.Random) -> Fields:
    fields: Fields = {}
    if draw.random() < 0.35:
        fields["stop"] = draw.choice((draw.choice(_STOPS), draw.sample(_STOPS, draw.randint(1, 4))))
    if draw.random() < 0.25:
        fields["stop_token_ids"] = draw.sample(range(_FREQUENT_IDS), draw.randint(1, 100))
    if draw.random() < 0.3:
        fields["ignore_eos"] = True
    return fields


def _labels(draw: random.Random) -> Fields:
    optional = {"user": "somebody", "priority": draw.randint(-100, 100), "cache_salt": str(draw.randrange(3))}
    return {name: value for name, value in optional.items() if draw.random() < 0.2}


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
    body = {"model": model, **drawn.fields, "stream": True, "stream_options": {"include_usage": True}}
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
        told = piece.get("message") or piece.get("delta") or {"content": piece.get("text")}
        tokens, logprobs = _told(piece.get("logprobs"))
        return Choice(
            so_far.text + (told.get("content") or ""),
            piece["finish_reason"],
            so_far.tokens + tokens,
            so_far.logprobs + logprobs,
        )

    return add


def _told(logprobs: Fields | None) -> tuple[tuple[str, ...], tuple[float, ...]]:
    if not logprobs:
        return (), ()
    if "content" in logprobs:
        entries = logprobs["content"]
        return tuple(entry["token"] for entry in entries), tuple(entry["logprob"] for entry in entries)
    return tuple(logprobs["tokens"]), tuple(logprobs["token_logprobs"])


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
