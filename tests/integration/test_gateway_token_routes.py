"""/tokenize and /detokenize over real HTTP: what the gateway itself makes of texts and tokens."""

import asyncio
from typing import Any

import aiohttp
import pytest

from services.gateway import app
from services.gateway.token_routes import MAX_CHARACTERS
from services.worker.fake_tokenizer import EOS_ID, VOCABULARY
from shared.protocol.messages import SubmitRequest
from tests.integration.gateway_pool import LENGTH_SERVED, MODEL, Setting, SlowTokenizer, gateway

TEXT = "a \u00e9 \U0001f469\u200d\U0001f680 \u65e5"
USER = {"role": "user", "content": "hi"}


async def post(setting: Setting, path: str, **body: Any) -> tuple[int, Any]:
    async with setting.client.session.post(path, json=body) as response:
        return response.status, await response.json()


async def test_a_text_becomes_its_tokens_and_they_become_the_text() -> None:
    async with gateway() as setting:
        status, answer = await post(setting, "/tokenize", model=MODEL, prompt=TEXT)
        assert status == 200
        assert bytes(answer["tokens"]) == TEXT.encode()
        assert (answer["count"], answer["max_model_len"]) == (len(TEXT.encode()), LENGTH_SERVED)
        assert answer["token_strs"] is None
        assert await post(setting, "/detokenize", model=MODEL, tokens=answer["tokens"]) == (200, {"prompt": TEXT})
        assert await setting.pool.nothing_more(), "no worker has heard of it"


async def test_a_chat_has_the_tokens_that_a_worker_would_get() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(setting.client.chat().__aenter__())
        submit = await setting.pool.next(SubmitRequest)
        await setting.pool.tokens(submit, b"x", finish="length")
        (await asked).release()
        _, answer = await post(setting, "/tokenize", messages=[USER])
        assert tuple(answer["tokens"]) == submit.prompt_ids


async def test_tokens_have_names_and_special_ones_a_text() -> None:
    async with gateway() as setting:
        _, answer = await post(setting, "/tokenize", prompt="a<|end|>", return_token_strs=True, model=None)
        assert answer["tokens"] == [ord("a"), EOS_ID]
        assert answer["token_strs"] == ["a", "<|end|>"]
        assert (await post(setting, "/detokenize", tokens=[ord("a"), EOS_ID]))[1] == {"prompt": "a<|end|>"}
        assert (await post(setting, "/detokenize", tokens=[]))[1] == {"prompt": ""}


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": [USER]}, 400, "prompt"),
    ("/tokenize", {"prompt": 1}, 400, "prompt"),
    ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
    ("/tokenize", {"messages": []}, 400, "messages"),
    ("/tokenize", {"messages": [USER], "add_generation_prompt": False}, 400, "add_generation_prompt"),
    ("/tokenize", {"prompt": "x", "nonsense": 1}, 400, "nonsense"),
    ("/tokenize", {"prompt": "x" * (MAX_CHARACTERS + 1)}, 400, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x" * MAX_CHARACTERS}]}, 400, "messages"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
    ("/detokenize", {"tokens": [VOCABULARY]}, 400, "tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
    ("/detokenize", {"tokens": [2**70]}, 400, "tokens[0]"),
    ("/detokenize", {"tokens": [10**4000]}, 400, "tokens[0]"),
    ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
]


async def test_what_cannot_be_turned_is_refused_by_name() -> None:
    async with gateway() as setting:
        for path, body, status, param in BAD:
            got, answer = await post(setting, path, **body)
            assert (got, answer["error"]["param"]) == (status, param), (path, str(body)[:80], answer)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_without_a_tokenizer_there_is_a_503(path: str) -> None:
    async with gateway(is_up=False) as setting:
        status, answer = (
            await post(setting, path, prompt="x") if path == "/tokenize" else await post(setting, path, tokens=[1])
        )
        assert (status, answer["error"]["code"]) == (503, "not_ready")


async def test_as_many_texts_at_once_as_there_is_room_for_and_the_others_get_a_429() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(post(setting, "/tokenize", prompt="x" * 100_000)) for _ in range(40)]
        statuses = {(await one)[0] for one in asked}
    assert statuses == {200, 429}


async def test_texts_take_no_places_of_requests_that_generate() -> None:
    async with gateway(max_queue=1) as setting, asyncio.TaskGroup() as tasks:
        texts = [tasks.create_task(post(setting, "/tokenize", prompt="x" * 100_000)) for _ in range(10)]
        asked = tasks.create_task(setting.client.complete().__aenter__())
        submit = await setting.pool.next(SubmitRequest)
        await setting.pool.tokens(submit, b"x", finish="length")
        response = await asked
        assert response.status == 200
        response.release()
        assert {(await one)[0] for one in texts} == {200}


ASKED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/tokenize", {"prompt": "hi"}, {"tokens": [ord("h"), ord("i")]}),
    ("/detokenize", {"tokens": [ord("h"), ord("i")]}, {"prompt": "hi"}),
]


@pytest.mark.parametrize(("path", "body", "answer"), ASKED)
async def test_a_text_that_is_being_turned_when_the_gateway_stops_is_answered(
    path: str, body: dict[str, Any], answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "SHUTDOWN_S", 0.05)  # what handlers get when nothing is waited for any more
    slow = SlowTokenizer(monkeypatch)
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(setting, path, **body))
        await slow.begun.wait()
        setting.stopping.set()
        await setting.client.until_ready(status=503)
        assert (await post(setting, path, **body))[0] == 503, "newcomers are told"
        assert not asked.done()
        slow.go_on.set()
        status, got = await asked
        assert status == 200
        assert answer.items() <= got.items()


async def test_a_text_that_takes_longer_than_the_drain_does_not_hold_up_the_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "SHUTDOWN_S", 0.05)
    slow = SlowTokenizer(monkeypatch)

    async def ask_in_vain(setting: Setting) -> None:
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await post(setting, "/tokenize", prompt="hi")

    try:
        async with gateway(drain_s=0.1) as setting, asyncio.TaskGroup() as tasks:
            tasks.create_task(ask_in_vain(setting))
            await slow.begun.wait()
            setting.stopping.set()
            await setting.ended
    finally:
        slow.go_on.set()
