"""Processes as tests see them: by a mark in their environment, and gone when the system says so."""

import json
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

READY_S = 40.0
"""How long three interpreters may take to start on a busy machine."""


def marked_with(mark: str) -> set[int]:
    """Return the ids of all processes whose environment holds the mark: children inherit it, the dead have none."""
    found = set()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environment.read_bytes():
                found.add(int(environment.parent.name))
        except OSError:  # it ended while we looked, or is not ours
            continue
    return found


def is_gone(pid: int, *, within_s: float) -> bool:
    """Wait for a process to end, without polling; False if it still runs after that time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


def all_gone(mark: str, *, within_s: float = 10.0) -> bool:
    """Tell whether no marked process is left after that time; those that are left are killed, for the next test."""
    left = [pid for pid in marked_with(mark) if not is_gone(pid, within_s=within_s)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


def variable_of(pid: int, name: str) -> str:
    """Return a variable from the environment that a process was started with."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return next(value for key, _, value in (variable.partition("=") for variable in variables) if key == name)


def _is_called(pid: int, word: str) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    except OSError:  # it ended while we looked
        return False
    is_still_bound = any(part.endswith("bound_child.py") for part in command)
    return not is_still_bound and word in {Path(command[0]).name, command[-1]}


class Up:
    """A running ``slipstream up``, with all that it started."""

    def __init__(self, process: subprocess.Popen[str], mark: str, complaints: Path) -> None:
        self.process = process
        self.mark = mark
        self._complaints = complaints
        self._address = ("", 0)

    @property
    def stderr(self) -> str:
        """What it and its parts have said so far."""
        return self._complaints.read_text()

    @property
    def address(self) -> tuple[str, int]:
        """Where the gateway listens, once it is ready."""
        return self._address

    def line(self, *, within_s: float = READY_S) -> str:
        """Return the next line of its standard output, empty at the end."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], within_s)[0], f"no line within {within_s} s\n{self.stderr}"
        return self.process.stdout.readline()

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the structured log events so far, of one name or all; a line still being written is left out."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("{") and line.endswith("}")]
        return [event for event in map(json.loads, lines) if name in (None, event.get("event"))]

    def until_ready(self, *, within_s: float = READY_S) -> "Up":
        """Wait for the ready line."""
        line = self.line(within_s=within_s)
        assert line.startswith("ready http://"), self.stderr
        url = urlsplit(line.split()[1])
        self._address = (str(url.hostname), url.port or 0)
        return self

    def running(self, word: str) -> list[int]:
        """Return the process ids of a part by the last word of its command line, or of Valkey by its program."""
        return [pid for pid in marked_with(self.mark) - {self.process.pid} if _is_called(pid, word)]

    def part(self, word: str) -> int:
        """Return the process id of a part of which there is one."""
        (pid,) = self.running(word)
        return pid

    def ended(self, *, within_s: float = 20.0) -> int:
        """Return its exit status, after it and all that it started have gone."""
        status = self.process.wait(within_s)
        assert all_gone(self.mark, within_s=1.0), "a process was left behind"
        return status


@contextmanager
def slipstream_up(folder: Path, *flags: str) -> Iterator[Up]:
    """Start ``slipstream up`` with temporary files in a folder; whatever the test did, nothing runs on after it."""
    mark = secrets.token_hex(8)
    complaints = folder / "stderr"
    with complaints.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "up", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"SLIPSTREAM_TEST_MARK": mark, "TMPDIR": str(folder)},
        )
    with process:
        try:
            yield Up(process, mark, complaints)
        finally:
            process.kill()
            all_gone(mark, within_s=5.0)
