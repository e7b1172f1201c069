"""A chat's second turn begins where its first one ended: what was computed for it is found again."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from tests.end_to_end.served import eventually
from tests.integration.processes import Up, slipstream_up

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

NAME = "SmolLM2-135M-Instruct"
BLOCK = 16
FIRST: list[Any] = [
    {"role": "system", "content": "You answer questions about geography in one short sentence. " * 4},
    {"role": "user", "content": "What is the capital of France?"},
]


@pytest.fixture(scope="module")
def up(model_folder: Path) -> Iterator[Up]:
    assert model_folder.is_dir()
    with TemporaryDirectory() as folder, slipstream_up(Path(folder), "--dtype", "float32") as running:
        TOLD.clear()
        yield running.until_ready(within_s=120)


TOLD: list[int] = []
"""What the answers of the present ``up`` said of tokens that were found."""


async def ask(client: AsyncOpenAI, messages: list[Any], salt: str, max_tokens: int = 40) -> ChatCompletion:
    answer = await client.chat.completions.create(
        model=NAME, messages=messages, temperature=0, max_tokens=max_tokens, extra_body={"cache_salt": salt}
    )
    TOLD.append(cached_tokens(answer))
    return answer


def cached_tokens(answer: ChatCompletion) -> int:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def second_turn(first: ChatCompletion) -> list[Any]:
    return [
        *FIRST,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And what is the capital of Italy?"},
    ]


async def test_the_second_turn_finds_the_first_one_with_its_answer_and_says_the_same_as_cold(
    client: AsyncOpenAI, up: Up
) -> None:
    first = await ask(client, FIRST, "warm")
    assert cached_tokens(first) == 0
    assert first.usage is not None
    warm = await ask(client, second_turn(first), "warm")
    cold = await ask(client, second_turn(first), "another salt: nothing is found")
    assert warm.usage is not None
    assert cached_tokens(cold) == 0
    # the whole first turn but for its last, partial block: the end-of-turn token was drawn and never fed
    assert cached_tokens(warm) >= first.usage.total_tokens - BLOCK - 1
    assert cached_tokens(warm) > first.usage.prompt_tokens - first.usage.prompt_tokens % BLOCK - 1
    assert warm.choices[0].message.content == cold.choices[0].message.content
    await eventually(lambda found: found["slipstream_prefix_cache_hits_total"] == sum(TOLD), up)


async def test_the_same_request_again_is_computed_from_its_last_block_on(client: AsyncOpenAI) -> None:
    cold = await ask(client, FIRST, "again")
    warm = await ask(client, FIRST, "again")
    assert warm.usage is not None
    assert cached_tokens(warm) == (warm.usage.prompt_tokens - 1) // BLOCK * BLOCK
    assert warm.choices[0].message.content == cold.choices[0].message.content
