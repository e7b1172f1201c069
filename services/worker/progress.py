"""What a person sees while a model is fetched and converted: at most one line a second for each event."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from shared.errors import ServingError
from shared.runtime.clock import Clock, monotonic

_SECONDS_BETWEEN_LINES = 1.0
_BEAT_S = 2.0

log = structlog.get_logger()


class LoadingStopped(ServingError):
    """The process was told to stop while it loaded a model."""


class Progress:
    """Says how far loading has come, and hears when it shall stop."""

    def __init__(self, *, clock: Clock = monotonic) -> None:
        self.stopping = threading.Event()
        self._clock = clock
        self._said_s: dict[str, float] = {}

    def check(self) -> None:
        """Raise LoadingStopped once ``stopping`` is set. Called between the stages of loading."""
        if self.stopping.is_set():
            raise LoadingStopped("stopped while the model was being loaded")

    def say(self, event: str, **fields: object) -> None:
        """Log a step of progress, unless the same event was logged less than a second ago."""
        now_s = self._clock()
        if now_s - self._said_s.get(event, -_SECONDS_BETWEEN_LINES) >= _SECONDS_BETWEEN_LINES:
            self._said_s[event] = now_s
            log.info(event, **fields)

    @contextmanager
    def beating(self, event: str, **fields: object) -> Iterator[None]:
        """Log the event with the seconds gone by, again every two seconds, while the body runs."""
        done = threading.Event()
        begun_s = self._clock()

        def beat() -> None:
            while not done.wait(_BEAT_S):
                log.info(event, elapsed_s=round(self._clock() - begun_s), **fields)

        log.info(event, **fields)
        beater = threading.Thread(target=beat, name=event, daemon=True)
        beater.start()
        try:
            yield
        finally:
            done.set()
            beater.join()
