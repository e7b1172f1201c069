"""The official `openai` client against `slipstream up` with the default model."""

import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.end_to_end.served import blocking_client_of
from tests.integration.processes import Up
from tests.schemas import SCHEMAS, fits

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

NAME = "SmolLM2-135M-Instruct"


async def test_a_streamed_chat_knows_the_capital_of_france(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens > 10
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_a_stream_says_what_the_whole_answer_says(client: AsyncOpenAI) -> None:
    prompt = "The first planets are"
    whole = await client.completions.create(model=NAME, prompt=prompt, temperature=0.8, seed=7, max_tokens=24)
    stream = await client.completions.create(
        model=NAME, prompt=prompt, temperature=0.8, seed=7, max_tokens=24, stream=True
    )
    pieces = [chunk.choices[0].text async for chunk in stream]
    assert "".join(pieces) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.choices[0].finish_reason == "length"


async def test_the_model_is_listed_under_the_name_it_is_asked_for(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [NAME]


async def test_a_stop_string_ends_the_text_before_it(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        stop=["Paris"],
    )
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.choices[0].message.content or "").rstrip().endswith("is")


CAPITAL: Any = {
    "model": NAME,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 5,
    "logprobs": True,
    "top_logprobs": 2,
}


async def test_log_probabilities_are_told_of_every_token_streamed_or_not(client: AsyncOpenAI) -> None:
    whole = (await client.chat.completions.create(**CAPITAL)).choices[0]
    stream = await client.chat.completions.create(**CAPITAL, stream=True)
    pieces = [chunk.choices[0].logprobs async for chunk in stream]
    assert whole.logprobs is not None
    told = whole.logprobs.content or []
    assert [entry.token for piece in pieces if piece for entry in piece.content or []] == [one.token for one in told]
    assert "".join(entry.token for entry in told) == whole.message.content
    assert all(entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 2 for entry in told)


def test_the_blocking_client_chats_streams_and_gets_log_probabilities_and_json(up: Up) -> None:
    with blocking_client_of(up) as client:
        whole = client.chat.completions.create(**CAPITAL).choices[0]
        chunks = list(client.chat.completions.create(**CAPITAL, stream=True))
        text = client.completions.create(model=NAME, prompt="The capital of France is", max_tokens=4, temperature=0)
        asked: Any = {"type": "json_schema", "json_schema": {"name": "choice", "schema": SCHEMAS["choice"]}}
        chosen = client.chat.completions.create(**{**CAPITAL, "response_format": asked, "max_tokens": 20}).choices[0]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert whole.logprobs is not None
    assert len(whole.logprobs.content or []) == 5
    assert "Paris" in text.choices[0].text
    assert fits(json.loads(chosen.message.content or ""), SCHEMAS["choice"])
