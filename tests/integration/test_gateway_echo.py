"""The prompt before the answer, with logprobs or without, whole and streamed (BB-19), whatever gets lost meanwhile."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from services.gateway.desk import TOLD_AT_ONCE
from services.worker.fake_tokenizer import EOS_ID
from shared.ids import WorkerId
from shared.protocol.messages import Finish, Logprobs, Ranked, SubmitRequest, TokenBatch, TokenRow
from tests.integration.gateway_pool import WORKER, Setting, each_event, events, gateway, text_of

ANOTHER = WorkerId("worker-2.1")
BOTH = pytest.mark.parametrize("stream", [False, True])
Playing = Callable[[Setting], Coroutine[Any, Any, None]]


def told(token_id: int, place: int, most: int | None) -> Logprobs:
    """Tell of each token its place as its logprob, and the next letter as likelier."""
    return Logprobs(-float(place), (Ranked(token_id + 1, -0.25), Ranked(token_id, -float(place)))[:most])


async def of_prompt(setting: Setting, to: SubmitRequest, first: int, end: int, worker: WorkerId = WORKER) -> None:
    """Bring what a step computed of a prompt, and no token."""
    most = to.sampling.prompt_logprobs
    assert most is not None
    scored = tuple(told(to.prompt_ids[place], place, most) for place in range(first, end))
    row = TokenRow(to.request, to.attempt, 0, (), prompt_first=first, prompt_logprobs=scored)
    await setting.pool.say(TokenBatch(worker, (row,)), to.gateway)


async def tokens(
    setting: Setting,
    to: SubmitRequest,
    data: bytes | list[int],
    *,
    first: int = 0,
    finish: Finish | None = "length",
    worker: WorkerId = WORKER,
) -> None:
    """Bring tokens of the answer."""
    most = to.sampling.logprobs
    places = enumerate(data, start=first + len(to.prompt_ids))
    logprobs = () if most is None else tuple(told(token_id, place, most) for place, token_id in places)
    row = TokenRow(to.request, to.attempt, first, tuple(data), finish, logprobs=logprobs)
    await setting.pool.say(TokenBatch(worker, (row,)), to.gateway)


async def complete(setting: Setting, play: Playing, **fields: Any) -> list[Any]:
    """Return the chunks of a stream with their usage, or the one answer."""
    options = {"stream_options": {"include_usage": True}} if fields.get("stream") else {}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(play(setting))
        async with setting.client.complete(**options, **fields) as response:
            assert response.status == 200, await response.text()
            return await events(response) if fields.get("stream") else [await response.json()]


def choices_of(chunks: list[Any], index: int = 0) -> list[Any]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def lists_of(choices: list[Any]) -> dict[str, list[Any]]:
    """Return the parallel lists of one choice, those of its pieces joined."""
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            found[name] += values
    assert len({len(values) for values in found.values()}) == 1
    return found


async def in_two_steps(setting: Setting) -> None:
    submit = await setting.pool.next(SubmitRequest)
    last = len(submit.prompt_ids)
    await of_prompt(setting, submit, 1, 2)
    await of_prompt(setting, submit, 2, last)
    await tokens(setting, submit, b"xy")


# -- text ---------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("prompt", ["né 👍", list("né 👍".encode())])
async def test_the_prompt_comes_before_the_answer_and_in_the_first_event(*, prompt: Any, stream: bool) -> None:
    async def play(setting: Setting) -> None:
        submit = await setting.pool.next(SubmitRequest)
        assert (submit.prompt_ids, submit.max_tokens) == (tuple("né 👍".encode()), 2)
        assert submit.sampling.prompt_logprobs is None
        await tokens(setting, submit, b"x", finish=None)
        await tokens(setting, submit, b"y", first=1)

    async with gateway() as setting:
        chunks = await complete(setting, play, prompt=prompt, echo=True, max_tokens=2, stream=stream)
    assert text_of(chunks) == "né 👍xy"
    choices = choices_of(chunks)
    assert choices[0]["text"].startswith("né 👍")
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert all(choice["logprobs"] is None for choice in choices)
    assert chunks[-1]["usage"]["completion_tokens"] == 2


@BOTH
async def test_a_stop_string_is_looked_for_in_the_answer_alone(*, stream: bool) -> None:
    async def play(setting: Setting) -> None:
        submit = await setting.pool.next(SubmitRequest)
        await of_prompt(setting, submit, 1, len(submit.prompt_ids))
        await tokens(setting, submit, b"ND so END", finish=None)

    async with gateway() as setting:
        chunks = await complete(setting, play, prompt="END E", echo=True, logprobs=0, stop=["END"], stream=stream)
    assert text_of(chunks) == "END END so "
    choices = choices_of(chunks)
    assert "".join(lists_of(choices)["tokens"]) == "END END so "
    assert choices[-1]["finish_reason"] == "stop"


@BOTH
async def test_each_choice_of_each_prompt_repeats_its_own(*, stream: bool) -> None:
    async def play(setting: Setting) -> None:
        asked = [await setting.pool.next(SubmitRequest) for _ in range(4)]
        for number, submit in reversed(list(enumerate(asked))):
            await tokens(setting, submit, f"<{number}>".encode())

    async with gateway() as setting:
        chunks = await complete(setting, play, prompt=["one", "two"], n=2, echo=True, stream=stream)
    texts = {index: text_of([{"choices": choices_of(chunks, index)}]) for index in range(4)}
    assert texts == {0: "one<0>", 1: "one<1>", 2: "two<2>", 3: "two<3>"}


# -- the prompt alone -----------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("finish", ["length", "stop"])
async def test_with_no_tokens_asked_for_the_prompt_is_the_answer(*, finish: Finish, stream: bool) -> None:
    async def play(setting: Setting) -> None:
        submit = await setting.pool.next(SubmitRequest)
        assert (submit.max_tokens, submit.sampling.prompt_logprobs) == (1, 1)
        await of_prompt(setting, submit, 1, 3)
        await tokens(setting, submit, [EOS_ID] if finish == "stop" else b"x", finish=finish)

    async with gateway() as setting:
        chunks = await complete(setting, play, prompt="abc", echo=True, logprobs=1, max_tokens=0, stream=stream)
        assert await setting.client.metric("slipstream_generation_tokens_total") == 0
    choices = choices_of(chunks)
    assert text_of(chunks) == "abc"
    assert choices[-1]["finish_reason"] == "length"
    assert lists_of(choices)["tokens"] == ["a", "b", "c"]
    assert {name: chunks[-1]["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "total_tokens": 3,
    }


async def test_the_prompt_alone_may_be_answered_several_times() -> None:
    async def play(setting: Setting) -> None:
        for _ in range(2):
            await tokens(setting, await setting.pool.next(SubmitRequest), b"x")

    async with gateway() as setting:
        chunks = await complete(setting, play, prompt="abc", echo=True, max_tokens=0, n=2)
    assert [choice["text"] for choice in chunks[0]["choices"]] == ["abc", "abc"]
    assert chunks[0]["usage"]["completion_tokens"] == 0


async def test_no_tokens_without_echo_is_a_400_that_names_the_field_before_any_work() -> None:
    async with gateway() as setting:
        for fields in ({}, {"echo": False}, {"stream": True}):
            async with setting.client.complete(max_tokens=0, **fields) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == "max_tokens"
        async with setting.client.chat(echo=True) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "echo")
        assert await setting.pool.nothing_more()


# -- logprobs -------------------------------------------------------------------------------------------------------


async def test_bb_19_the_lists_cover_prompt_and_answer_and_a_stream_tells_the_same() -> None:
    async with gateway() as setting:
        asked = {"prompt": "né!", "echo": True, "logprobs": 2, "max_tokens": 2}
        chunks = await complete(setting, in_two_steps, **asked)
        pieces = await complete(setting, in_two_steps, **asked, stream=True)
    lists = lists_of(choices_of(chunks))
    assert lists["tokens"] == ["n", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}", "!", "x", "y"]
    assert lists["text_offset"] == [0, 1, 1, 2, 3, 4]
    assert lists["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0, -5.0]
    assert lists["top_logprobs"][0] is None
    assert lists["top_logprobs"][3] == {'"': -0.25, "!": -3.0}
    assert lists["top_logprobs"][4] == {"y": -0.25, "x": -4.0}
    assert lists_of(choices_of(pieces)) == lists
    assert text_of(chunks) == text_of(pieces) == "né!xy"
    first = choices_of(pieces)[0]
    assert first["text"].startswith("né!")
    assert first["logprobs"]["tokens"][:4] == lists["tokens"][:4]


async def test_a_prompt_of_one_token_has_nothing_to_be_told_of() -> None:
    async def play(setting: Setting) -> None:
        await tokens(setting, await setting.pool.next(SubmitRequest), b"x")

    async with gateway() as setting:
        chunks = await complete(setting, play, prompt="a", echo=True, logprobs=0, max_tokens=1)
    assert lists_of(choices_of(chunks)) == {
        "tokens": ["a", "x"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {"x": -1.0}],
        "text_offset": [0, 1],
    }


@BOTH
async def test_one_choice_asks_about_the_prompt_for_all_and_none_is_told_before_it_is_known(*, stream: bool) -> None:
    async def play(setting: Setting) -> None:
        first, second = [await setting.pool.next(SubmitRequest) for _ in range(2)]
        assert (first.sampling.prompt_logprobs, second.sampling.prompt_logprobs) == (1, None)
        await tokens(setting, second, b"<2>")
        await of_prompt(setting, first, 1, 3)
        await tokens(setting, first, b"<1>")

    async with gateway() as setting:
        chunks = await complete(setting, play, prompt="abc", echo=True, logprobs=1, n=2, stream=stream)
    for index in range(2):
        choices = choices_of(chunks, index)
        assert text_of([{"choices": choices}]) == f"abc<{index + 1}>"
        assert lists_of(choices)["token_logprobs"] == [None, -1, -2, -3, -4, -5]
        assert choices[0]["logprobs"]["tokens"][:3] == ["a", "b", "c"]


async def test_what_comes_twice_gets_lost_or_comes_from_a_dead_worker_is_told_once() -> None:
    async def play(setting: Setting) -> None:
        first = await setting.pool.next(SubmitRequest)
        await of_prompt(setting, first, 1, 3)
        await of_prompt(setting, first, 1, 3)
        await of_prompt(setting, first, 2, 4)
        await setting.pool.held(read_to=setting.pool.read_to)
        second = await setting.pool.next(SubmitRequest)
        assert (second.attempt, second.sampling, second.output_ids) == (2, first.sampling, ())
        await of_prompt(setting, first, 4, 6)
        await of_prompt(setting, second, 1, 5, ANOTHER)
        await tokens(setting, second, b"!", finish=None, worker=ANOTHER)
        third = await setting.pool.next(SubmitRequest)
        assert (third.attempt, third.output_ids) == (3, ()), "a token before the whole prompt is a loss"
        await of_prompt(setting, third, 1, 6)
        await tokens(setting, third, b"x", finish=None)
        await setting.pool.held(read_to=setting.pool.read_to)
        fourth = await setting.pool.next(SubmitRequest)
        assert fourth.output_ids == tuple(b"x")
        assert fourth.sampling.prompt_logprobs is None, "all of the prompt has been told"
        await tokens(setting, fourth, b"y", first=1, worker=ANOTHER)

    async with gateway() as setting:
        chunks = await complete(setting, play, prompt="prompt", echo=True, logprobs=0, max_tokens=2)
    assert text_of(chunks) == "promptxy"
    assert lists_of(choices_of(chunks))["token_logprobs"] == [None, -1, -2, -3, -4, -5, -6, -7]


async def test_a_client_that_leaves_while_its_prompt_is_computed_harms_nobody() -> None:
    async with gateway() as setting:
        async with asyncio.TaskGroup() as tasks:
            opening = tasks.create_task(setting.client.complete(echo=True, logprobs=0).__aenter__())
            submit = await setting.pool.next(SubmitRequest)
            opening.cancel()
        await of_prompt(setting, submit, 1, 2)
        chunks = await complete(setting, in_two_steps, prompt="abc", echo=True, logprobs=0, max_tokens=2)
        assert text_of(chunks) == "abcxy"


async def test_a_failure_is_told_though_the_prompt_never_was() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.complete(echo=True, logprobs=0, n=2, stream=True).__aenter__())
        first, second = [await setting.pool.next(SubmitRequest) for _ in range(2)]
        await tokens(setting, second, b"x")
        await tokens(setting, first, b"", finish="error")
        async with await opening as response:
            assert response.status == 500 or "error" in [event async for event in each_event(response)][-2]


@BOTH
async def test_what_is_told_of_a_long_prompt_is_whole_though_it_is_written_aside(stream: bool) -> None:
    prompt = [97 + place % 26 for place in range(TOLD_AT_ONCE + 100)]

    async def play(setting: Setting) -> None:
        submit = await setting.pool.next(SubmitRequest)
        await of_prompt(setting, submit, 1, len(prompt))
        await tokens(setting, submit, b"xy")

    async with gateway() as setting:
        setting.pool.report = msgspec.structs.replace(setting.pool.report, length_served=10 * len(prompt))
        await setting.pool.held()
        chunks = await complete(setting, play, prompt=prompt, max_tokens=2, echo=True, logprobs=1, stream=stream)
    found = lists_of(choices_of(chunks))
    assert "".join(found["tokens"]) == text_of(chunks) == bytes(prompt).decode() + "xy"
    assert found["token_logprobs"] == [None, *(-float(place) for place in range(1, len(prompt) + 2))]
    assert found["text_offset"] == list(range(len(prompt) + 2))
