"""The supervisor with stand-ins for the services: small shell commands that say what happens to them."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.bound_child import bound
from services.supervision import FAILURES_MAX, FAILURES_WINDOW_S, Deaths, Keeper, Part, Supervisor
from shared.runtime.clock import monotonic
from shared.runtime.process import EXIT_CANNOT_START
from tests.integration.processes import all_gone, is_gone, marked_with

WAIT_S = 10.0
STAYS = 'echo "$$ $SLIPSTREAM_INSTANCE"; exec sleep 60'


class Rig:
    """A supervisor, what its parts print, and the deaths that it told of."""

    def __init__(self, tasks: asyncio.TaskGroup, output: int, lines: asyncio.StreamReader) -> None:
        self.deaths: list[tuple[str, str]] = []
        self.keepers: list[Keeper] = []
        self.supervisor = Supervisor(asyncio.Event(), self._told, monotonic)
        self._tasks = tasks
        self._output = output
        self._lines = lines

    async def _told(self, part: Part, instance: str) -> None:
        self.deaths.append((part.name, instance))

    def keep(self, script: str) -> Keeper:
        command = ("/bin/sh", "-c", script)
        part = Part("worker", command, {"PATH": os.environ["PATH"]}, output=self._output)
        self.keepers.append(self.supervisor.keep(self._tasks, part))
        return self.keepers[-1]

    async def line(self) -> str:
        return (await asyncio.wait_for(self._lines.readline(), WAIT_S)).decode().strip()

    async def ended(self) -> None:
        await asyncio.wait_for(self.supervisor.ending.wait(), WAIT_S)


@asynccontextmanager
async def supervising() -> AsyncIterator[Rig]:
    """All parts are gone when this ends, whatever the test did."""
    reading, writing = os.pipe()
    lines = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(reading, "rb")
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            rig = Rig(tasks, writing, lines)
            yield rig
            for keeper in rig.keepers:
                await keeper.stop(0.1)
    finally:
        transport.close()
        os.close(writing)


async def test_a_part_that_dies_is_told_of_and_started_again_under_another_instance() -> None:
    async with supervising() as rig:
        rig.keep(STAYS)
        pid, instance = (await rig.line()).split()
        os.kill(int(pid), signal.SIGKILL)
        pid_after, instance_after = (await rig.line()).split()
        assert rig.deaths == [("worker", instance)]
        assert instance_after != instance
        assert is_gone(int(pid), within_s=0)
        assert not is_gone(int(pid_after), within_s=0)


async def test_a_part_that_ends_by_itself_is_started_again() -> None:
    async with supervising() as rig:
        rig.keep("echo here; exit 0")
        assert [await rig.line(), await rig.line()] == ["here", "here"]


async def test_five_deaths_in_a_minute_end_it_all_with_one_sentence() -> None:
    async with supervising() as rig:
        rig.keep("exit 3")
        await rig.ended()
        assert len(rig.deaths) == FAILURES_MAX - 1
        failure = rig.supervisor.failure
        assert failure is not None
        assert not failure.cannot_start
        assert str(failure) == "the worker died 5 times in a minute (last with exit status 3); giving up"


async def test_a_part_that_cannot_start_is_not_started_again() -> None:
    async with supervising() as rig:
        rig.keep(f"echo here; exit {EXIT_CANNOT_START}")
        await rig.ended()
        assert rig.supervisor.failure is not None
        assert rig.supervisor.failure.cannot_start
        assert rig.deaths == []


async def test_once_all_was_ready_a_part_that_cannot_start_is_tried_again() -> None:
    async with supervising() as rig:
        rig.supervisor.is_ready = True
        rig.keep(f"echo here; exit {EXIT_CANNOT_START}")
        assert [await rig.line(), await rig.line()] == ["here", "here"]
        assert not rig.supervisor.ending.is_set()


async def test_stop_asks_first_and_does_not_start_again() -> None:
    async with supervising() as rig:
        keeper = rig.keep("trap 'echo bye; exit 0' TERM; echo here; while :; do sleep 0.05; done")
        assert await rig.line() == "here"
        await keeper.stop(WAIT_S)
        assert await rig.line() == "bye"
        assert rig.deaths == []


async def test_stop_kills_who_does_not_listen() -> None:
    async with supervising() as rig:
        keeper = rig.keep(f"trap '' TERM; {STAYS}")
        pid, _ = (await rig.line()).split()
        await keeper.stop(0.1)
        assert is_gone(int(pid), within_s=0)


async def test_what_a_part_started_goes_with_it() -> None:
    async with supervising() as rig:
        keeper = rig.keep("sleep 60 & echo $!; exec sleep 60")
        child = int(await rig.line())
        await keeper.stop(WAIT_S)
        assert is_gone(child, within_s=WAIT_S)


async def test_cancelling_kills_at_once() -> None:
    pids: list[int] = []

    async def fails_later() -> None:
        async with supervising() as rig:
            rig.keep(f"trap '' TERM; {STAYS}")
            pids.append(int((await rig.line()).split()[0]))
            raise RuntimeError("something else went wrong")

    with pytest.raises(ExceptionGroup):
        await fails_later()
    assert is_gone(pids[0], within_s=0)


async def test_a_part_is_in_a_session_of_its_own_so_that_a_terminal_cannot_end_it() -> None:
    async with supervising() as rig:
        rig.keep(STAYS)
        pid = int((await rig.line()).split()[0])
        assert os.getsid(pid) == pid


async def test_kill_9_of_the_supervisor_leaves_no_process() -> None:
    mark = f"SLIPSTREAM_TEST_MARK={secrets.token_hex(8)}"
    script = textwrap.dedent("""
        import asyncio, os, sys
        from services.supervision import Part, Supervisor
        from shared.runtime.clock import monotonic

        async def main():
            supervisor = Supervisor(asyncio.Event(), None, monotonic)
            async with asyncio.TaskGroup() as tasks:
                for word in "first", "second":
                    # no exec once it has spoken: a process has no environment for a moment then, and cannot be seen
                    stays = f"import time; print('{word}', flush=True); time.sleep(60)"
                    part = Part(word, (sys.executable, "-c", stays), dict(os.environ), output=1)
                    supervisor.keep(tasks, part)

        asyncio.run(main())
    """)
    name, _, value = mark.partition("=")
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env=os.environ | {name: value, "PYTHONPATH": str(Path.cwd())},
    ) as process:
        assert process.stdout is not None
        said = {process.stdout.readline(), process.stdout.readline()}
        marked = marked_with(mark)
        process.kill()
    assert said == {b"first\n", b"second\n"}
    assert len(marked) == 3  # what cannot be seen is gone too easily
    assert all_gone(mark)


def test_a_command_whose_parent_is_gone_already_does_not_start() -> None:
    *launcher, _pid = bound(())
    ended = subprocess.run([*launcher, "0", "/bin/echo", "here"], capture_output=True, check=False, timeout=WAIT_S)
    assert ended.returncode == 1
    assert ended.stdout == b""


def test_deaths_older_than_a_minute_are_forgotten_and_the_pause_shrinks_again() -> None:
    now = [0.0]
    deaths = Deaths(lambda: now[0])
    assert [deaths.add() for _ in range(3)] == [1, 2, 3]
    assert deaths.pause_s == pytest.approx(0.8)
    now[0] = FAILURES_WINDOW_S + 1
    assert deaths.add() == 1
    assert deaths.pause_s == pytest.approx(0.2)
