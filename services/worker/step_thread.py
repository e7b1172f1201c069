"""The one thread that loads the model and runs its steps: grad mode and the OpenMP pool are per thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar, TypeVarTuple

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


class StepThread:
    """Runs calls one after the other, in the order in which they were made."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")

    async def call(self, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
        """Return what the function returns on the thread. A cancelled call still runs to its end there."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
