"""What this gateway knows of the pool behind it, and when it heard that. Pure: the time is passed in."""

from services.gateway.tokenizer import ModelTokenizer
from shared.errors import NotServing
from shared.protocol.messages import PoolReport

STALE_S = 4.0
"""Without a list for so long the pool does not count as serving."""
SILENT_S = 30.0
"""Without a list for so long running answers are given up."""
BUS_STALE_S = 4.0
"""Without an answer from Redis for so long it counts as gone."""


class Pool:
    """The last report of the leader, the tokenizer, and signs of life."""

    def __init__(self) -> None:
        self.report = PoolReport()
        self.length_served = 0
        self.tokenizer: ModelTokenizer | None = None
        self.is_draining = False
        self.heard_s: float | None = None
        self.bus_answered_s: float | None = None

    def heard(self, report: PoolReport, now_s: float) -> None:
        """Note a report. With no live worker the last length served stays."""
        self.report = report
        self.length_served = report.length_served or self.length_served
        self.heard_s = now_s

    def silence_s(self, now_s: float) -> float:
        """Return the seconds since the last report, infinity before the first."""
        return float("inf") if self.heard_s is None else now_s - self.heard_s

    def why_not_serving(self, now_s: float) -> str | None:
        """Return one sentence that says why a request would not be served now, or None if it would."""
        if self.is_draining:
            return "the gateway is stopping"
        if self.bus_answered_s is None or now_s - self.bus_answered_s > BUS_STALE_S:
            return "Redis does not answer"
        if self.silence_s(now_s) > STALE_S:
            return "there is no word from a scheduler"
        if self.report.workers < 1 or not self.length_served:
            return "no worker is ready"
        return "no worker has published its tokenizer yet" if self.tokenizer is None else None

    def serving(self, now_s: float) -> ModelTokenizer:
        """Return the tokenizer of a pool that serves. Raises NotServing."""
        why = self.why_not_serving(now_s)
        if why is not None or self.tokenizer is None:
            raise NotServing(f"not serving: {why}")
        return self.tokenizer
