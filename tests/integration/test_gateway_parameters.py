"""How urgent, whose, how salted a request is, and how much of it was cached: from the client to the pool and back."""

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI
from structlog.testing import capture_logs

from services.gateway.tenants import tenant_of
from shared.ids import WorkerId
from shared.protocol.messages import PoolReport, SubmitRequest
from tests.integration.gateway_pool import MODEL, Setting, events, gateway, until

ANOTHER = WorkerId("worker-2.1")
KEY = "sk-between-us-7f3a"
PROMPT = {"chat": {}, "complete": {"prompt": list(b"a prompt of some length")}}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
COUNTED = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


async def answered(setting: Setting, *, cached: int) -> SubmitRequest:
    submit = await setting.pool.next(SubmitRequest)
    await setting.pool.tokens(submit, b"o", cached=cached)
    await setting.pool.tokens(submit, b"k", first=1, finish="length")
    return submit


async def usages(setting: Setting, route: str, fields: dict[str, Any], *, cached: int) -> list[Any]:
    """Return every usage object of one answer."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answered(setting, cached=cached))
        async with getattr(setting.client, route)(**PROMPT[route], **fields) as response:
            assert response.status == 200
            chunks = await events(response) if fields.get("stream") else [await response.json()]
    return [chunk["usage"] for chunk in chunks if chunk.get("usage")]


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_every_usage_says_how_much_of_the_prompt_was_cached(route: str) -> None:
    async with gateway() as setting:
        for fields, least in (({}, 1), (STREAM, 1), (COUNTED, 2)):
            for cached in (0, 5):
                found = await usages(setting, route, fields, cached=cached)
                assert len(found) >= least
                assert {usage["prompt_tokens_details"]["cached_tokens"] for usage in found} == {cached}


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_never_more_is_cached_than_the_prompt_has(route: str) -> None:
    async with gateway() as setting:
        for usage in await usages(setting, route, {}, cached=10**6):
            assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]


async def test_openais_own_client_reads_what_was_cached_on_both_routes() -> None:
    async with gateway() as setting:
        base_url = f"http://127.0.0.1:{setting.port.result()}/v1"
        async with AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(answered(setting, cached=3))
                stream = await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": "hi"}],
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"priority": -5, "cache_salt": "s"},
                )
                usage = [chunk.usage async for chunk in stream][-1]
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            assert usage.prompt_tokens_details.cached_tokens == 3
            submit = asked.result()
            assert (submit.priority, submit.cache_salt, submit.tenant) == (-5, "s", tenant_of(f"Bearer {KEY}"))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(answered(setting, cached=2))
                whole = await client.completions.create(model=MODEL, prompt="hi")
            assert whole.usage is not None
            assert whole.usage.prompt_tokens_details is not None
            assert whole.usage.prompt_tokens_details.cached_tokens == 2


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_who_asks_for_nothing_special_is_neither_urgent_nor_salted_nor_anybody(route: str) -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(answered(setting, cached=0))
        async with getattr(setting.client, route)() as response:
            assert response.status == 200
    submit = asked.result()
    assert (submit.priority, submit.tenant, submit.cache_salt) == (0, "", "")


async def test_a_recovered_request_stays_as_urgent_whose_and_salted_as_it_was_and_keeps_its_first_cached_tokens() -> (
    None
):
    body = {"model": MODEL, "prompt": "a prompt", "priority": 42, "cache_salt": "mine"}
    headers = {"Authorization": f"Bearer {KEY}"}
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        post = setting.client.session.post("/v1/completions", json=body, headers=headers)
        opening = tasks.create_task(post.__aenter__())
        first = await setting.pool.next(SubmitRequest)
        await setting.pool.tokens(first, b"a", cached=2)
        await setting.pool.held(read_to=setting.pool.read_to)
        second = await setting.pool.next(SubmitRequest)
        await setting.pool.tokens(second, b"b", first=1, cached=8, finish="length", worker=ANOTHER)
        async with await opening as response:
            usage = (await response.json())["usage"]
    for attempt, submit in ((1, first), (2, second)):
        assert submit.attempt == attempt
        assert (submit.priority, submit.cache_salt) == (42, "mine")
        assert submit.tenant == tenant_of(f"Bearer {KEY}") != ""
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


async def test_a_clients_key_is_in_no_log_and_in_no_message() -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    with capture_logs() as logs:
        async with gateway() as setting, asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(answered(setting, cached=0))
            for fields, status in (({}, 200), ({"priority": 101}, 400), ({"n": KEY}, 400)):
                body = {"model": MODEL, "prompt": "hi", **fields}
                async with setting.client.session.post("/v1/completions", json=body, headers=headers) as response:
                    assert KEY not in await response.text()
                    assert response.status == status
    assert KEY not in repr(asked.result())
    assert any(entry["event"] == "request_finished" for entry in logs)
    assert KEY not in repr(logs)


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
async def test_a_bad_value_is_refused_by_name_before_any_work(route: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if route.startswith("chat") else {"prompt": "x"}
    async with gateway() as setting:
        for field, value in (("priority", 101), ("priority", -101), ("priority", "1"), ("cache_salt", "")):
            body = {"model": MODEL, **prompt, field: value}
            for stream in (False, True):
                data = json.dumps({**body, "stream": stream})
                async with setting.client.session.post(f"/v1/{route}", data=data) as response:
                    error = (await response.json())["error"]
                assert (response.status, error["param"], error["code"]) == (400, field, "invalid_value")
        assert await setting.pool.nothing_more()


async def test_the_figures_of_the_cache_go_on_when_a_new_leader_begins_to_count() -> None:
    async with gateway() as setting:
        metric = setting.client.metric

        async def report(queries: int, hits: int, preemptions: int, cached: int) -> None:
            await setting.pool.held(
                report=PoolReport(
                    workers=1,
                    length_served=100,
                    preemptions=preemptions,
                    blocks_cached=cached,
                    kv_tokens_filled=7 * cached,
                    kv_tokens_reserved=cached,
                    prefix_queries=queries,
                    prefix_hits=hits,
                )
            )

            async def is_shown() -> bool:
                return await metric("slipstream_kv_blocks_cached") == cached

            await until(is_shown)

        await report(100, 40, 2, cached=11)
        await report(160, 90, 2, cached=12)
        await report(10, 5, 1, cached=13)
        assert await metric("slipstream_prefix_cache_queries_total") == 170
        assert await metric("slipstream_prefix_cache_hits_total") == 95
        assert await metric("slipstream_preemptions_total") == 3
        assert await metric("slipstream_kv_tokens_filled") == 91
        assert await metric("slipstream_kv_tokens_reserved") == 13
