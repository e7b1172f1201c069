"""The gateway's metrics, in a registry of their own. This is the one place that counts."""

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.process_collector import ProcessCollector

from shared.protocol.messages import PoolReport

Reason = Literal["stop", "length", "abort", "error", "rejected"]
REASONS: tuple[Reason, ...] = ("stop", "length", "abort", "error", "rejected")


class LeadersTotal:
    """A counter that follows a total of the leader's: it goes on where a new leader counts from 0, and never down.

    It counts from the first report that this gateway hears: what was before has no place in anyone's rate.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last: int | None = None

    def follow(self, total: int) -> None:
        """Count what came since the last report. Less than it said means a new leader, who has counted this much."""
        if self._last is not None:
            self._counter.inc(total if total < self._last else total - self._last)
        self._last = total


class Metrics:
    """Counters of this gateway and gauges from the leader's last report."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._running = self._gauge("requests_running", "Requests that hold KV blocks, in the whole pool.")
        self._waiting = self._gauge("requests_waiting", "Requests that wait, in the whole pool.")
        self._blocks_used = self._gauge("kv_blocks_used", "KV blocks held by requests; cached ones are not used.")
        self._blocks_total = self._gauge("kv_blocks_total", "KV blocks of all workers.")
        self._blocks_cached = self._gauge(
            "kv_blocks_cached", "KV blocks that no request holds and whose content the prefix cache still knows."
        )
        self._tokens_filled = self._gauge("kv_tokens_filled", "Positions of used KV blocks that hold a token.")
        self._tokens_reserved = self._gauge(
            "kv_tokens_reserved",
            "Positions of used KV blocks that are set aside for tokens that may still come.",
        )
        self._tokens_internal = self._gauge(
            "kv_tokens_internal", "Positions of used KV blocks that will never hold a token."
        )
        self._preemptions = self._leaders("preemptions", "Requests that gave up their KV blocks, in the whole pool.")
        self._prefix_queries = self._leaders(
            "prefix_cache_queries", "Tokens of newcomers that were looked up in the prefix cache, in the whole pool."
        )
        self._prefix_hits = self._leaders(
            "prefix_cache_hits", "Tokens of newcomers that were found in the prefix cache, in the whole pool."
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of accepted prompts.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens accepted from workers.")
        self._unreadable = self._counter("unreadable_messages", "Messages that went to the dead-letter stream.")
        self._finished = Counter(
            "slipstream_requests_finished", "Requests by outcome.", ["reason"], registry=self.registry
        )
        self._refused = Counter(
            "slipstream_http_errors", "Answers that say no, by the code in them.", ["code"], registry=self.registry
        )
        self._dropped = self._counter("clients_dropped", "Clients that took nothing of their answer for too long.")
        self._timed_out = self._counter("requests_timed_out", "Requests that ended because their timeout had passed.")
        for reason in REASONS:
            self._finished.labels(reason)

    def reported(self, report: PoolReport) -> None:
        """Show the leader's figures."""
        self._running.set(report.running)
        self._waiting.set(report.waiting)
        self._blocks_used.set(report.blocks_used)
        self._blocks_total.set(report.blocks_total)
        self._blocks_cached.set(report.blocks_cached)
        self._tokens_filled.set(report.kv_tokens_filled)
        self._tokens_reserved.set(report.kv_tokens_reserved)
        self._tokens_internal.set(report.kv_tokens_internal)
        self._preemptions.follow(report.preemptions)
        self._prefix_queries.follow(report.prefix_queries)
        self._prefix_hits.follow(report.prefix_hits)

    def prompted(self, tokens: int) -> None:
        """Count an accepted prompt."""
        self._prompt_tokens.inc(tokens)

    def generated(self, tokens: int) -> None:
        """Count accepted tokens."""
        self._generation_tokens.inc(tokens)

    def finished(self, reason: Reason) -> None:
        """Count a request, once, whatever it went through."""
        self._finished.labels(reason).inc()

    def refused(self, code: str) -> None:
        """Count an answer that says no, by the code of its error: each limit has its own."""
        self._refused.labels(code).inc()

    def timed_out(self) -> None:
        """Count a request whose own timeout has passed, whatever had come of it."""
        self._timed_out.inc()

    def dropped(self) -> None:
        """Count a client that was dropped because it took nothing."""
        self._dropped.inc()

    def show(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Show a figure that is asked for whenever somebody looks."""
        self._gauge(name, help_text).set_function(value)

    def unreadable(self) -> None:
        """Count a message that could not be read."""
        self._unreadable.inc()

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"slipstream_{name}", help_text, registry=self.registry)

    def _leaders(self, name: str, help_text: str) -> LeadersTotal:
        return LeadersTotal(self._counter(name, help_text))

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"slipstream_{name}", help_text, registry=self.registry)
