"""A step that never ends: the life around it does, and then the process."""

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import pytest
from structlog.testing import capture_logs

from services.worker.hung_step import EXIT_HUNG, HungStep
from tests.unit.worker_stage import (
    WITHIN_S,
    Leader,
    first_plan,
    serving,
)


class Left(Exception):
    """The process would have ended here."""


def leave(status: int) -> NoReturn:
    raise Left(status)


@asynccontextmanager
async def hanging(hung_step: HungStep) -> AsyncIterator[Leader]:
    """A worker that was declared dead in a step that hangs; it is released once the process would have ended."""
    executor = None
    try:
        async with serving(hung_step=hung_step) as leader:
            executor = leader.executor
            executor.hangs = True
            worker = await leader.worker()
            await leader.claim(worker)
            await leader.send(worker, first_plan())
            assert await asyncio.to_thread(executor.begun.wait, WITHIN_S)
            await leader.bus.declare_dead(worker)
            yield leader
            await asyncio.sleep(WITHIN_S)
    finally:
        if executor is not None:
            executor.released.set()


async def test_a_step_that_hangs_beyond_its_life_ends_the_process() -> None:
    with (
        capture_logs() as logs,
        pytest.RaisesGroup(pytest.RaisesExc(Left, match=f"^{EXIT_HUNG}$"), flatten_subgroups=True),
    ):
        async with hanging(HungStep(wait_s=0.05, leave=leave)):
            pass
    assert "step_hangs" in [log["event"] for log in logs]


async def test_a_worker_told_to_stop_waits_no_longer_for_a_step_that_hangs() -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(Left, match=f"^{EXIT_HUNG}$"), flatten_subgroups=True):
        async with hanging(HungStep(wait_s=600.0, leave=leave)) as leader:
            leader.stopping.set()


def test_a_process_whose_step_hangs_really_ends() -> None:
    script = textwrap.dedent("""
        import asyncio, threading
        from services.worker.hung_step import HungStep
        from services.worker.step_thread import StepThread

        async def main():
            with StepThread() as thread:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(thread.call(threading.Event().wait))
                    await asyncio.sleep(0)
                    await HungStep(wait_s=0.05).or_idle(thread, print, asyncio.Event())

        asyncio.run(main())
    """)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=20.0)
    assert ended.returncode == EXIT_HUNG, ended.stderr
