"""Answers of the default model that follow JSON schemas: how many do, and what a token costs more than a free one.

Run by hand, as long as nothing else runs for the times to mean anything. Prints two parts: of 50 requests over eight
schemas, 16 at a time, how many answers ended by themselves, how many were cut at ``max_tokens``, and how many of the
former are valid (exit status 1 unless all are); then the milliseconds per token of 1 and of 16 streams with a format
and without, taken in turn, as medians over the rounds.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from shared.runtime.clock import monotonic
from tests.end_to_end.asking import CHAT, session_of
from tests.end_to_end.served import eventually, nothing_is_left
from tests.integration.processes import Up, slipstream_up
from tests.schemas import LARGER, SCHEMAS, fits

NAME = "SmolLM2-135M-Instruct"
ALL = {**SCHEMAS, **LARGER}
LIST = {"type": "array", "items": LARGER["order"], "minItems": 50}
"""Nobody comes to its end, so that answers with it are as long as those without."""
AT_ONCE, LONGEST, MEASURED_TOKENS = 16, 400, 96
WITHIN_S = 900.0
_SUBJECTS = ("a bakery", "the sea", "a tall tree", "Ada Lovelace", "winter", "a red bicycle", "ﷺ and 日本語")
_TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.5)
Fields = dict[str, Any]


def format_of(schema: Fields) -> Fields:
    """Return the field that asks for answers by a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def request(number: int) -> tuple[str, Fields]:
    """Return the name of a schema and the body of a request; each schema meets each temperature."""
    name = list(ALL)[number % len(ALL)]
    asked = f"Make up one {name} about {_SUBJECTS[number % len(_SUBJECTS)]}, as JSON."
    return name, {
        "model": NAME,
        "messages": [{"role": "user", "content": asked}],
        "response_format": format_of(ALL[name]),
        "temperature": _TEMPERATURES[number // len(ALL) % len(_TEMPERATURES)],
        "seed": number,
        "max_tokens": LONGEST,
    }


async def how_it_ends(session: aiohttp.ClientSession, number: int, places: asyncio.Semaphore) -> str:
    """Return "valid", "cut" or "invalid"; tell of the latter two."""
    name, body = request(number)
    async with places, session.post(CHAT, json=body) as response:
        answer = await response.json()
        assert response.status == 200, (number, answer)
    (choice,) = answer["choices"]
    text = choice["message"]["content"]
    end = _judged(text, ALL[name]) if choice["finish_reason"] == "stop" else "cut"
    if end != "valid":
        print(f"{number}, {name}, temperature {body['temperature']}, is {end}: {text!r}")
    return end


def _judged(text: str, schema: Fields) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return "invalid"
    return "valid" if fits(value, schema) else "invalid"


async def count(session: aiohttp.ClientSession, requests: int) -> bool:
    """Print how they end; False if an answer that ended by itself is not what its schema says, or one was cut."""
    places = asyncio.Semaphore(AT_ONCE)
    ends = await asyncio.gather(*(how_it_ends(session, number, places) for number in range(requests)))
    counts = {end: ends.count(end) for end in ("valid", "invalid", "cut")}
    print(json.dumps({"requests": requests, "schemas": len(ALL), "ended": requests - counts["cut"], **counts}))
    return counts["valid"] == requests


async def token_ms(session: aiohttp.ClientSession, number: int, response_format: Fields | None) -> float:
    """Return the milliseconds per token behind the first one of a stream that is always equally long."""
    body: Fields = {
        "model": NAME,
        "messages": [{"role": "user", "content": f"List {number + 50} orders of a shop as JSON."}],
        "temperature": 1.0,
        "seed": number,
        "max_tokens": MEASURED_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    body |= {} if response_format is None else {"response_format": response_format}
    times_s = []
    ends = []
    async with session.post(CHAT, json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                times_s.append(monotonic())
                ends += [choice["finish_reason"] for choice in json.loads(line[6:])["choices"]]
    assert [end for end in ends if end is not None] == ["length"]
    return (times_s[-1] - times_s[0]) / (MEASURED_TOKENS - 1) * 1000


async def crowd_ms(session: aiohttp.ClientSession, streams: int, response_format: Fields | None) -> float:
    """Return the same as a mean over so many streams at once."""
    return sum(await asyncio.gather(*(token_ms(session, n, response_format) for n in range(streams)))) / streams


async def cost(session: aiohttp.ClientSession, streams: int, rounds: int) -> None:
    """Print what a token takes with a format and without. The first round is not counted: the grammar is made in it."""
    guided, free = [], []
    for _ in range(rounds + 1):
        guided.append(await crowd_ms(session, streams, format_of(LIST)))
        free.append(await crowd_ms(session, streams, None))
    more = [one - other for one, other in zip(guided[1:], free[1:], strict=True)]
    told = {"with_ms": median(guided[1:]), "without_ms": median(free[1:]), "more_ms": median(more)}
    print(json.dumps({"streams": streams, "rounds": rounds} | {name: round(ms, 2) for name, ms in told.items()}))


async def run(up: Up, wanted: argparse.Namespace) -> bool:
    """Count and measure. Raises TimeoutError after a quarter of an hour."""
    async with asyncio.timeout(WITHIN_S), session_of(up, timeout_s=WITHIN_S) as session:
        are_valid = await count(session, wanted.requests)
        for streams in (1, AT_ONCE) if wanted.rounds else ():
            await cost(session, streams, wanted.rounds)
    await eventually(nothing_is_left, up)
    return are_valid


def main(arguments: Sequence[str]) -> int:
    """Return 0 if all answers are valid and no part of the server has complained."""
    parser = argparse.ArgumentParser("python -m tests.long.json_answers", description=__doc__)
    parser.add_argument("--requests", type=int, default=50, help="how many answers are judged (default: 50)")
    parser.add_argument("--rounds", type=int, default=8, help="how often each cost is measured (default: 8)")
    parser.add_argument("--up", default="", metavar="FLAGS", help="flags for `slipstream up`, in one word")
    wanted = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, slipstream_up(Path(folder), *wanted.up.split()) as up:
        up.until_ready(within_s=300)
        are_valid = asyncio.run(run(up, wanted))
        return int(not are_valid or "Traceback" in up.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
