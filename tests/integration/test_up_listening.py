"""Is an address free, does the gateway behind it answer: asked before and while everything starts."""

import asyncio
import os
import re
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from services.embedded_valkey import embedded_valkey
from services.listening import choose_port, is_ready, url_of
from services.supervision import Part, Supervisor
from shared.errors import StartupError
from shared.runtime.clock import monotonic

EVERYWHERE = "0.0.0.0"  # noqa: S104 - the point of these tests: whoever listens everywhere is found here


def test_port_zero_becomes_one_that_is_free() -> None:
    port = choose_port("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port != 0


@pytest.mark.parametrize("host", ["127.0.0.1", EVERYWHERE, "localhost"])
def test_a_taken_port_is_named(host: str) -> None:
    with socket.create_server((host, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StartupError, match=f"^port {port} on {re.escape(host)} is already taken "):
            choose_port(host, port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(StartupError, match=f"^cannot listen on {re.escape(host)} port 8000: "):
        choose_port(host, 8000)


@pytest.mark.parametrize("host", ["x" * 64, "a..b"])
def test_a_name_that_no_host_can_have_is_named(host: str) -> None:
    with pytest.raises(
        StartupError, match=f"^cannot listen on {re.escape(host)} port 8000: no host can have that name"
    ):
        choose_port(host, 8000)


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:80"), ("::1", "http://[::1]:80"), ("me", "http://me:80")]
)
def test_an_address_as_a_url(host: str, url: str) -> None:
    assert url_of(host, 80) == url


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[int]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readline()).startswith(b"GET /ready HTTP/1.1")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "ready"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        (b"200\r\n", False),
        (b"", False),
    ],
)
async def test_only_status_200_is_ready(answer: bytes, ready: bool) -> None:
    async with answering(answer) as port:
        assert await is_ready("127.0.0.1", port) is ready


async def test_a_gateway_that_listens_everywhere_is_asked_here() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\n\r\n") as port:
        assert await is_ready(EVERYWHERE, port)


async def test_nobody_is_not_ready() -> None:
    assert not await is_ready("127.0.0.1", choose_port("127.0.0.1", 0))


def test_valkeys_folder_is_private_and_does_not_outlive_it() -> None:
    with embedded_valkey() as valkey:
        folder = valkey.socket.parent
        assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IRWXU
        (folder / "valkey.log").write_text("first\nlast\n")
        assert valkey.last_words() == "last"
    assert not folder.exists()


async def test_a_valkey_that_cannot_run_ends_it_all_with_its_own_reason() -> None:
    with embedded_valkey() as valkey:
        command = (*valkey.part.command, "--unixsocket", "/no/such/folder/valkey.sock")
        supervisor = Supervisor(asyncio.Event(), never_told, monotonic)
        async with asyncio.timeout(20.0), asyncio.TaskGroup() as tasks:
            supervisor.keep(tasks, replace(valkey.part, command=command))
            await supervisor.ending.wait()
        assert re.fullmatch(
            r"the valkey died 5 times in a minute \(.*\); giving up: .*Unix socket.*No such file.*",
            str(supervisor.failure),
        )


async def never_told(_part: Part, _instance: str) -> None:
    """Nobody is told: there is no bus."""


def killed_with_a_folder(parent: Path) -> Path:
    """Return the folder of a process that was killed while it had one."""
    script = textwrap.dedent("""
        from services.embedded_valkey import embedded_valkey
        with embedded_valkey() as valkey:
            print(valkey.socket.parent, flush=True)
            input()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(parent), "PYTHONPATH": str(Path.cwd())},
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert folder.is_dir()
        process.kill()
    return folder


def test_the_folder_of_a_killed_owner_goes_with_the_next_start_and_no_other(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = killed_with_a_folder(short_folder)
    (left / "valkey.log").write_text("")
    not_ours = short_folder / "slipstream-notes"
    not_ours.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    with embedded_valkey() as lives:
        assert not left.exists()
        with embedded_valkey() as another:
            assert set(short_folder.iterdir()) == {lives.socket.parent, another.socket.parent, not_ours}
    assert list(short_folder.iterdir()) == [not_ours]


def test_too_long_a_path_for_a_socket_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(StartupError, match=r"too long a path"), embedded_valkey():
        pass


def test_a_missing_folder_for_temporary_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(StartupError, match=r"^no folder for temporary files: "), embedded_valkey():
        pass
