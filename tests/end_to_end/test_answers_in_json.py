"""Answers that follow schemas, asked for with the official client, from `slipstream up` with the default model."""

import asyncio
import json
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, BadRequestError
from openai.types.chat.completion_create_params import ResponseFormat
from pydantic import BaseModel, Field

from tests.schemas import SCHEMAS, fits

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]
NAME = "SmolLM2-135M-Instruct"


class Step(BaseModel):
    """A part of a `Recipe`."""

    text: str = Field(max_length=30)
    minutes: int = Field(ge=0, le=90)


class Recipe(BaseModel):
    """What the client's own parser makes of an answer."""

    dish: str = Field(max_length=20)
    difficulty: Literal["easy", "hard"]
    steps: list[Step] = Field(max_length=2)


def format_of(schema: dict[str, Any]) -> ResponseFormat:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


async def chat(client: AsyncOpenAI, asked: str, response_format: ResponseFormat, **fields: Any) -> tuple[str, str]:
    answer = await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": asked}],
        response_format=response_format,
        **{"max_tokens": 200, **fields},
    )
    return answer.choices[0].message.content or "", answer.choices[0].finish_reason


async def test_answers_follow_their_schemas_all_at_once(client: AsyncOpenAI) -> None:
    asked = [(name, temperature) for name in SCHEMAS for temperature in (0.0, 1.0)]
    answers = await asyncio.gather(
        *(
            chat(client, f"Make up a {name} as JSON.", format_of(SCHEMAS[name]), temperature=temperature, seed=5)
            for name, temperature in asked
        )
    )
    for (name, _), (text, finish) in zip(asked, answers, strict=True):
        assert finish == "stop", text
        assert fits(json.loads(text), SCHEMAS[name]), text


async def test_the_clients_parser_returns_the_model_that_it_was_given(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model=NAME,
        messages=[{"role": "user", "content": "How do I make pancakes?"}],
        response_format=Recipe,
        temperature=0,
        max_tokens=250,
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Recipe)
    assert len(parsed.steps) <= 2


async def test_a_stream_says_what_the_whole_answer_says(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 11}
    whole, finish = await chat(client, "Who are you?", format_of(SCHEMAS["nested"]), **asked)
    stream = await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "Who are you?"}],
        response_format=format_of(SCHEMAS["nested"]),
        max_tokens=200,
        stream=True,
        **asked,
    )
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == whole
    assert finish == "stop"
    assert fits(json.loads(whole), SCHEMAS["nested"])


async def test_the_clients_streaming_parser_takes_it_too(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model=NAME,
        messages=[{"role": "user", "content": "How do I make tea?"}],
        response_format=Recipe,
        temperature=0,
        max_tokens=250,
    ) as stream:
        answer = await stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Recipe)


async def test_a_json_object_on_either_route_whatever_ends_are_ignored(client: AsyncOpenAI) -> None:
    text, finish = await chat(
        client,
        "Answer with a short JSON object.",
        {"type": "json_object"},
        temperature=0,
        max_tokens=300,
        extra_body={"ignore_eos": True},
    )
    assert text.startswith("{")
    if finish == "stop":
        assert isinstance(json.loads(text), dict)
    answer = await client.completions.create(
        model=NAME,
        prompt="A red thing as JSON: ",
        max_tokens=60,
        temperature=0,
        extra_body={"response_format": format_of(SCHEMAS["choice"]), "ignore_eos": True, "min_tokens": 20},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert fits(json.loads(answer.choices[0].text), SCHEMAS["choice"])


async def test_an_answer_that_is_cut_says_so(client: AsyncOpenAI) -> None:
    text, finish = await chat(client, "Who?", format_of(SCHEMAS["nested"]), max_tokens=4)
    assert finish == "length"
    assert text.startswith("{")


async def test_a_schema_that_cannot_be_followed_is_refused_in_words(client: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError) as refused:
        await chat(client, "Who?", format_of({"type": "array", "uniqueItems": True}))
    assert refused.value.param == "response_format"
    assert "uniqueItems" in refused.value.message
