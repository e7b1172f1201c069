"""`response_format` through the official client: what comes is what was asked for, whoever else is in the batch."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta, Struct
from openai import AsyncOpenAI, BadRequestError
from openai.types.chat import ChatCompletion

from tests.end_to_end.served import FAKE, MODEL, client_of, eventually, nothing_is_left
from tests.integration.processes import Up, slipstream_up

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

NAME = "SmolLM2-135M-Instruct"
SAID: Any = [{"role": "user", "content": "Tell me about Paris as JSON."}]
Short = Annotated[str, Meta(max_length=12)]


class City(Struct, forbid_unknown_fields=True):
    name: Short
    people: Annotated[int, Meta(ge=0, le=99_999_999)]
    is_capital: bool


class Tags(Struct, forbid_unknown_fields=True):
    tags: Annotated[list[Short], Meta(min_length=1, max_length=3)]
    mood: Literal["good", "bad"]


class Nested(Struct, forbid_unknown_fields=True):
    city: City
    note: Short | None


KINDS: list[type[Struct]] = [City, Tags, Nested]


def format_of(kind: type[Struct]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": kind.__name__, "schema": _plain(kind), "strict": True}}


def _plain(kind: type[Struct]) -> dict[str, Any]:
    return msgspec.json.schema(kind)


@pytest.fixture(scope="module")
def up(model_folder: Path) -> Iterator[Up]:
    assert model_folder.is_dir()
    with TemporaryDirectory() as folder, slipstream_up(Path(folder), "--dtype", "float32") as running:
        yield running.until_ready(within_s=120)


@pytest.fixture
async def client(up: Up) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(up) as opened:
        yield opened


async def ask(client: AsyncOpenAI, kind: type[Struct], number: int) -> ChatCompletion:
    return await client.chat.completions.create(
        model=NAME,
        messages=SAID,
        response_format=format_of(kind),
        max_tokens=200,
        seed=number,
        temperature=0.0 if number % 5 == 0 else 1.0,
    )


async def test_fifty_answers_follow_their_schemas(client: AsyncOpenAI, up: Up) -> None:
    kinds = [KINDS[number % len(KINDS)] for number in range(50)]
    answers = await asyncio.gather(*(ask(client, kind, number) for number, kind in enumerate(kinds)))
    for kind, answer in zip(kinds, answers, strict=True):
        (choice,) = answer.choices
        assert choice.finish_reason == "stop", choice.message.content
        assert isinstance(msgspec.json.decode(choice.message.content or "", type=kind), kind)
    await eventually(nothing_is_left, up)


async def test_an_answer_without_a_format_is_the_same_beside_those_that_have_one(client: AsyncOpenAI) -> None:
    async def free() -> str:
        answer = await client.chat.completions.create(model=NAME, messages=SAID, max_tokens=40, temperature=0)
        return answer.choices[0].message.content or ""

    alone = await free()
    beside, *_ = await asyncio.gather(free(), *(ask(client, City, number) for number in range(16)))
    assert beside == alone


async def test_a_stream_says_what_the_whole_answer_says(client: AsyncOpenAI) -> None:
    whole = (await ask(client, Nested, 7)).choices[0].message.content
    pieces = await client.chat.completions.create(
        model=NAME, messages=SAID, response_format=format_of(Nested), max_tokens=200, seed=7, temperature=1, stream=True
    )
    text = [piece.choices[0].delta.content or "" async for piece in pieces]
    assert "".join(text) == whole


async def test_any_object_is_one_and_a_cut_one_says_so(client: AsyncOpenAI) -> None:
    asked = {"model": NAME, "messages": SAID, "response_format": {"type": "json_object"}, "seed": 5}
    answer = await client.chat.completions.create(**asked, max_tokens=400)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    cut = await client.chat.completions.create(**asked, max_tokens=2)
    assert cut.choices[0].finish_reason == "length"
    assert (cut.choices[0].message.content or "").startswith("{")


async def test_a_schema_that_nobody_can_follow_is_refused_and_harms_nobody(client: AsyncOpenAI) -> None:
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}
    with pytest.raises(BadRequestError, match="Invalid type: nope"):
        await client.chat.completions.create(model=NAME, messages=SAID, response_format=bad)
    assert (await ask(client, Tags, 1)).choices[0].finish_reason == "stop"


async def test_an_answer_goes_on_by_its_grammar_when_its_worker_is_killed(short_folder: Path) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "minItems": 60}}}

    async def text(up: Up, streaming: asyncio.Event) -> str:
        async with client_of(up) as client:
            pieces = await client.chat.completions.create(
                model=MODEL, messages=SAID, response_format=wanted, max_tokens=150, stream=True
            )
            told = []
            async for piece in pieces:
                told.append(piece.choices[0].delta.content or "")
                if len(told) > 20:
                    streaming.set()
        return "".join(told)

    with slipstream_up(short_folder, *FAKE, "--fake-step-ms", "15") as up:
        up.until_ready()
        undisturbed = await text(up, asyncio.Event())
        streaming = asyncio.Event()
        stream = asyncio.ensure_future(text(up, streaming))
        async with asyncio.timeout(30):
            await streaming.wait()
        os.kill(up.part("worker"), signal.SIGKILL)
        async with asyncio.timeout(60):
            assert await stream == undisturbed
        assert undisturbed.startswith("[")
