"""The one thread that loads the model and runs its steps: grad mode and the OpenMP pool are per thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar, TypeVarTuple

from services.worker.executor import Outcome, Step
from shared.runtime.clock import Clock, monotonic

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


@dataclass(frozen=True, slots=True)
class Ran:
    """What a step drew, and how long it took."""

    outcomes: tuple[Outcome, ...]
    step_s: float
    idle_s: float = 0.0
    """How long the thread had no step to run before this one."""
    begun_s: float | None = None
    """When it began, by the thread's clock; None if there was nothing to compute."""


RunningStep = Future[Ran]


class StepThread:
    """Runs calls and steps one after the other, in the order in which they were made."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")
        self.clock = clock
        self._ended_s = clock()

    async def call(self, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
        """Return what the function returns on the thread. A cancelled call still runs to its end there."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def begin(self, step: Step, before: RunningStep | None = None) -> RunningStep:
        """Run a step as soon as all that was begun has ended; at once then, without asking the event loop.

        It is given the outcomes of the step ``before``, which it may await, and is not run if that one raised.
        """
        return self._pool.submit(self._run, step, before)

    def _run(self, step: Step, before: RunningStep | None) -> Ran:
        drawn = () if before is None else before.result(timeout=0).outcomes
        begun_s, ended_s = self.clock(), self._ended_s
        outcomes = step(drawn)
        self._ended_s = self.clock()
        return Ran(outcomes, self._ended_s - begun_s, begun_s - ended_s, begun_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
