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
    """Runs calls and steps one after the other, in the order in which they were made.

    What a step came to is told by a second thread. The thread of the steps would hand the interpreter over to whoever
    it wakes: with 16 streams the next step, though it was there, began 1 ms later.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")
        self._herald = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step-herald")
        self.clock = clock
        self._ended_s = clock()
        self._last: tuple[RunningStep, Ran | BaseException] | None = None
        self._kept: Step | None = None
        """The last step: a tensor that is freed after its end was told would hand the interpreter over as well."""

    async def call(self, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
        """Return what the function returns on the thread. A cancelled call still runs to its end there."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def begin(self, step: Step, before: RunningStep | None = None) -> RunningStep:
        """Run a step as soon as all that was begun has ended; at once then, without asking the event loop.

        It is given the outcomes of the step ``before``, begun last, which it may await, and raises what that raised.
        """
        running: RunningStep = Future()
        self._pool.submit(self._run, step, before, running)
        return running

    def _run(self, step: Step, before: RunningStep | None, running: RunningStep) -> None:
        if not running.set_running_or_notify_cancel():
            return
        try:
            ran = self._timed(step, self._drawn_by(before))
            self._kept = step
        except BaseException as error:  # noqa: BLE001 - raised again where the step's end is waited for
            self._last = (running, error)
            self._herald.submit(running.set_exception, error)
        else:
            self._last = (running, ran)
            self._herald.submit(running.set_result, ran)

    def _drawn_by(self, before: RunningStep | None) -> tuple[Outcome, ...]:
        if before is None:
            return ()
        assert self._last is not None, "it was begun before this one"  # noqa: S101 - for the type checker
        last, ran = self._last
        if last is not before:
            raise RuntimeError("the step before is not the one that was begun last")
        if isinstance(ran, BaseException):
            raise ran
        return ran.outcomes

    def _timed(self, step: Step, drawn: tuple[Outcome, ...]) -> Ran:
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
        self._herald.shutdown(wait=False, cancel_futures=True)
