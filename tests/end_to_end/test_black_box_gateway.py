"""Black-box cases that concern the gateway, by number, against real processes: limits, keys, clients, drain."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import pytest

from shared.runtime.clock import monotonic
from tests.end_to_end.asking import CHAT, COMPLETIONS, post, read_all, serves, session_of, stream
from tests.end_to_end.served import FAKE, MODEL, eventually, figures, nothing_is_left
from tests.integration.processes import Up, is_gone, slipstream_up

pytestmark = pytest.mark.timeout(120)

SLOTS, QUEUE, LEAVERS = 4, 24, 20
CONTEXT = 8192
KEY = "sk-a-long-key-of-nobody"


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    flags = ("--max-num-seqs", str(SLOTS), "--max-queue", str(QUEUE), "--fake-step-ms", "5")
    with TemporaryDirectory() as folder, slipstream_up(Path(folder), *FAKE, *flags) as running:
        yield running.until_ready()


async def test_bb_1_a_prompt_beyond_the_context_is_a_400_at_once_and_the_next_request_is_served(up: Up) -> None:
    async with session_of(up) as session:
        status, answer, took_s = await post(session, prompt=[1] * (CONTEXT + 1), max_tokens=1)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert took_s < 1
        await serves(session)


async def test_bb_1_a_prompt_beyond_the_kv_pool_though_within_the_context_is_a_400_at_once_too(
    short_folder: Path,
) -> None:
    with slipstream_up(short_folder, *FAKE, "--kv-tokens", "1024") as small:
        small.until_ready()
        async with session_of(small) as session:
            status, answer, took_s = await post(session, prompt=[1] * (CONTEXT // 2), max_tokens=1)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert took_s < 1
            await serves(session)
        await eventually(nothing_is_left, small)


async def test_bb_9_a_client_that_hangs_up_on_a_whole_answer_is_an_abort_and_its_computation_stops(up: Up) -> None:
    before = await eventually(nothing_is_left, up)
    async with session_of(up) as session:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await post(session, prompt="x", max_tokens=2000, ignore_eos=True)
        began_s = monotonic()
        found = await eventually(nothing_is_left, up)
        assert monotonic() - began_s < 2
        aborts = 'slipstream_requests_finished_total{reason="abort"}'
        assert found[aborts] == before[aborts] + 1
        await serves(session)
        tokens = "slipstream_generation_tokens_total"
        assert (await figures(up))[tokens] == found[tokens] + 4


async def test_bb_10_who_leaves_the_queue_is_never_computed(up: Up) -> None:
    before = await eventually(nothing_is_left, up)
    async with session_of(up) as session:
        running = [await stream(session, prompt="r", max_tokens=1000).__aenter__() for _ in range(SLOTS)]
        queued = [asyncio.ensure_future(post(session, prompt="q", max_tokens=50)) for _ in range(LEAVERS)]
        await eventually(lambda found: found["slipstream_requests_waiting"] == LEAVERS, up)
        for one in queued:
            one.cancel()
        await eventually(lambda found: found["slipstream_requests_waiting"] == 0, up)
        assert all(not response.content.at_eof() for response in running), "nobody's place has become free meanwhile"
        read = await asyncio.gather(*map(read_all, running))
        assert all(events[-1] == "[DONE]" for events in read)
    found = await eventually(nothing_is_left, up)
    tokens = "slipstream_generation_tokens_total"
    assert found[tokens] == before[tokens] + SLOTS * 1000


async def test_bb_13_a_client_that_closes_on_seeing_the_end_mark_is_no_abort(up: Up) -> None:
    before = await eventually(nothing_is_left, up)
    async with session_of(up) as session, stream(session, prompt="x", max_tokens=5) as response:
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                response.close()
                break
    finished = 'slipstream_requests_finished_total{reason="length"}'
    found = await eventually(lambda found: found[finished] == before[finished] + 1, up)
    aborts = 'slipstream_requests_finished_total{reason="abort"}'
    assert found[aborts] == before[aborts]


MESSAGES = [{"role": "user", "content": "x" * (CONTEXT + 1)}]
TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": [1] * (CONTEXT + 1)}, "prompt"),
    (COMPLETIONS, {"prompt": [1] * CONTEXT, "max_tokens": 1}, "prompt"),
    (COMPLETIONS, {"prompt": "x" * 100, "max_tokens": CONTEXT}, "prompt"),
    (CHAT, {"messages": MESSAGES}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": CONTEXT}, "messages"),
]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_bb_23_what_exceeds_the_context_is_a_400_with_both_numbers(up: Up, *, is_stream: bool) -> None:
    async with session_of(up) as session:
        for path, fields, param in TOO_LONG:
            status, answer, _ = await post(session, path, **fields, stream=is_stream)
            error = answer["error"]
            assert (status, error["type"]) == (400, "invalid_request_error")
            assert (error["param"], error["code"]) == (param, "context_length_exceeded")
            assert f"maximum context length is {CONTEXT} tokens" in error["message"]
            assert "you requested" in error["message"]


BROKEN: list[tuple[str, str, bytes, int]] = [
    ("POST", CHAT, b'{"model":"m","messages":[{"role":"user","content":"x"}], x}', 400),
    ("POST", CHAT, b"", 400),
    ("POST", CHAT, b"[]", 400),
    ("POST", CHAT, b'{"model":"m","messages":[{"role":"user","content":"x"}],"response_format":{"type":"nope"}}', 400),
    ("POST", CHAT, b'{"model":"nobody","messages":[{"role":"user","content":"x"}]}', 404),
    ("GET", CHAT, b"", 405),
    ("GET", "/nowhere", b"", 404),
    ("POST", "/v1/nowhere", b"{}", 404),
]


async def test_bb_25_what_is_broken_has_the_envelope_whatever_it_is(up: Up) -> None:
    async with session_of(up) as session:
        for method, path, data, expected in BROKEN:
            async with session.request(method, path, data=data) as response:
                text = await response.text()
            assert response.status == expected, (method, path, data, text)
            assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}
            assert "Traceback" not in text
        plain = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1})
        async with session.post(COMPLETIONS, data=plain, headers={"Content-Type": "text/plain"}) as response:
            assert response.status == 200
    assert "Traceback" not in up.stderr


ROUTES = [
    ("POST", COMPLETIONS), ("POST", CHAT), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"), ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/nowhere"), ("GET", "/"),
    ("OPTIONS", COMPLETIONS), ("GET", "/health/"),
]  # fmt: skip


async def test_bb_29_every_route_but_health_and_ready_needs_the_key_and_nothing_ever_repeats_one(
    short_folder: Path,
) -> None:
    wrong = "sk-a-wrong-key-of-somebody"
    with slipstream_up(short_folder, *FAKE, "--api-key", KEY) as up:
        up.until_ready()
        async with session_of(up) as session:
            for method, path in ROUTES:
                for header in ({}, {"Authorization": f"Bearer {wrong}"}, {"Authorization": KEY}):
                    async with session.request(method, path, headers=header) as response:
                        text = await response.text()
                        assert response.status == 401, (method, path)
                        assert response.headers["WWW-Authenticate"] == "Bearer"
                    assert json.loads(text)["error"]["code"] == "invalid_api_key"
                    assert wrong not in text
                right = {"Authorization": f"Bearer {KEY}"}
                async with session.request(method, path, headers=right) as response:
                    assert response.status != 401, (method, path)
            for path in ("/health", "/ready"):
                async with session.get(path) as response:
                    assert response.status == 200
            async with session.get("/metrics", headers={"Authorization": f"Bearer {KEY}"}) as response:
                assert 'slipstream_http_errors_total{code="invalid_api_key"} 36.0' in await response.text()
        assert [key_is_in(pid) for pid in (up.part("worker"), up.part("scheduler"))] == [False, False]
        up.process.terminate()
        assert up.ended() == 0
        assert KEY not in up.stderr
        assert wrong not in up.stderr


def key_is_in(pid: int) -> bool:
    return KEY.encode() in Path(f"/proc/{pid}/environ").read_bytes()


async def slowest_answer_s(session: aiohttp.ClientSession, path: str, until: asyncio.Event) -> float:
    """Ask every tenth of a second until told to stop, and return how long the slowest answer took."""
    slowest_s = 0.0
    while not until.is_set():
        began_s = monotonic()
        async with session.get(path) as response:
            assert response.status in ({200} if path == "/health" else {200, 503})
        slowest_s = max(slowest_s, monotonic() - began_s)
        with suppress(TimeoutError):
            await asyncio.wait_for(until.wait(), 0.1)
    return slowest_s


LARGE = 27_000_000
BODIES = {
    "text": b'{"model":"m","prompt":"' + b"a " * (LARGE // 2) + b'"}',
    "ids": b'{"model":"m","prompt":[' + b"1," * (LARGE // 2) + b"1]}",
    "lists": b'{"model":"m","prompt":[' + b"[]," * (LARGE // 3) + b"1]}",
    "a million ids": b'{"model":"m","prompt":[' + b"1," * 999_990 + b"1]}",
    "a chat": b'{"model":"m","messages":[{"role":"user","content":"' + b"a " * (LARGE // 2) + b'"}]}',
    "many messages": b'{"model":"m","messages":[' + b'{"role":"user","content":"a"},' * 330_000 + b"1]}",
    "as many messages as are read": b'{"model":"m","messages":[' + b'{"role":"user","content":"a"},' * 99_000 + b"1]}",
}


async def test_bb_32_health_and_ready_answer_within_half_a_second_under_load_and_during_27_megabytes(
    short_folder: Path,
) -> None:
    flags = ("--max-body-bytes", str(32 * 1024 * 1024), "--max-num-seqs", "16", "--max-queue", "32")
    with slipstream_up(short_folder, *FAKE, *flags, "--fake-step-ms", "5") as up:
        up.until_ready()
        async with session_of(up) as session, asyncio.TaskGroup() as tasks:
            over = asyncio.Event()
            asking = [tasks.create_task(slowest_answer_s(session, path, over)) for path in ("/health", "/ready")]
            load = [
                tasks.create_task(post(session, prompt=prompt, max_tokens=400, ignore_eos=True))
                for prompt in [[1] * (CONTEXT - 400)] * 8 + ["x"] * (5 * 48 - 8)
            ]
            for name, data in BODIES.items():
                path = CHAT if b"messages" in data[:30] else COMPLETIONS
                async with session.post(path, data=iter_of(data)) as response:
                    assert response.status in {400, 413, 429}, name
            assert {(await one)[0] for one in load} == {200, 429}
            over.set()
        slowest_s = [task.result() for task in asking]
        assert max(slowest_s) < 0.5, slowest_s


async def iter_of(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 256 * 1024):
        yield data[start : start + 256 * 1024]


@pytest.mark.parametrize("drain_s", [20, 1])
async def test_bb_34_on_sigterm_streams_finish_or_are_told_at_the_deadline_and_newcomers_get_a_503(
    drain_s: int, short_folder: Path
) -> None:
    with slipstream_up(short_folder, *FAKE, "--fake-step-ms", "20", "--drain-s", str(drain_s)) as up:
        up.until_ready()
        async with session_of(up) as session:
            # one connection that is open before, because afterwards none may be made
            streams = [await stream(session, prompt=f"n {n}", max_tokens=200).__aenter__() for n in range(8)]
            gateway = up.part("gateway")
            os.kill(up.process.pid, signal.SIGTERM)
            await until_status(session, "/ready", 503)
            status, answer, _ = await post(session, prompt="x")
            assert (status, answer["error"]["code"]) == (503, "not_ready")
            async with session.get("/health") as response:
                assert response.status == 200
            read = await asyncio.gather(*map(read_all, streams))
        assert is_gone(gateway, within_s=5)
        assert up.ended() == 0
        for events in read:
            assert events[-1] == "[DONE]"
            said = json.loads(events[-2])
            if drain_s == 1:
                assert "stopping" in said["error"]["message"]
            else:
                assert said["choices"][0]["finish_reason"] == "length"
        assert "Traceback" not in up.stderr


@pytest.mark.parametrize("part", ["gateway", "worker"])
async def test_bb_34_a_part_that_is_told_to_end_alone_ends_orderly_and_all_streams_finish(
    part: str, short_folder: Path
) -> None:
    with slipstream_up(short_folder, *FAKE, "--fake-step-ms", "20", "--drain-s", "20") as up:
        up.until_ready()
        async with session_of(up) as session:
            streams = [await stream(session, prompt=f"n {n}", max_tokens=100).__aenter__() for n in range(8)]
            pid = up.part(part)
            os.kill(pid, signal.SIGTERM)
            read = await asyncio.gather(*map(read_all, streams))
            assert is_gone(pid, within_s=10)
            assert [events[-1] for events in read] == ["[DONE]"] * 8
            assert {json.loads(events[-2])["choices"][0]["finish_reason"] for events in read} == {"length"}
            await until_status(session, "/ready", 200)
            await serves(session)
        assert [(event["part"], event["status"]) for event in up.events("part_died")] == [(part, 0)]


async def until_status(session: aiohttp.ClientSession, path: str, status: int) -> None:
    async with asyncio.timeout(20):
        while True:
            with suppress(aiohttp.ClientConnectionError):  # the next gateway does not listen yet
                async with session.get(path) as response:
                    if response.status == status:
                        return
            await asyncio.sleep(0.02)
