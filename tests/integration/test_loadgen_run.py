"""The whole of `loadgen run` against a small server on a real socket that behaves, or misbehaves, as it is told."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from loadgen.server import CannotStart
from tests.integration.loadgen_rig import STEP_S, Server, Stream, ask, failure, run, serving, steady


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as one:
        yield one


async def test_times_are_those_that_the_server_took(server: Server) -> None:
    async def late(stream: Stream) -> None:
        await stream.event({"choices": [{"text": ""}], "usage": stream.usage})  # has no text: not the first token
        await asyncio.sleep(0.2)
        await steady(stream)

    server.script = late
    result = await run(server, requests=2, concurrency=2, output_tokens="5")
    latency = result.summary.latency
    assert latency.ttft
    assert latency.tbt
    assert latency.tpot
    assert latency.e2e
    assert latency.max_gap
    assert 0.2 <= latency.ttft.p50 < 0.2 + 4 * STEP_S
    assert STEP_S * 0.9 <= latency.tbt.p50 < STEP_S * 2
    assert latency.tbt.count == 2 * 4
    assert STEP_S * 0.9 <= latency.tpot.p50 < STEP_S * 2
    assert latency.e2e.p50 >= 0.2 + 4 * STEP_S
    assert latency.max_gap.largest >= latency.tbt.p50
    assert result.run.records[0].headers_s is not None


async def test_tokens_are_what_usage_says_and_not_the_number_of_chunks(server: Server) -> None:
    async def coalesced(stream: Stream) -> None:
        await stream.text("a", tokens=1)
        await asyncio.sleep(4 * STEP_S)
        await stream.text("bcde", tokens=4, finish="length")
        await stream.end()

    server.script = coalesced
    result = await run(server, requests=1)
    assert result.summary.output_tokens == 5
    assert result.summary.latency.tbt
    assert result.summary.latency.tbt.count == 4
    assert STEP_S * 0.9 <= result.summary.latency.tbt.p50 < 3 * STEP_S
    assert result.summary.latency.max_gap
    assert result.summary.latency.max_gap.p50 >= 4 * STEP_S * 0.9


async def test_a_character_that_comes_in_halves_is_one_character(server: Server) -> None:
    async def halved(stream: Stream) -> None:
        event = 'data: {"choices":[{"text":"🚀é","finish_reason":"stop"}]}\n\n'.encode()
        for cut in event.partition("🚀".encode()[:2]):
            await stream.raw(cut)
            await asyncio.sleep(0.01)
        stream.tokens = 1
        await stream.end()

    server.script = halved
    record = await ask(server)
    assert failure(record) is None
    assert record.answer.chunks[0].has_text


async def test_the_role_alone_is_not_the_first_token_of_a_chat(server: Server) -> None:
    async def with_role(stream: Stream) -> None:
        await stream.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(0.15)
        await stream.text("Hi", finish="stop")
        await stream.end()

    server.script = with_role
    result = await run(server, endpoint="chat", requests=1)
    assert result.summary.latency.ttft
    assert result.summary.latency.ttft.p50 >= 0.14
    assert server.asked[0]["messages"][0]["content"].count(" ") == 4
    assert result.run.records[0].request.prompt_tokens is None
    assert result.summary.prompt_tokens == 9


async def test_a_stream_cut_before_done_has_failed(server: Server) -> None:
    async def cut(stream: Stream) -> None:
        await stream.text("a", finish="length")

    server.script = cut
    assert failure(await ask(server)) == "no_done"


async def test_a_stream_without_finish_reason_has_failed(server: Server) -> None:
    async def endless(stream: Stream) -> None:
        await stream.text("a")
        await stream.end()

    server.script = endless
    assert failure(await ask(server)) == "no_finish_reason"


async def test_an_error_in_the_midst_of_a_stream_is_a_failure_with_its_message(server: Server) -> None:
    async def broken(stream: Stream) -> None:
        await stream.text("a")
        await stream.event({"error": {"message": "the worker was lost", "type": "server_error"}})
        await stream.raw(b"data: [DONE]\n\n")

    server.script = broken
    record = await ask(server)
    assert record.failure is not None
    assert (record.failure.kind, record.failure.message) == ("error_event", "the worker was lost")
    assert record.answer.first_text_s is not None


async def test_a_429_is_a_failure_that_is_not_tried_again_and_keeps_retry_after(server: Server) -> None:
    server.refusal = web.Response(status=429, text=json.dumps({"error": {"message": "the line is full"}}))
    result = await run(server, requests=3, concurrency=1)
    assert result.summary.failures == {"http_429": 3}
    assert len(server.asked) == 3
    first = result.run.records[0].failure
    assert first is not None
    assert (first.message, first.retry_after) == ("the line is full", "7")


async def test_an_answer_that_is_no_stream_is_a_failure(server: Server) -> None:
    server.content_type = "application/json"
    assert failure(await ask(server)) == "not_a_stream"


async def test_a_server_that_hangs_is_a_timeout(server: Server) -> None:
    async def hang(stream: Stream) -> None:
        await stream.text("a")
        await asyncio.sleep(25)

    server.script = hang
    record = await ask(server, timeout_s=0.3)
    assert failure(record) == "timeout"
    assert 0.3 <= record.done_s - record.sent_s < 5


async def test_a_connection_that_breaks_is_a_failure(server: Server) -> None:
    async def crash(stream: Stream) -> None:
        await stream.text("a")
        assert stream.transport is not None
        stream.transport.abort()

    server.script = crash
    assert failure(await ask(server)) == "connection"


async def test_an_answer_is_over_at_done_though_its_connection_stays_open(server: Server) -> None:
    async def never_closes(stream: Stream) -> None:
        await steady(stream)
        await asyncio.sleep(25)

    server.script = never_closes
    for timeout_s in (10.0, 0.8):  # the second runs out while the connection is still open
        record = await ask(server, timeout_s=timeout_s)
        assert failure(record) is None
        assert record.done_s - record.sent_s < 0.7


async def test_a_client_that_leaves_after_the_first_token_is_seen_by_the_server_and_reported_apart(
    server: Server,
) -> None:
    record = await ask(server, leaves_early=True)
    assert (record.outcome, failure(record)) == ("cancelled", None)
    async with asyncio.timeout(10):
        await server.left.wait()
    assert sum(chunk.has_text for chunk in record.answer.chunks) < 3

    result = await run(server, cancel_share=1.0, requests=3)
    assert (result.summary.succeeded, result.summary.cancelled, result.summary.failed) == (0, 3, 0)
    assert result.summary.all_went_well


async def test_a_closed_loop_keeps_as_many_running_as_asked_and_no_more(server: Server) -> None:
    result = await run(server, requests=9, concurrency=3)
    assert server.most_running == 3
    assert result.summary.succeeded == 9
    assert [record.request.index for record in sorted(result.run.records, key=lambda r: r.sent_s)] == list(range(9))


async def test_every_request_has_a_connection_of_its_own_so_that_none_is_found_closed(server: Server) -> None:
    async def close_unannounced(stream: Stream) -> None:
        await steady(stream)
        assert stream.transport is not None
        stream.transport.close()

    server.script = close_unannounced
    result = await run(server, requests=5, concurrency=1, output_tokens="1")
    assert (result.summary.succeeded, len(server.peers)) == (5, 5)


async def test_an_open_loop_does_not_wait_for_answers(server: Server) -> None:
    everyone = asyncio.Barrier(12)

    async def wait_for_all(stream: Stream) -> None:
        await everyone.wait()  # would never be passed if a request waited for the answer of another
        await steady(stream)

    server.script = wait_for_all
    result = await run(server, rate=100.0, requests=12, output_tokens="1", seed=5)
    assert result.summary.succeeded == 12
    assert result.summary.latency.send_lag is not None
    intended = [record.intended_s for record in sorted(result.run.records, key=lambda r: r.request.index)]
    assert intended == sorted(intended)
    assert all(record.send_lag_s >= 0 for record in result.run.records)


async def test_the_duration_bounds_both_kinds_of_load(server: Server) -> None:
    closed = await run(server, requests=10_000, concurrency=1, duration_s=0.4, output_tokens="2")
    assert 2 <= closed.summary.succeeded <= 10
    opened = await run(server, requests=10_000, rate=10.0, duration_s=0.4, output_tokens="2", seed=1)
    assert 1 <= opened.summary.succeeded <= 20


async def test_the_warm_up_is_sent_first_and_not_measured(server: Server) -> None:
    result = await run(server, warmup=2, requests=3, seed=9)
    assert len(server.asked) == 5
    assert (result.summary.succeeded, len(result.run.warmup)) == (3, 2)
    prompts = [tuple(asked["prompt"]) for asked in server.asked]
    assert len(set(prompts)) == 5


async def test_what_is_asked_is_what_the_flags_say(server: Server) -> None:
    await run(server, requests=1, output_tokens="2", temperature=0.5, api_key="secret", model="mine")
    asked = server.asked[0]
    assert [token_id for token_id in asked["prompt"] if isinstance(token_id, int)] == asked["prompt"]
    assert (len(asked["prompt"]), asked["max_tokens"], asked["temperature"]) == (5, 2, 0.5)
    assert (asked["model"], asked["stream"], asked["ignore_eos"]) == ("mine", True, True)
    assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert {headers.get("Authorization") for headers in server.headers} == {"Bearer secret"}

    await run(server, requests=1, ignore_eos=False, continuous_usage=False)
    assert "ignore_eos" not in server.asked[1]
    assert server.asked[1]["stream_options"] == {"include_usage": True}
    assert server.asked[1]["model"] == "tiny"


async def test_the_same_seed_asks_the_same(server: Server) -> None:
    for _ in range(2):
        await run(server, requests=3, concurrency=1, prompt_tokens="2-9", output_tokens="1-3", seed=4)
    assert server.asked[:3] == server.asked[3:]


async def test_a_server_without_models_or_out_of_reach_is_one_sentence(server: Server) -> None:
    server.models = []
    with pytest.raises(CannotStart, match="serves no model"):
        await run(server)
    with pytest.raises(CannotStart, match=r"no answer from http://127.0.0.1:9: Cannot connect"):
        await run(server, url="http://127.0.0.1:9")
