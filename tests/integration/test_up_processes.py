"""`slipstream up` with its real services and the fake executor: it starts, serves, mends itself and ends."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from services.local import EXIT_GAVE_UP, EXIT_INTERRUPTED
from shared.runtime.clock import monotonic
from shared.runtime.process import EXIT_CANNOT_START
from tests.integration.processes import Up, all_gone, is_gone, marked_with, slipstream_up, variable_of

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
    pytest.mark.timeout(120),
]

FAKE = ("--executor", "fake", "--served-model-name", "fake")
ANSWER_S = 30.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: a unix socket goes into it."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def ready(folder: Path) -> Iterator[Up]:
    with slipstream_up(folder, *FAKE) as up:
        yield up.until_ready()


@contextmanager
def ask(up: Up, **fields: object) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(*up.address, timeout=ANSWER_S)
    body = {"model": "fake", "prompt": "Hello", "ignore_eos": True, **fields}
    with closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            yield response


def tokens_of_an_answer(up: Up) -> int:
    with ask(up, max_tokens=5) as response:
        answer = json.load(response)
    return int(answer["usage"]["completion_tokens"]) if response.status == 200 else 0


def _eventually(holds: Callable[[], bool], *, within_s: float = 30.0) -> bool:
    """Ask until it holds; False if it does not within that time. Other processes have no event to wait for."""
    deadline = monotonic() + within_s
    while monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return False


def _serves(up: Up) -> bool:
    """One answer of all its tokens; not yet while a part is away."""
    try:
        return tokens_of_an_answer(up) == 5
    except (OSError, http.client.HTTPException, json.JSONDecodeError):
        return False


def healthcheck(up: Up, *words: str) -> subprocess.CompletedProcess[str]:
    redis_url = variable_of(up.part("worker"), "SLIPSTREAM_REDIS_URL")
    command = [sys.executable, "-m", "services.cli", "healthcheck", *words, "--redis-url", redis_url]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_S)


def test_it_says_what_it_does_serves_and_ends_on_sigterm_without_a_trace(folder: Path) -> None:
    with slipstream_up(folder, *FAKE) as up:
        up.until_ready()
        assert up.stderr.startswith("slipstream: starting: valkey, scheduler, 1 worker, gateway; model ")
        assert tokens_of_an_answer(up) == 5
        up.process.terminate()
        assert up.line() == ""
        assert up.ended() == 0
        assert [path.name for path in folder.iterdir()] == ["stderr"]
        assert "Traceback" not in up.stderr


def test_valkey_listens_in_a_private_folder_only(ready: Up) -> None:
    redis_url = variable_of(ready.part("worker"), "SLIPSTREAM_REDIS_URL")
    socket_path = Path(redis_url.removeprefix("unix://"))
    assert socket_path.parent.stat().st_mode & 0o777 == 0o700
    valkey = ready.part("valkey-server")
    files = [str(link.readlink()) for link in Path(f"/proc/{valkey}/fd").iterdir()]
    inodes = {file.removeprefix("socket:[").removesuffix("]") for file in files if file.startswith("socket:")}
    assert inodes
    for table in "tcp", "tcp6":
        rows = [row.split() for row in Path(f"/proc/{valkey}/net/{table}").read_text().splitlines()[1:]]
        assert not [row for row in rows if row[9] in inodes]


def test_a_stream_is_drained_on_ctrl_c(folder: Path) -> None:
    with slipstream_up(folder, *FAKE, "--fake-step-ms", "20") as up:
        up.until_ready()
        with ask(up, max_tokens=60, stream=True) as response:
            first = response.readline()
            up.process.send_signal(signal.SIGINT)
            rest = response.read()
        assert first.startswith(b"data: ")
        assert rest.endswith(b"data: [DONE]\n\n")
        assert b"error" not in rest
        assert up.ended() == 0


def test_a_second_ctrl_c_ends_everything_at_once(folder: Path) -> None:
    with slipstream_up(folder, *FAKE, "--fake-step-ms", "50", "--drain-s", "60") as up:
        up.until_ready()
        with ask(up, max_tokens=2000, stream=True) as response:
            response.readline()
            up.process.send_signal(signal.SIGINT)
            gateway = up.part("gateway")
            assert not is_gone(gateway, within_s=0.5)
            up.process.send_signal(signal.SIGINT)
            assert up.ended(within_s=5.0) == EXIT_INTERRUPTED


def test_ctrl_c_while_it_starts_leaves_nothing(folder: Path) -> None:
    with slipstream_up(folder, *FAKE) as up:
        assert _eventually(lambda: "starting:" in up.stderr)
        up.process.send_signal(signal.SIGINT)
        assert up.ended() == 0
        assert "Traceback" not in up.stderr


def test_kill_9_leaves_no_process(ready: Up) -> None:
    # itself, Valkey, scheduler, worker, gateway: what cannot be seen is gone too easily
    assert len(marked_with(ready.mark)) >= 5
    ready.process.kill()
    assert all_gone(ready.mark)


@pytest.mark.parametrize("word", ["worker", "scheduler", "gateway"])
def test_a_part_that_is_killed_comes_back_and_serves(ready: Up, word: str) -> None:
    killed = ready.part(word)
    os.kill(killed, signal.SIGKILL)
    assert is_gone(killed, within_s=5.0)
    assert _eventually(lambda: _serves(ready)), ready.stderr
    assert ready.part(word) != killed


def test_a_killed_valkey_is_started_again_and_nothing_gives_up(ready: Up) -> None:
    killed = ready.part("valkey-server")
    os.kill(killed, signal.SIGKILL)
    assert is_gone(killed, within_s=5.0)
    assert _eventually(lambda: bool(ready.running("valkey-server")))
    assert ready.process.poll() is None
    ready.process.terminate()
    assert ready.ended() == 0


def test_a_port_that_is_taken_is_one_sentence_and_nothing_is_started(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with slipstream_up(folder, *FAKE, "--port", str(port)) as up:
            assert up.ended() == EXIT_CANNOT_START
            sentence = f"slipstream: port {port} on 127.0.0.1 is already taken (--port names another, 0 any free one)\n"
            assert up.stderr == sentence


def test_a_part_that_cannot_start_ends_it_all_with_one_sentence(folder: Path) -> None:
    with slipstream_up(folder, "--model", "./no-such-model.gguf") as up:
        assert up.ended(within_s=60.0) == EXIT_CANNOT_START
        said = [line for line in up.stderr.splitlines() if line.startswith("slipstream: ") and "starting" not in line]
        assert len(said) == 1
        assert "no-such-model" in said[0]
        assert "Traceback" not in up.stderr


def test_a_part_that_keeps_dying_ends_it_all(ready: Up) -> None:
    for _ in range(5):
        assert _eventually(lambda: bool(ready.running("scheduler")))
        pid = ready.part("scheduler")
        os.kill(pid, signal.SIGKILL)
        assert is_gone(pid, within_s=5.0)
    assert ready.ended() == EXIT_GAVE_UP
    assert "slipstream: the scheduler died 5 times in a minute (last with exit status -9); giving up" in ready.stderr


def test_a_healthcheck_tells_who_lives(ready: Up) -> None:
    for kind in "gateway", "scheduler", "worker":
        alive = healthcheck(ready, kind, "--served-model-name", "fake")
        assert (alive.returncode, alive.stderr) == (0, "")
    other = healthcheck(ready, "worker", "--served-model-name", "other")
    assert other.returncode == 1
    assert other.stderr == "slipstream: no worker of this host serves 'other' (hosts that do: none)\n"
