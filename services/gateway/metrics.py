"""The gateway's metrics, in a registry of their own. This is the one place that counts."""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.process_collector import ProcessCollector

from shared.protocol.messages import PoolReport

Reason = Literal["stop", "length", "abort", "error", "rejected"]
REASONS: tuple[Reason, ...] = ("stop", "length", "abort", "error", "rejected")


class Metrics:
    """Counters of this gateway and gauges from the leader's last report."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._running = self._gauge("requests_running", "Requests that hold KV blocks, in the whole pool.")
        self._waiting = self._gauge("requests_waiting", "Requests that wait, in the whole pool.")
        self._blocks_used = self._gauge("kv_blocks_used", "KV blocks held by requests; cached ones are not used.")
        self._blocks_total = self._gauge("kv_blocks_total", "KV blocks of all workers.")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of accepted prompts.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens accepted from workers.")
        self._unreadable = self._counter("unreadable_messages", "Messages that went to the dead-letter stream.")
        self._finished = Counter(
            "slipstream_requests_finished", "Requests by outcome.", ["reason"], registry=self.registry
        )
        for reason in REASONS:
            self._finished.labels(reason)

    def reported(self, report: PoolReport) -> None:
        """Show the leader's figures."""
        self._running.set(report.running)
        self._waiting.set(report.waiting)
        self._blocks_used.set(report.blocks_used)
        self._blocks_total.set(report.blocks_total)

    def prompted(self, tokens: int) -> None:
        """Count an accepted prompt."""
        self._prompt_tokens.inc(tokens)

    def generated(self, tokens: int) -> None:
        """Count accepted tokens."""
        self._generation_tokens.inc(tokens)

    def finished(self, reason: Reason) -> None:
        """Count a request, once, whatever it went through."""
        self._finished.labels(reason).inc()

    def unreadable(self) -> None:
        """Count a message that could not be read."""
        self._unreadable.inc()

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"slipstream_{name}", help_text, registry=self.registry)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"slipstream_{name}", help_text, registry=self.registry)
