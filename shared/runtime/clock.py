"""The one place that asks the system for the time. Everything else takes a clock, so that tests can hold it."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds of this process's own steady clock. No wall clock crosses a machine."""

    def __call__(self) -> float:
        """Return seconds since some fixed moment."""


def monotonic() -> float:
    """Return this process's monotonic time in seconds."""
    return time.monotonic()


def wall_clock_s() -> int:
    """Return Unix time in whole seconds, for what people read (``created`` in an answer), never for durations."""
    return int(time.time())
