"""The command `loadgen run`: its tables, its file, its exit status."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.integration.loadgen_rig import Server, Stream, serving, steady


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as one:
        yield one


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
