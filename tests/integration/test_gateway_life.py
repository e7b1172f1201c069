"""A gateway from its start to its end: what it needs to be ready, how it drains, what it refuses to start with."""

import asyncio
import subprocess
import sys

import msgspec
import pytest
from structlog.testing import capture_logs

from services.gateway import app
from services.gateway.pool import STALE_S
from services.gateway.service import serve_on
from services.worker.fake_tokenizer import fake_tokenizer_files
from shared.bus.memory import MemoryBus, MemoryServer
from shared.errors import StartupError
from shared.protocol import names
from shared.protocol.messages import CancelRequest, PoolReport, SubmitRequest
from shared.runtime.settings import GatewaySettings
from tests.integration.gateway_pool import LENGTH_SERVED, MODEL, SlowTokenizer, events, gateway, text_of, until


async def test_ready_says_what_is_missing_until_a_request_would_be_served() -> None:
    async with gateway(is_up=False) as setting:
        assert (await setting.client.ready()) == (503, "there is no word from a scheduler"), "Redis has answered"
        await setting.pool.held(report=PoolReport(workers=0, length_served=LENGTH_SERVED))

        async def worker_is_missed() -> bool:
            return "no worker is ready" in ((await setting.client.ready())[1] or "")

        await until(worker_is_missed)
        async with setting.client.chat() as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
            assert (await response.json())["error"]["code"] == "not_ready"
        await setting.pool.held()

        async def tokenizer_is_missed() -> bool:
            return "tokenizer" in ((await setting.client.ready())[1] or "")

        await until(tokenizer_is_missed)
        await setting.pool.publish_tokenizer()
        await setting.client.until_ready()
        setting.clock.now_s += STALE_S + 0.1
        assert (await setting.client.ready())[0] == 503
        await setting.pool.held()
        await setting.client.until_ready()
        async with setting.client.session.get("/health") as response:
            assert response.status == 200


async def test_a_worker_that_is_lost_leaves_the_length_served_and_a_503() -> None:
    async with gateway() as setting:
        await setting.pool.held(report=PoolReport(workers=0, length_served=0))
        await setting.client.until_ready(status=503)
        async with setting.client.session.get("/v1/models") as response:
            assert (await response.json())["data"][0]["max_model_len"] == LENGTH_SERVED


async def test_the_model_is_listed() -> None:
    async with gateway() as setting:
        async with setting.client.session.get("/v1/models") as response:
            listed = await response.json()
        async with setting.client.session.get(f"/v1/models/{MODEL}") as response:
            one = await response.json()
    assert listed == {"object": "list", "data": [one]}
    assert (one["id"], one["object"], one["root"], one["max_model_len"]) == (MODEL, "model", MODEL, LENGTH_SERVED)


async def test_another_model_behind_the_same_name_brings_its_tokenizer() -> None:
    async with gateway() as setting:
        files = msgspec.structs.replace(fake_tokenizer_files(), chat_template="{{ messages[0]['content'] }}!")
        await setting.pool.publish_tokenizer(files, "h2")

        async def is_swapped() -> bool:
            async with asyncio.TaskGroup() as tasks:
                opening = tasks.create_task(setting.client.chat().__aenter__())
                submit = await setting.pool.next(SubmitRequest)
                await setting.pool.tokens(submit, b"x", finish="length")
            (await opening).release()
            return bytes(submit.prompt_ids) == b"hi!"

        await until(is_swapped)
        assert setting.times_loaded == 1, "what is called then stops everything for a moment"


async def test_a_broken_tokenizer_is_passed_over_and_a_later_one_is_taken() -> None:
    with capture_logs() as logs:
        async with gateway(is_up=False) as setting:
            await setting.pool.publish_tokenizer(msgspec.structs.replace(fake_tokenizer_files(), tokenizer_json=b"{"))
            await setting.pool.held()

            async def is_passed_over() -> bool:
                return "tokenizer_unreadable" in [entry["event"] for entry in logs]

            await until(is_passed_over)
            assert (await setting.client.ready())[0] == 503
            await setting.pool.publish_tokenizer(content_hash="h2")
            await setting.client.until_ready()


async def test_a_drain_lets_running_streams_finish_and_refuses_newcomers() -> None:
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.complete(stream=True).__aenter__())
        submit = await setting.pool.next(SubmitRequest)
        await setting.pool.tokens(submit, b"a")
        async with await opening as response:
            setting.stopping.set()
            await setting.client.until_ready(status=503)
            async with setting.client.complete() as refused:
                assert refused.status == 503
                assert "stopping" in (await refused.json())["error"]["message"]
            async with setting.client.session.get("/health") as health:
                assert health.status == 200
            await setting.pool.tokens(submit, b"b", first=1, finish="length")
            assert text_of(await events(response)) == "ab"
        await setting.ended
        assert await setting.pool.bus.parts(names.members("gateway", MODEL)) == {}
        assert await setting.pool.nothing_more(), "what ended by itself needs no cancellation"


async def test_who_is_being_taken_in_when_the_gateway_stops_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SHUTDOWN_S", 0.05)  # what handlers get when nothing is waited for any more
    slow = SlowTokenizer(monkeypatch)
    async with gateway() as setting, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(setting.client.complete().__aenter__())
        await slow.begun.wait()
        setting.stopping.set()
        await setting.client.until_ready(status=503)
        assert not asked.done()
        slow.go_on.set()
        async with await asked as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "not_ready"


async def test_a_stream_that_outlasts_the_drain_ends_with_an_error_and_a_cancellation() -> None:
    async with gateway(drain_s=0.1) as setting, asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(setting.client.complete(stream=True).__aenter__())
        submit = await setting.pool.next(SubmitRequest)
        await setting.pool.tokens(submit, b"a")
        async with await opening as response:
            setting.stopping.set()
            chunks = await events(response)
        assert "stopping" in chunks[-1]["error"]["message"]
        await setting.ended
        assert (await setting.pool.next(CancelRequest)).request == submit.request


async def test_a_port_that_is_taken_is_one_clear_sentence() -> None:
    async with gateway() as setting:
        settings = GatewaySettings(model=MODEL, host="127.0.0.1", port=setting.port.result())
        with pytest.raises(StartupError, match=rf"port {setting.port.result()} on 127.0.0.1 is already taken"):
            await serve_on(MemoryBus(MemoryServer()), settings, asyncio.Event())


def test_a_gateway_never_imports_torch() -> None:
    check = "import services.gateway.service, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0
