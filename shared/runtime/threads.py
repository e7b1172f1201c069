"""Threads for what would keep the loop too long. They end with the process, whatever they have begun.

`concurrent.futures` waits for its threads when the interpreter ends: a text that takes a minute to tokenise, for a
client that has long gone, would hold up a stop for so long.
"""

import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import NoReturn, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_Work = Callable[[], None]
_Line = queue.SimpleQueue[_Work | None]

_busy: set[int] = set()
"""Threads of all pools that are at work."""


class Threads(Executor):
    """At most ``count`` threads, made when needed. What waits for them is bounded by those who submit."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._line: _Line = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._made = 0
        self._end = weakref.finalize(self, _dismiss, self._line, count)
        self._making = threading.Lock()

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Begin when a thread is free. Raises RuntimeError after `shutdown`: no thread would ever come to it."""
        future: Future[_T] = Future()
        with self._making:
            if not self._end.alive:
                raise RuntimeError(f"{self._name}: the threads have been let go")
            self._line.put(lambda: _carry_out(future, lambda: fn(*args, **kwargs)))
            if not self._idle.acquire(blocking=False) and self._made < self._count:
                name = f"{self._name}_{self._made}"
                threading.Thread(target=_serve, args=(self._line, self._idle), name=name, daemon=True).start()
                self._made += 1
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002 - the port's signature
        """Let the threads go once what was submitted is done. Nobody waits for that."""
        with self._making:  # or what is being submitted would stand behind the word to go
            self._end()


def end_process(status: int) -> NoReturn:
    """Exit with this status, and wait for no thread.

    One that is at work in a native library would be stopped in the middle of it when the interpreter is taken down, and
    libraries end the process with an error then. So would the interpreter itself if nobody reads what was said.
    """
    if not _all_is_said() or _busy:
        os._exit(status)
    sys.exit(status)


def _all_is_said() -> bool:
    """Say what is still to be said; False if it cannot be: the reader of a pipe has gone, a disk is full."""
    is_said = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # there is nobody left to tell
            is_said = False
    return is_said


def _serve(line: _Line, idle: threading.Semaphore) -> None:
    own = threading.get_ident()
    while (work := line.get()) is not None:
        _busy.add(own)
        work()
        del work  # or what it holds would stay until there is more to do
        _busy.discard(own)
        idle.release()


def _dismiss(line: _Line, count: int) -> None:
    for _ in range(count):
        line.put(None)


def _carry_out(future: Future[_T], work: Callable[[], _T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - whoever waits for it is told
        future.set_exception(error)
    else:
        future.set_result(result)
