"""The official `openai` client against `slipstream up` with the default model."""

import pytest
from openai import AsyncOpenAI

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
