"""The whole of `loadgen run` against a small server on a real socket that behaves, or misbehaves, as it is told."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from loadgen.client import Client, Record
from loadgen.prompts import Request
from loadgen.run import Result, measure
from loadgen.server import CannotStart, open_session
from loadgen.settings import RunSettings
from shared.runtime.clock import monotonic

Script = Callable[["Stream"], Awaitable[None]]
STEP_S = 0.05


class Stream:
    """One answer of the server, written by hand."""

    def __init__(
        self, response: web.StreamResponse, transport: asyncio.Transport | None, asked: dict[str, Any]
    ) -> None:
        self.response = response
        self.transport = transport
        self.asked = asked
        self.tokens = 0

    async def raw(self, data: bytes) -> None:
        await self.response.write(data)

    async def event(self, data: dict[str, Any]) -> None:
        await self.raw(f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode())

    async def text(self, text: str, *, tokens: int = 1, finish: str | None = None) -> None:
        self.tokens += tokens
        content = {"delta": {"content": text}} if "messages" in self.asked else {"text": text}
        await self.event({"choices": [{"index": 0, **content, "finish_reason": finish}], "usage": self.usage})

    @property
    def usage(self) -> dict[str, int]:
        prompt = len(self.asked.get("prompt", "123456789"))
        return {"prompt_tokens": prompt, "completion_tokens": self.tokens, "total_tokens": prompt + self.tokens}

    async def end(self) -> None:
        await self.event({"choices": [], "usage": self.usage})
        await self.raw(b"data: [DONE]\n\n")


class Server:
    """Answers each request by a script. Records what was asked, and how many at a time."""

    def __init__(self) -> None:
        self.script: Script = steady
        self.refusal: web.Response | None = None
        self.content_type = "text/event-stream"
        self.asked: list[dict[str, Any]] = []
        self.peers: set[object] = set()
        self.headers: list[dict[str, str]] = []
        self.now_running = 0
        self.most_running = 0
        self.left = asyncio.Event()
        self.models: list[str] = ["tiny", "other"]
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.peers.add(request.transport and request.transport.get_extra_info("peername"))
        self.headers.append(dict(request.headers))
        if self.refusal is not None:
            return web.Response(
                status=self.refusal.status,
                body=self.refusal.body,
                headers={"Retry-After": "7"},
                content_type="text/json",
            )
        self.now_running += 1
        self.most_running = max(self.most_running, self.now_running)
        response = web.StreamResponse(headers={"Content-Type": self.content_type})
        try:
            await response.prepare(request)
            await self.script(Stream(response, request.transport, self.asked[-1]))
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise
        finally:
            self.now_running -= 1
        return response

    async def list_models(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        return web.json_response({"object": "list", "data": [{"id": model} for model in self.models]})


async def steady(stream: Stream) -> None:
    """One token at once and the others at known distances."""
    for number in range(stream.asked["max_tokens"]):
        if number:
            await asyncio.sleep(STEP_S)
        await stream.text(f" {number}", finish="length" if number + 1 == stream.asked["max_tokens"] else None)
    await stream.end()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    behaviour = Server()
    app = web.Application()
    app.router.add_post("/v1/completions", behaviour.answer)
    app.router.add_post("/v1/chat/completions", behaviour.answer)
    app.router.add_get("/v1/models", behaviour.list_models)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    behaviour.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield behaviour
    await runner.cleanup()


def settings(server: Server, **changes: Any) -> RunSettings:
    usual: dict[str, Any] = {
        "url": server.url,
        "requests": 4,
        "prompt_tokens": "5",
        "output_tokens": "3",
        "timeout_s": 20,
    }
    return RunSettings(**usual | changes)


async def run(server: Server, **changes: Any) -> Result:
    async with asyncio.timeout(30):
        return await measure(settings(server, **changes), monotonic)


async def ask(server: Server, *, leaves_early: bool = False, timeout_s: float = 20.0) -> Record:
    """Send one request and return what became of it."""
    target = settings(server, timeout_s=timeout_s).target("tiny")
    request = Request(0, (40, 41, 42), 3, leaves_early=leaves_early)
    async with asyncio.timeout(30), open_session(None) as session:
        return await Client(session, target, monotonic).ask(request, target.body(request), intended_s=monotonic())


def failure(record: Record) -> str | None:
    return record.failure and record.failure.name


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


async def loadgen(*flags: str) -> asyncio.subprocess.Process:
    command = "import sys; from loadgen.entry import main; sys.exit(main())"
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-c", command, *flags, stdout=pipe, stderr=pipe)


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    async with asyncio.timeout(40):
        out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


async def test_the_command_prints_tables_and_writes_everything_as_json(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    flags = (
        "--url",
        f"{server.url}/v1/",
        "--requests",
        "4",
        "--output-tokens",
        "3",
        "--api-key",
        "secret",
        "--out",
        str(out),
    )
    status, printed, errors = await ended(await loadgen("run", *flags))
    assert (status, "written to" in errors) == (0, True), errors
    for word in ("4 ok, 0 failed", "output tokens / s", "TTFT", "TBT", "TPOT", "E2E", "P50", "P90", "P99"):
        assert word in printed
    result = json.loads(out.read_text())
    assert (result["config"]["model"], result["summary"]["output_tokens"]) == ("tiny", 12)
    assert result["config"]["seed"] >= 0
    assert "secret" not in out.read_text()
    assert [row["index"] for row in result["requests"]] == [0, 1, 2, 3]
    assert all(row["usage"]["completion_tokens"] == 3 and len(row["chunks"]) == 3 for row in result["requests"])
    assert result["machine"]["cores"] >= 1


async def test_the_command_fails_if_a_request_failed(server: Server, tmp_path: Path) -> None:
    server.refusal = web.Response(status=500, text="no JSON here")
    flags = ("--url", server.url, "--requests", "2", "--out", str(tmp_path / "r.json"))
    status, printed, _ = await ended(await loadgen("run", *flags))
    assert status == 1
    assert "http_500" in printed
    assert json.loads((tmp_path / "r.json").read_text())["requests"][0]["failure"]["message"] == "no JSON here"


async def test_ctrl_c_stops_early_and_shows_what_finished(server: Server, tmp_path: Path) -> None:
    third = asyncio.Event()

    async def two_then_hang(stream: Stream) -> None:
        if len(server.asked) > 2:
            third.set()
            await asyncio.sleep(25)
        await steady(stream)

    server.script = two_then_hang
    flags = ("--url", server.url, "--concurrency", "1", "--requests", "50", "--out", str(tmp_path / "r.json"))
    process = await loadgen("run", *flags, "--output-tokens", "2")
    async with asyncio.timeout(30):
        await third.wait()
    process.send_signal(signal.SIGINT)
    status, printed, errors = await ended(process)
    assert status == 130, errors
    assert "2 ok, 0 failed, 1 interrupted" in printed
    assert "Traceback" not in errors
    assert json.loads((tmp_path / "r.json").read_text())["was_interrupted"] is True
