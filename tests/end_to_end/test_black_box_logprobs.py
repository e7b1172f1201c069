"""Black-box case 19, logprobs, against `slipstream up` with the default model."""

import asyncio

import aiohttp
import pytest
from openai import AsyncOpenAI

from tests.end_to_end.answers import CHAT, COMPLETIONS, HI, NAME, streamed, text_of, whole
from tests.integration.processes import Up

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def up(float32_up: Up) -> Up:
    return float32_up


async def test_bb_19_logprobs_of_a_completion(session: aiohttp.ClientSession) -> None:
    asked = {"prompt": "A b", "logprobs": 2, "max_tokens": 5, "temperature": 0}
    answer = (await whole(session, COMPLETIONS, **asked))["choices"][0]
    lists = answer["logprobs"]
    assert {len(one) for one in lists.values()} == {5}
    assert "".join(lists["tokens"]) == answer["text"]
    offsets = [len("".join(lists["tokens"][:place])) for place in range(5)]
    assert lists["text_offset"] == offsets
    for token, logprob, top in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True):
        assert max(top.values()) == top[token] == logprob <= 0, "greedy takes the likeliest"
        assert len(top) == 2
    chunks = [one["logprobs"] for one in await streamed(session, COMPLETIONS, **asked) if one["logprobs"]]
    assert {name: [item for chunk in chunks for item in chunk[name]] for name in lists} == lists


async def test_bb_19_an_echo_with_logprobs_covers_prompt_and_answer(
    session: aiohttp.ClientSession, client: AsyncOpenAI
) -> None:
    asked = {"prompt": "A b", "logprobs": 2, "max_tokens": 3, "temperature": 0}
    plain = (await whole(session, COMPLETIONS, **asked))["choices"][0]
    answer = await whole(session, COMPLETIONS, **asked, echo=True)
    choice, lists = answer["choices"][0], answer["choices"][0]["logprobs"]
    assert choice["text"] == "A b" + plain["text"] == "".join(lists["tokens"])
    tokens = len(lists["tokens"])
    assert {len(one) for one in lists.values()} == {tokens}
    assert tokens == answer["usage"]["prompt_tokens"] + 3
    assert lists["text_offset"] == [len("".join(lists["tokens"][:place])) for place in range(tokens)]
    assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
    for token, logprob, top in list(zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True))[
        1:
    ]:
        assert top[token] == logprob <= max(top.values()) <= 0
        assert 2 <= len(top) <= 3
    assert lists["token_logprobs"][-3:] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-4)
    assert lists["tokens"][-3:] == plain["logprobs"]["tokens"]
    choices = await streamed(session, COMPLETIONS, **asked, echo=True)
    assert choices[0]["text"].startswith("A b")
    assert text_of(choices) == choice["text"]
    chunks = [one["logprobs"] for one in choices if one["logprobs"]]
    assert {name: [item for chunk in chunks for item in chunk[name]] for name in lists} == lists
    official = await client.completions.create(
        model=NAME, prompt="A b", logprobs=2, max_tokens=3, temperature=0, echo=True
    )
    assert official.choices[0].logprobs is not None
    assert official.choices[0].logprobs.token_logprobs == lists["token_logprobs"]


async def test_bb_19_what_was_answered_is_as_likely_when_it_is_a_prompt_though_that_is_cached(
    session: aiohttp.ClientSession,
) -> None:
    counting = {"prompt": ", ".join(map(str, range(1, 60))), "temperature": 0, "logprobs": 0, "max_tokens": 90}
    generated = (await whole(session, COMPLETIONS, **counting, ignore_eos=True))["choices"][0]
    said = {"prompt": counting["prompt"] + generated["text"], "temperature": 0, "logprobs": 0, "echo": True}
    cold, warm, among = await asyncio.gather(
        whole(session, COMPLETIONS, **said, max_tokens=0, cache_salt="cold"),
        whole(session, COMPLETIONS, **said, max_tokens=0),
        whole(session, COMPLETIONS, **said, max_tokens=5, n=2, seed=1),
    )
    expected = generated["logprobs"]
    for answer in (cold, warm):
        lists = answer["choices"][0]["logprobs"]
        assert lists["tokens"][-90:] == expected["tokens"]
        assert lists["token_logprobs"][-90:] == pytest.approx(expected["token_logprobs"], abs=1e-3)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    prompt_tokens = cold["usage"]["prompt_tokens"]
    for choice in among["choices"]:
        lists = choice["logprobs"]
        assert len(lists["tokens"]) == prompt_tokens + 5
        assert lists["token_logprobs"][prompt_tokens - 90 : prompt_tokens] == pytest.approx(
            expected["token_logprobs"], abs=1e-3
        )


async def test_bb_19_logprobs_of_a_chat(session: aiohttp.ClientSession) -> None:
    asked = {**HI, "logprobs": True, "top_logprobs": 2, "max_tokens": 12, "temperature": 0.8, "seed": 3}
    answer = (await whole(session, CHAT, **asked))["choices"][0]
    content = answer["logprobs"]["content"]
    assert len(content) == 12
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == answer["message"]["content"]
    for entry in content:
        first, second = entry["top_logprobs"]
        assert entry["logprob"] <= first["logprob"]
        assert second["logprob"] <= first["logprob"] <= 0
    chunks = [one["logprobs"] for one in await streamed(session, CHAT, **asked) if one["logprobs"]]
    assert [entry for chunk in chunks for entry in chunk["content"]] == content


async def test_bb_19_logprobs_are_the_models_own_whatever_else_is_asked(session: aiohttp.ClientSession) -> None:
    plain = (await whole(session, COMPLETIONS, prompt="A b", logprobs=1, max_tokens=1, temperature=0))["choices"][0]
    hot = await whole(
        session, COMPLETIONS, prompt="A b", logprobs=1, max_tokens=1, temperature=2, seed=1, presence_penalty=2
    )
    likeliest = hot["choices"][0]["logprobs"]["top_logprobs"][0]
    token, logprob = plain["logprobs"]["tokens"][0], plain["logprobs"]["token_logprobs"][0]
    assert likeliest[token] == pytest.approx(logprob, abs=1e-4)
