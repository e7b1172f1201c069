"""Black-box cases of the API that concern parameters, by number, against `slipstream up` with the default model."""

import asyncio
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from tests.end_to_end.answers import CHAT, COMPLETIONS, HI, NAME, post, streamed, text, text_of, whole
from tests.end_to_end.served import eventually, figures, nothing_is_left
from tests.integration.processes import Up

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

ALPHABET: dict[str, Any] = {"prompt": "Here is the English alphabet: ABC", "temperature": 0, "max_tokens": 24}
LONGER: dict[str, Any] = {**ALPHABET, "max_tokens": 60}


@pytest.fixture(scope="module")
def up(float32_up: Up) -> Up:
    return float32_up


# -- BB-15: stop strings ----------------------------------------------------------------------------------------------


def across_tokens(tokens: list[str], first: int) -> str:
    """Return what begins within a token, holds the two behind it, and ends within the next of several characters."""
    begin = next(place for place in range(first, len(tokens)) if len(tokens[place]) > 1)
    end = next(place for place in range(begin + 3, len(tokens)) if len(tokens[place]) > 1)
    return tokens[begin][1:] + "".join(tokens[begin + 1 : end]) + tokens[end][:-1]


async def test_bb_15_a_stop_string_across_tokens_ends_the_text_before_it(session: aiohttp.ClientSession) -> None:
    (choice,) = (await whole(session, COMPLETIONS, **LONGER, logprobs=0))["choices"]
    free = choice["text"]

    async def check(stop: str, stops: str | list[str]) -> None:
        answer, choices = await asyncio.gather(
            whole(session, COMPLETIONS, **LONGER, stop=stops), streamed(session, COMPLETIONS, **LONGER, stop=stops)
        )
        assert answer["choices"][0]["text"] == text_of(choices) == free[: free.index(stop)]
        assert answer["choices"][0]["finish_reason"] == choices[-1]["finish_reason"] == "stop"

    found = [free[begin : begin + length] for begin, length in ((0, 3), (5, 7), (11, 12), (20, 5))]
    found += [across_tokens(choice["logprobs"]["tokens"], first) for first in (0, 20)]
    lists = [["no such text", "nor\nthis", stop, "nor this"] for stop in found]
    await asyncio.gather(*map(check, found, found), *map(check, found, lists))


async def test_bb_15_what_almost_matches_loses_no_text(session: aiohttp.ClientSession) -> None:
    free = await text(session, **ALPHABET)
    near = [free[:10] + "#", free[4:30] + "#", free[-6:] + "#", free[-1] + "#"]
    choices, answer = await asyncio.gather(
        streamed(session, COMPLETIONS, **ALPHABET, stop=near), whole(session, COMPLETIONS, **ALPHABET, stop=near)
    )
    assert text_of(choices) == free
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (free, "length")


async def test_bb_15_five_stop_strings_are_refused_by_name(session: aiohttp.ClientSession) -> None:
    status, answer = await post(session, COMPLETIONS, **ALPHABET, stop=list("abcde"))
    assert (status, answer["error"]["param"]) == (400, "stop")


async def test_bb_15_what_is_stopped_is_computed_no_longer(up: Up, session: aiohttp.ClientSession) -> None:
    before = (await figures(up))["slipstream_generation_tokens_total"]
    free = await text(session, **ALPHABET)
    await text(session, **{**ALPHABET, "max_tokens": 1500}, ignore_eos=True, stop=free[3:8])
    after = await eventually(nothing_is_left, up)
    assert after["slipstream_generation_tokens_total"] - before < 24 + 24


# -- BB-20, BB-26, BB-27: bounds --------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((path, {"n": n}, "n") for path in (COMPLETIONS, CHAT) for n in (0, -1, "a", 1000)),
    (CHAT, {"logit_bias": {"AI": -100}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"191222999": -100}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"5": 1000}}, "logit_bias"),
    *((path, {"temperature": hot}, "temperature") for path in (COMPLETIONS, CHAT) for hot in (-1, 999999)),
    *((CHAT, {"top_p": top_p}, "top_p") for top_p in (-1, 0, 1.5)),
    (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (COMPLETIONS, {"logprobs": 25}, "logprobs"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"echo": True}, "echo"),
    *((path, {"max_tokens": -1}, "max_tokens") for path in (COMPLETIONS, CHAT)),
    *((path, {"stop": ""}, "stop") for path in (COMPLETIONS, CHAT)),
    (CHAT, {"presence_penalty": 3}, "presence_penalty"),
    (COMPLETIONS, {"min_tokens": 30, "max_tokens": 20}, "min_tokens"),
    (COMPLETIONS, {"stop_token_ids": [10**6]}, "stop_token_ids"),
    (COMPLETIONS, {"best_of": 2, "n": 3}, "best_of"),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
    (COMPLETIONS, {"suffix": "x"}, "suffix"),
]


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED)
async def test_bb_20_and_bb_26_a_value_out_of_bounds_is_a_400_that_names_its_field_and_no_stream(
    session: aiohttp.ClientSession, path: str, fields: dict[str, Any], param: str
) -> None:
    basis = {"prompt": "hi"} if path == COMPLETIONS else HI
    for stream in [fields["stream"]] if "stream" in fields else [False, True]:
        status, answer = await post(session, path, **{**basis, "stream": stream, **fields})
        assert (status, answer["error"]["param"]) == (400, param)
        assert answer["error"]["type"] == "invalid_request_error"


async def test_bb_26_no_tokens_are_answered_with_the_prompt_if_that_is_echoed(session: aiohttp.ClientSession) -> None:
    prompts = ["The sea is", "One, two,"]
    answer = await whole(session, COMPLETIONS, prompt=prompts, echo=True, max_tokens=0)
    assert [choice["text"] for choice in answer["choices"]] == prompts
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 0
    choices = await streamed(session, COMPLETIONS, prompt=prompts[0], echo=True, max_tokens=0)
    assert text_of(choices) == prompts[0]
    assert choices[-1]["finish_reason"] == "length"


async def test_bb_26_the_server_lives_afterwards(session: aiohttp.ClientSession) -> None:
    assert len((await whole(session, COMPLETIONS, prompt="hi", max_tokens=2))["choices"]) == 1


async def test_bb_27_null_is_the_default_and_a_tiny_temperature_is_nearly_greedy(
    session: aiohttp.ClientSession,
) -> None:
    names = (
        *("top_p", "top_k", "min_p", "stop", "seed", "n", "logprobs", "logit_bias", "presence_penalty", "min_tokens"),
        *("frequency_penalty", "repetition_penalty", "stop_token_ids", "best_of", "stream_options", "user", "echo"),
    )
    greedy, with_nulls, cold = await asyncio.gather(
        text(session, **ALPHABET),
        text(session, **ALPHABET, **dict.fromkeys(names)),
        text(session, **{**ALPHABET, "temperature": 0.0001}),
    )
    assert greedy == with_nulls == cold
    nulls = dict.fromkeys(("temperature", "top_p", "stop", "seed", "max_tokens"))
    answer, chat, left_out = await asyncio.gather(
        whole(session, COMPLETIONS, prompt="hi", ignore_eos=True, **nulls),
        whole(session, CHAT, **HI, **{**nulls, "temperature": 0}),
        whole(session, CHAT, **HI, temperature=0),
    )
    assert answer["usage"]["completion_tokens"] == 16, "that many are the default of completions"
    assert answer["choices"][0]["finish_reason"] == "length"
    said = chat["choices"][0]
    assert "red" in said["message"]["content"].lower()
    assert said["finish_reason"] == "stop"
    assert said["message"] == left_out["choices"][0]["message"]


# -- what each parameter does -----------------------------------------------------------------------------------------


async def test_a_banned_token_never_comes_and_a_wanted_one_comes_at_once(session: aiohttp.ClientSession) -> None:
    async with session.post("/tokenize", json={"model": NAME, "prompt": "D"}) as response:
        (letter,) = (await response.json())["tokens"]
    free, wanted, stopped, banned = await asyncio.gather(
        text(session, **ALPHABET),
        text(session, **{**ALPHABET, "max_tokens": 4}, logit_bias={str(letter): 100}),
        whole(
            session,
            COMPLETIONS,
            **ALPHABET,
            logit_bias={str(letter): 100},
            stop_token_ids=[letter],
            min_tokens=3,
            logprobs=0,
        ),
        whole(session, COMPLETIONS, **ALPHABET, logit_bias={str(letter): -100}, logprobs=0),
    )
    assert "D" in free
    assert wanted == "DDDD"
    assert "D" not in stopped["choices"][0]["logprobs"]["tokens"]
    assert len(stopped["choices"][0]["logprobs"]["tokens"]) == 3, "what ends an answer is counted and not told"
    assert (stopped["choices"][0]["finish_reason"], stopped["usage"]["completion_tokens"]) == ("stop", 4)
    assert "D" not in banned["choices"][0]["logprobs"]["tokens"]


async def test_penalties_make_an_answer_repeat_itself_less(session: aiohttp.ClientSession) -> None:
    asked = {
        "prompt": "no no no no no no no no no no no no no no no",
        "temperature": 0,
        "max_tokens": 30,
        "ignore_eos": True,
        "logprobs": 0,
    }
    penalties: tuple[dict[str, float], ...] = (
        {},
        {"presence_penalty": 2},
        {"frequency_penalty": 2},
        {"repetition_penalty": 2},
    )
    answers = await asyncio.gather(*(whole(session, COMPLETIONS, **asked, **penalty) for penalty in penalties))
    different = [len(set(answer["choices"][0]["logprobs"]["tokens"])) for answer in answers]
    assert all(count > different[0] for count in different[1:]), different


async def test_min_p_of_one_and_top_k_of_one_are_greedy(session: aiohttp.ClientSession) -> None:
    greedy, *others = await asyncio.gather(
        text(session, **ALPHABET),
        *(text(session, **{**ALPHABET, "temperature": 1.5}, **one) for one in ({"min_p": 1.0}, {"top_k": 1})),
    )
    assert others == [greedy, greedy]


async def test_an_answer_is_not_shorter_than_min_tokens(session: aiohttp.ClientSession) -> None:
    asked = {"messages": [{"role": "user", "content": "Say hi."}], "temperature": 0}
    short = await whole(session, CHAT, **asked)
    assert short["choices"][0]["finish_reason"] == "stop"
    least = short["usage"]["completion_tokens"] + 20
    longer = await whole(session, CHAT, **asked, min_tokens=least, max_tokens=least + 5)
    assert longer["usage"]["completion_tokens"] >= least
    assert longer["choices"][0]["message"]["content"].startswith(short["choices"][0]["message"]["content"])


# -- n and best_of ----------------------------------------------------------------------------------------------------


async def test_n_answers_are_those_of_their_seeds_and_share_the_prompt(up: Up, session: aiohttp.ClientSession) -> None:
    long = " ".join(f"colour number {number} is" for number in range(60))
    asked = {"prompt": long, "temperature": 2.0, "max_tokens": 12, "seed": 11, "ignore_eos": True}
    hits = "slipstream_prefix_cache_hits_total"
    before = (await figures(up))[hits]
    several = await whole(session, COMPLETIONS, **asked, n=3)
    texts = [choice["text"] for choice in several["choices"]]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert several["usage"]["completion_tokens"] == 36
    prompt_tokens = several["usage"]["prompt_tokens"]
    # the siblings found it; a leader tells its counts once a second
    await eventually(lambda found: found[hits] - before >= 2 * (prompt_tokens - 16), up)
    alone, again, choices = await asyncio.gather(
        text(session, **asked),
        whole(session, COMPLETIONS, **asked, n=3),
        streamed(session, COMPLETIONS, **asked, n=3),
    )
    assert texts[0] == alone
    assert [choice["text"] for choice in again["choices"]] == texts
    for index, one in enumerate(texts):
        assert text_of([choice for choice in choices if choice["index"] == index]) == one


async def test_best_of_tells_the_likeliest_by_token(session: aiohttp.ClientSession) -> None:
    asked = {"prompt": "The sea is", "temperature": 1.5, "max_tokens": 8, "seed": 2, "ignore_eos": True, "logprobs": 0}
    every, best = await asyncio.gather(
        whole(session, COMPLETIONS, **asked, n=4), whole(session, COMPLETIONS, **asked, n=1, best_of=4)
    )
    means = {choice["text"]: sum(choice["logprobs"]["token_logprobs"]) for choice in every["choices"]}
    assert best["choices"][0]["text"] == max(means, key=means.__getitem__)
    assert best["usage"]["completion_tokens"] == 32


async def test_several_prompts_are_answered_as_if_alone(session: aiohttp.ClientSession) -> None:
    prompts = ["The sea is", "One, two,", "Roses are"]
    asked = {"temperature": 0, "max_tokens": 6}
    together, *alone = await asyncio.gather(
        whole(session, COMPLETIONS, prompt=prompts, **asked), *(text(session, prompt=one, **asked) for one in prompts)
    )
    assert [choice["text"] for choice in together["choices"]] == alone


async def test_openais_own_client_reads_choices_and_logprobs(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=NAME, **HI, n=2, logprobs=True, top_logprobs=1, max_tokens=5, seed=1, presence_penalty=0.5
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) == 5
