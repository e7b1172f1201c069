"""Losses of every kind: whatever breaks behind it, the gateway's client sees one text, or one clear end."""

import asyncio

from services.gateway.pool import SILENT_S
from shared.bus.port import Write
from shared.ids import EntryId, WorkerId
from shared.protocol import names
from shared.protocol.messages import CancelRequest, RequestRefused, SubmitRequest
from tests.integration.gateway_pool import MODEL, each_event, events, gateway, text_of, until

ANOTHER = WorkerId("worker-2.1")
FAR = EntryId("9999999999999-0")


async def test_a_client_that_leaves_a_stream_stops_its_computation() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.complete(stream=True).__aenter__())
        submit = await setting.pool.next(SubmitRequest)
        await setting.pool.tokens(submit, b"a")
        response = await opening
        await anext(each_event(response))
        response.close()
        assert await setting.pool.next(CancelRequest) == CancelRequest(submit.request, 1)

        async def is_counted() -> bool:
            return await setting.client.metric('slipstream_requests_finished_total{reason="abort"}') == 1

        await until(is_counted)


async def test_a_client_that_leaves_before_its_first_token_or_a_whole_answer_stops_its_computation() -> None:
    async with gateway() as setting:
        for stream in (True, False):
            async with asyncio.TaskGroup() as tasks:
                opening = tasks.create_task(setting.client.complete(stream=stream).__aenter__())
                submit = await setting.pool.next(SubmitRequest)
                opening.cancel()
            assert await setting.pool.next(CancelRequest) == CancelRequest(submit.request, 1)


async def test_a_request_that_nobody_holds_is_submitted_again_and_no_token_comes_twice() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.complete(stream=True).__aenter__())
        first = await setting.pool.next(SubmitRequest)
        await setting.pool.tokens(first, b"ab")
        async with await opening as response:
            await setting.pool.held(read_to=setting.pool.read_to)
            second = await setting.pool.next(SubmitRequest)
            assert (second.request, second.attempt, second.output_ids) == (first.request, 2, tuple(b"ab"))
            assert second.arrival != ""
            assert second.max_tokens == first.max_tokens
            assert second.sampling == first.sampling, "the same seed: the same draw for the same position"
            await setting.pool.tokens(first, b"XX", first=2)
            await setting.pool.tokens(second, b"bcd", first=1, worker=ANOTHER)
            await setting.pool.tokens(second, b"e", first=4, worker=ANOTHER, finish="length")
            assert text_of(await events(response)) == "abcde"


async def test_two_workers_in_one_attempt_and_a_gap_are_losses() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.complete().__aenter__())
        first = await setting.pool.next(SubmitRequest)
        await setting.pool.tokens(first, b"a")
        await setting.pool.tokens(first, b"B", first=1, worker=ANOTHER)
        second = await setting.pool.next(SubmitRequest)
        assert second.output_ids == tuple(b"a")
        await setting.pool.tokens(second, b"D", first=3)
        third = await setting.pool.next(SubmitRequest)
        assert (third.attempt, third.output_ids) == (3, tuple(b"a"))
        await setting.pool.tokens(third, b"bc", first=1, finish="length")
        async with await opening as response:
            assert (await response.json())["choices"][0]["text"] == "abc"


async def test_three_attempts_without_a_token_end_in_a_500() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.complete(stream=True).__aenter__())
        for attempt in (1, 2, 3):
            assert (await setting.pool.next(SubmitRequest)).attempt == attempt
            await setting.pool.held(read_to=FAR)
        async with await opening as response:
            assert response.status == 500
            assert (await response.json())["error"]["code"] == "generation_failed"
        assert (await setting.pool.next(CancelRequest)).attempt == 3


async def test_a_failure_in_mid_stream_is_an_error_event_and_the_end_mark() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.chat(stream=True).__aenter__())
        submit = await setting.pool.next(SubmitRequest)
        await setting.pool.tokens(submit, b"so ")
        async with await opening as response:
            await setting.pool.tokens(submit, b"", first=3, finish="error")
            chunks = await events(response)
        assert set(chunks[-1]["error"]) == {"message", "type", "param", "code"}
        assert text_of(chunks[:-1]) == "so "
        assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1])


async def test_a_refusal_by_the_leader_is_plain_http_before_the_stream() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        for code, status in (("too_long", 400), ("no_worker", 503)):
            opening = tasks.create_task(setting.client.complete(stream=True).__aenter__())
            submit = await setting.pool.next(SubmitRequest)
            refused = RequestRefused(submit.request, 1, code, "no room anywhere")  # type: ignore[arg-type]  # a literal
            await setting.pool.say(refused)
            async with await opening as response:
                assert response.status == status
                assert (await response.json())["error"]["message"] == "no room anywhere"


async def test_silence_of_the_scheduler_ends_streams_with_an_error() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.complete(stream=True).__aenter__())
        submit = await setting.pool.next(SubmitRequest)
        await setting.pool.tokens(submit, b"a")
        async with await opening as response:
            setting.clock.now_s += SILENT_S - 1
            assert (await setting.client.ready())[0] == 503
            setting.clock.now_s += 2
            chunks = await events(response)
        assert "no word from a scheduler" in chunks[-1]["error"]["message"]


async def test_a_gateway_declared_dead_keeps_its_clients_and_asks_again_under_a_new_id() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.complete(stream=True).__aenter__())
        first = await setting.pool.next(SubmitRequest)
        await setting.pool.tokens(first, b"ab")
        async with await opening as response:
            await setting.pool.bus.declare_dead(first.gateway)
            second = await setting.pool.next(SubmitRequest)
            assert second.gateway != first.gateway
            assert (second.attempt, second.output_ids) == (2, tuple(b"ab"))
            await setting.pool.tokens(second, b"cd", first=2, finish="length")
            assert text_of(await events(response)) == "abcd"


async def test_a_stranger_in_the_list_is_cancelled() -> None:
    async with gateway() as setting:
        stranger = SubmitRequest("cmpl-stranger", 4, "g", (1,), 1)  # type: ignore[arg-type]  # ids are strings
        await setting.pool.held(stranger)
        assert await setting.pool.next(CancelRequest) == CancelRequest(stranger.request, 4)


async def test_a_new_request_that_cannot_be_written_is_a_503_and_what_may_have_been_written_is_cancelled() -> None:
    async with gateway() as setting:
        for how in ("fail", "lost"):
            setting.bus.writes = how
            async with setting.client.complete(stream=True) as response:
                assert response.status == 503
                assert "Retry-After" in response.headers
                told = (await response.json())["error"]["message"]
                assert told == "Redis does not answer: the request could not be written"
            setting.bus.writes = "pass"
            assert (await setting.pool.next(CancelRequest)).attempt == 1


async def test_what_is_owed_is_written_again_until_it_stands() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.complete().__aenter__())
        await setting.pool.next(SubmitRequest)
        setting.bus.writes = "lost"
        await setting.pool.held(read_to=setting.pool.read_to)
        copies = [await setting.pool.next(SubmitRequest) for _ in range(2)]
        assert copies[0] == copies[1], "a retry repeats the same position"
        setting.bus.writes = "pass"
        await setting.pool.tokens(copies[0], b"ok", finish="length")
        async with await opening as response:
            assert (await response.json())["choices"][0]["text"] == "ok"


async def test_an_unreadable_message_goes_to_the_dead_letters_and_the_next_one_is_read() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        stream = names.tokens(await setting.pool.gateway())
        await setting.pool.bus.publish([Write(stream, b"\xc1 nonsense")])
        await setting.pool.say(CancelRequest("r", 1))  # type: ignore[arg-type]  # ids are strings
        opening = tasks.create_task(setting.client.complete().__aenter__())
        await setting.pool.tokens(await setting.pool.next(SubmitRequest), b"ok", finish="length")
        async with await opening as response:
            assert response.status == 200
        assert len(setting.pool.server.dead_letters) == 2


async def test_what_was_read_is_trimmed() -> None:
    async with gateway() as setting:
        stream = names.tokens(await setting.pool.gateway())

        async def is_empty() -> bool:
            return await setting.pool.bus.length(stream) == 0

        await until(is_empty)
        assert await setting.pool.bus.length(names.requests(MODEL)) == 0
