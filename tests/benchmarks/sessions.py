"""Programs of others, each in a session of its own: started with a log, ended with all that they started."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_GRACE_S = 15.0
_LOOK_S = 0.1
_TAIL_CHARS = 600


class LeftOut(Exception):
    """Something cannot be measured; the text says why, and the rest goes on."""


class TimeLeft:
    """The time that a whole run may take, handed out in pieces."""

    def __init__(self, seconds: float) -> None:
        self._until_s = time.perf_counter() + seconds

    def expect(self, seconds: float) -> None:
        """Raise `LeftOut` if less is left."""
        if self._until_s - time.perf_counter() < seconds:
            raise LeftOut("too little time is left")

    def at_most(self, wanted_s: float) -> float:
        """Return so many seconds, or those that are left. Raises `LeftOut` if there are none to speak of."""
        self.expect(1)
        return min(wanted_s, self._until_s - time.perf_counter())


class Session:
    """A program that runs, and what it has said."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def output(self) -> str:
        """All that it and its children have printed so far."""
        return self._log.read_text(errors="replace")

    @property
    def tail(self) -> str:
        """The end of it, for a person who wonders what went wrong."""
        return tail_of(self.output)


def tail_of(said: str) -> str:
    """Return the end of what a program said."""
    return said[-_TAIL_CHARS:].strip()


@contextmanager
def session(
    command: Sequence[str], variables: Mapping[str, str], log: Path, *, grace_s: float = _GRACE_S
) -> Iterator[Session]:
    """Run a program until the block ends, and wait until every process of its session has gone."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,
        )
    try:
        yield Session(process, log)
    finally:
        _end(process, grace_s)


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        for pid in _members(process.pid):
            _signal(pid, how)
        until_s = time.perf_counter() + grace_s
        while process.poll() is None or _members(process.pid):
            if time.perf_counter() > until_s:
                break
            time.sleep(_LOOK_S)
        else:
            return
    raise SystemExit(f"processes {_members(process.pid)} of {process.args!r} do not end")


def _signal(pid: int, how: signal.Signals) -> None:
    try:
        os.kill(pid, how)
    except ProcessLookupError:  # it ended by itself
        return


def _members(leader: int) -> list[int]:
    """Return the living processes of a session: a program may rename itself and its group, not its session."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it ended while we looked
            continue
        if int(its_session) == leader and state != "Z":
            members.append(int(stat.parent.name))
    return members
