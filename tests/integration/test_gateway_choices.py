"""Several answers to one request: requests of their own, told by their index, all in line or none."""

import asyncio
from typing import Any

import pytest

from services.gateway.asked_sampling import sampling_of_choice
from shared.ids import RequestId
from shared.protocol import names
from shared.protocol.codec import encode
from shared.protocol.messages import CancelRequest, Logprobs, SubmitRequest, TokenBatch, TokenRow
from tests.integration.gateway_pool import MODEL, WORKER, Setting, events, gateway

STREAM = {"stream": True, "stream_options": {"include_usage": True}}


async def submissions(setting: Setting, count: int) -> list[SubmitRequest]:
    return [await setting.pool.next(SubmitRequest) for _ in range(count)]


async def answered(setting: Setting, count: int) -> list[SubmitRequest]:
    """Answer each with its number, the last first."""
    asked = await submissions(setting, count)
    for number, submit in reversed(list(enumerate(asked))):
        await setting.pool.tokens(submit, f"<{number}".encode(), cached=1)
        await setting.pool.tokens(submit, b">", first=2, finish="length")
    return asked


async def answer(setting: Setting, count: int, **fields: Any) -> tuple[list[SubmitRequest], list[Any]]:
    """Return what the pool was asked, and the answer or all of its chunks."""
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(answered(setting, count))
        async with setting.client.complete(**fields) as response:
            assert response.status == 200, await response.text()
            chunks = await events(response) if fields.get("stream") else [await response.json()]
    return asked.result(), chunks


def texts(chunks: list[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


@pytest.mark.parametrize("fields", [{}, STREAM])
async def test_n_answers_have_an_index_each_and_the_prompt_counts_once(fields: dict[str, Any]) -> None:
    async with gateway() as setting:
        asked, chunks = await answer(setting, 3, n=3, prompt="hello", seed=5, **fields)
    assert texts(chunks) == {0: "<0>", 1: "<1>", 2: "<2>"}
    finishes = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert finishes == ["length"] * 3
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 9, 14)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    assert len({chunk["id"] for chunk in chunks}) == 1
    base = chunks[0]["id"]
    assert [submit.request for submit in asked] == [f"{base}/{number}" for number in range(3)]
    assert [submit.shares_with for submit in asked] == ["", f"{base}/0", f"{base}/0"]
    first = asked[0].sampling
    assert first.seed == 5
    assert [submit.sampling for submit in asked] == [sampling_of_choice(first, number) for number in range(3)]


@pytest.mark.parametrize("fields", [{}, STREAM])
async def test_k_prompts_have_n_answers_each_in_their_order(fields: dict[str, Any]) -> None:
    async with gateway() as setting:
        asked, chunks = await answer(setting, 4, n=2, prompt=["a", [98, 99]], seed=5, **fields)
    assert texts(chunks) == {number: f"<{number}>" for number in range(4)}
    assert [submit.prompt_ids for submit in asked] == [(97,), (97,), (98, 99), (98, 99)]
    base = chunks[0]["id"]
    assert [submit.shares_with for submit in asked] == ["", f"{base}/0", "", f"{base}/2"]
    assert [submit.sampling.seed for submit in asked[:2]] == [submit.sampling.seed for submit in asked[2:]]
    assert chunks[-1]["usage"]["prompt_tokens"] == 3


async def test_one_answer_keeps_the_id_of_its_request_and_waits_for_nobody() -> None:
    async with gateway() as setting:
        (submit,), (whole,) = await answer(setting, 1, n=1)
    assert (submit.request, submit.shares_with) == (whole["id"], "")


async def test_a_stream_of_chats_names_the_role_of_each_choice_before_its_text() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        tasks.create_task(answered(setting, 2))
        async with setting.client.chat(n=2, stream=True) as response:
            choices = [choice for chunk in await events(response) for choice in chunk["choices"]]
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["delta"].get("role") for choice in own[1:]] == [None] * (len(own) - 1)
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]


async def test_the_best_of_several_are_those_likeliest_by_token_and_all_of_them_are_paid_for() -> None:
    by_token = {0: -2.0, 1: -0.5, 2: -3.0, 3: -0.1}
    async with gateway() as setting:

        async def bring() -> None:
            for number, submit in enumerate(await submissions(setting, 4)):
                assert submit.sampling.logprobs == 0
                text = f"{number}" * (1 + 3 * (number == 3))  # the longest is the least likely as a whole
                logprobs = tuple(Logprobs(by_token[number]) for _ in text)
                row = TokenRow(submit.request, 1, 0, tuple(text.encode()), "length", logprobs=logprobs)
                await setting.pool.say(TokenBatch(WORKER, (row,)), submit.gateway)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bring())
            async with setting.client.complete(n=2, best_of=4) as response:
                whole = await response.json()
    assert [(one["index"], one["text"], one["logprobs"]) for one in whole["choices"]] == [
        (0, "3333", None),
        (1, "1", None),
    ]
    assert whole["usage"]["completion_tokens"] == 7


async def test_a_line_that_has_no_room_for_all_takes_none_of_them() -> None:
    async with gateway(max_queue=4) as setting:
        waiting = [
            SubmitRequest(RequestId(f"w{number}"), 1, await setting.pool.gateway(), (1,), 1) for number in range(2)
        ]
        await setting.bus.enqueue(names.requests(MODEL), [encode(one) for one in waiting], bound=None)
        async with setting.client.complete(n=3) as response:
            assert response.status == 429
            assert "Retry-After" in response.headers
        assert [one.request for one in await submissions(setting, 2)] == ["w0", "w1"]
        assert await setting.pool.nothing_more()
        assert await setting.client.metric('slipstream_requests_finished_total{reason="rejected"}') == 3


async def test_more_answers_than_the_line_ever_holds_are_refused_by_name() -> None:
    async with gateway(max_queue=4) as setting:
        async with setting.client.complete(n=5) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "n")
        assert await setting.pool.nothing_more()


async def test_a_client_that_leaves_cancels_all_of_its_answers() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:

        async def begin_one() -> list[SubmitRequest]:
            asked = await submissions(setting, 3)
            await setting.pool.tokens(asked[1], b"a")
            return asked

        begun = tasks.create_task(begin_one())
        async with setting.client.complete(n=3, stream=True) as response:
            asked = await begun
            response.close()
        cancelled = {(await setting.pool.next(CancelRequest)).request for _ in asked}
        assert cancelled == {submit.request for submit in asked}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_fails_fails_the_request_and_ends_the_others(*, stream: bool) -> None:
    async with gateway() as setting:

        async def fail_one() -> list[SubmitRequest]:
            asked = await submissions(setting, 2)
            await setting.pool.tokens(asked[0], b"a")
            await setting.pool.tokens(asked[1], b"", finish="error")
            return asked

        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(fail_one())
            async with setting.client.complete(n=2, stream=stream) as response:
                if response.status == 200:
                    chunks = await events(response)
                    assert chunks[-1]["error"]["code"] == "generation_failed"
                else:
                    assert (response.status, (await response.json())["error"]["code"]) == (500, "generation_failed")
        cancelled = await setting.pool.next(CancelRequest)
        assert cancelled.request == asked.result()[0].request


async def test_a_sibling_that_is_lost_is_asked_for_again_alone() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:

        async def lose_one() -> None:
            asked = await submissions(setting, 2)
            await setting.pool.tokens(asked[0], b"x", finish="length")
            await setting.pool.tokens(asked[1], b"z", first=3)
            again = await setting.pool.next(SubmitRequest)
            assert (again.request, again.attempt, again.shares_with) == (asked[1].request, 2, asked[0].request)
            assert again.sampling == asked[1].sampling
            await setting.pool.tokens(again, b"y", finish="length")

        tasks.create_task(lose_one())
        async with setting.client.complete(n=2) as response:
            assert texts([await response.json()]) == {0: "x", 1: "y"}
