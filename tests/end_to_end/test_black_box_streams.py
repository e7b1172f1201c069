"""Black-box cases of the shape of a stream, by number, against `slipstream up` with the default model."""

import asyncio
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from tests.end_to_end.answers import CHAT, COMPLETIONS, whole
from tests.end_to_end.answers import chunks as chunks_of
from tests.integration.processes import Up

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

Fields = dict[str, Any]


@pytest.fixture(scope="module")
def up(float32_up: Up) -> Up:
    return float32_up


# -- BB-17: what every chunk carries ----------------------------------------------------------------------------------

QUESTION: Fields = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 30,
}
WITH_USAGE: Fields = {"include_usage": True}
CONTINUOUS: Fields = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("options", [None, {}, WITH_USAGE, CONTINUOUS])
async def test_bb_17_chunks_share_a_head_begin_with_the_role_end_with_one_reason_and_count_as_asked(
    session: aiohttp.ClientSession, options: Fields | None
) -> None:
    asked = QUESTION if options is None else {**QUESTION, "stream_options": options}
    answer, chunks = await asyncio.gather(whole(session, CHAT, **QUESTION), chunks_of(session, CHAT, **asked))
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    with_choices = [chunk for chunk in chunks if chunk["choices"]]
    choices = [choice for chunk in with_choices for choice in chunk["choices"]]
    assert choices[0]["delta"]["role"] == "assistant"
    assert not any("role" in choice["delta"] for choice in choices[1:])
    (expected,) = answer["choices"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [expected["finish_reason"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == expected["message"]["content"]
    check_usage(options or {}, chunks, with_choices, answer["usage"])


def check_usage(options: Fields, chunks: list[Any], with_choices: list[Any], expected: Fields) -> None:
    """The count comes last, in a chunk without choices, if it was asked for; else no chunk has any."""
    if not options:
        assert chunks == with_choices
        assert not any("usage" in chunk for chunk in chunks)
        return
    assert chunks[:-1] == with_choices
    counted = ("prompt_tokens", "completion_tokens", "total_tokens")
    last = chunks[-1]["usage"]
    assert [last[name] for name in counted] == [expected[name] for name in counted]
    if options == WITH_USAGE:
        assert all(chunk["usage"] is None for chunk in with_choices)
        return
    of_text = [chunk for chunk in with_choices if chunk["choices"][0]["delta"].get("content")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in of_text]
    assert counts == sorted(counts)
    assert 2 < len(set(counts)) <= expected["completion_tokens"], "it counts while it grows"


# -- BB-21: characters of several tokens ------------------------------------------------------------------------------

CHARACTERS = "👩‍🚀🇩🇪 日本語 ﷽\n"
CUT_OFF = "\ufffd"


async def ids_of(session: aiohttp.ClientSession, text: str) -> list[int]:
    answer = await whole(session, "/tokenize", prompt=text, add_special_tokens=False)
    found: list[int] = answer["tokens"]
    return found


async def check_copy(session: aiohttp.ClientSession, before: str, rest: str, most: int) -> list[str]:
    """Have some lines copied from a place on, by token ids; return the text of each length, 1 to ``most`` tokens."""
    prompt = await ids_of(session, CHARACTERS * 4 + before)

    async def check(tokens: int) -> str:
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer, chunks = await asyncio.gather(
            whole(session, COMPLETIONS, **asked), chunks_of(session, COMPLETIONS, **asked)
        )
        text: str = answer["choices"][0]["text"]
        pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(pieces) == text
        assert rest.startswith(text.removesuffix(CUT_OFF)), (text, "the copy: every space, and nothing else")
        spoilt = [piece for piece in pieces if CUT_OFF in piece]
        assert len(spoilt) == int(text.endswith(CUT_OFF)), pieces
        assert answer["usage"]["completion_tokens"] == tokens
        return text

    return await asyncio.gather(*map(check, range(1, most + 1)))


async def test_bb_21_no_chunk_ends_within_a_character_wherever_the_answer_is_cut(
    session: aiohttp.ClientSession,
) -> None:
    line = await ids_of(session, CHARACTERS)
    befores = [CHARACTERS[:place] for place in range(len(CHARACTERS))]
    heads = await asyncio.gather(*(ids_of(session, before) for before in befores))
    # a space alone is another token than one before a word: the copy does not go on as it began
    places = [place for place, head in enumerate(heads) if line[: len(head)] == head]
    assert len(places) > len(CHARACTERS) // 2
    rests = [(CHARACTERS[:place], CHARACTERS[place:] + CHARACTERS) for place in places]
    swept = await asyncio.gather(*(check_copy(session, before, rest, most=8) for before, rest in rests))
    for texts in swept:
        grown = [text.removesuffix(CUT_OFF) for text in texts]
        assert all(longer.startswith(shorter) for shorter, longer in pairwise(grown))
        assert len(grown[-1]) >= 2
    ends = [text.endswith(CUT_OFF) for texts in swept for text in texts]
    assert ends.count(True) > len(ends) // 4, "many of them were cut within a character"
