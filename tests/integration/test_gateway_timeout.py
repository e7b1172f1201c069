"""A request's own timeout: from its arrival, for all of its answers, whatever has come of them."""

import asyncio

from shared.protocol.messages import CancelRequest, SubmitRequest
from tests.integration.gateway_pool import Setting, events, gateway, until


async def refused(setting: Setting, code: str) -> float:
    return await setting.client.metric(f'slipstream_http_errors_total{{code="{code}"}}')


def pass_time(setting: Setting, by_s: float) -> None:
    setting.clock.now_s += by_s


async def test_who_has_not_begun_by_then_gets_a_408_and_is_cancelled() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.complete(timeout=2.5).__aenter__())
        other = tasks.create_task(setting.client.complete(timeout=60).__aenter__())
        submits = [await setting.pool.next(SubmitRequest) for _ in range(2)]
        pass_time(setting, 2.6)
        async with await opening as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (408, "queue_timeout")
            assert "2.5 s" in error["message"]
            assert "Retry-After" in response.headers
        cancelled = (await setting.pool.next(CancelRequest)).request
        (left,) = [submit for submit in submits if submit.request != cancelled]
        assert await refused(setting, "queue_timeout") == 1
        assert await setting.client.metric("slipstream_requests_timed_out_total") == 1
        await setting.pool.tokens(left, b"o", finish="length")
        async with await other as response:
            assert response.status == 200, "another request's time is its own"


async def test_a_whole_answer_that_is_not_whole_by_then_is_a_504() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.chat(timeout=2).__aenter__())
        submit = await setting.pool.next(SubmitRequest)
        await setting.pool.tokens(submit, b"a")

        async def is_begun() -> bool:
            return await setting.client.metric("slipstream_generation_tokens_total") == 1

        await until(is_begun)
        pass_time(setting, 2.1)
        async with await opening as response:
            assert (response.status, (await response.json())["error"]["code"]) == (504, "timeout")
        assert (await setting.pool.next(CancelRequest)).request == submit.request
        assert await refused(setting, "timeout") == 1
        assert await setting.client.metric('slipstream_requests_finished_total{reason="error"}') == 1


async def test_a_stream_ends_with_an_error_event_and_so_do_its_siblings() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.complete(timeout=2, stream=True, n=3).__aenter__())
        submits = [await setting.pool.next(SubmitRequest) for _ in range(3)]
        await setting.pool.tokens(submits[1], b"a")
        async with await opening as response:
            assert response.status == 200
            pass_time(setting, 2.1)
            told = await events(response)
        assert told[-1]["error"]["code"] == "timeout", "some answer had begun"
        assert [("error" in event) for event in told].count(True) == 1
        cancelled = {(await setting.pool.next(CancelRequest)).request for _ in submits}
        assert cancelled == {submit.request for submit in submits}
        assert await setting.client.metric("slipstream_requests_timed_out_total") == 1, "a request counts once"
        await setting.pool.held()
        assert await setting.client.metric("slipstream_queued_requests") == 0


async def test_what_is_whole_in_time_is_told_whole() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.complete(timeout=2).__aenter__())
        submit = await setting.pool.next(SubmitRequest)
        pass_time(setting, 1.9)
        await setting.pool.tokens(submit, b"ok", finish="length")
        async with await opening as response:
            assert response.status == 200
        pass_time(setting, 1)
        assert await setting.client.metric("slipstream_requests_timed_out_total") == 0
        assert await setting.pool.nothing_more()
