"""What the gateway counts of the leader's totals, leader after leader."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from services.gateway.metrics import Metrics
from shared.protocol.messages import PoolReport

TOTALS = {
    "preemptions": "slipstream_preemptions_total",
    "prefix_queries": "slipstream_prefix_cache_queries_total",
    "prefix_hits": "slipstream_prefix_cache_hits_total",
}


def shown(metrics: Metrics, name: str) -> float:
    value = metrics.registry.get_sample_value(name)
    assert value is not None
    return value


@pytest.mark.parametrize("field", TOTALS)
def test_a_total_of_the_leaders_goes_on_over_a_change_of_leader(field: str) -> None:
    metrics = Metrics()
    seen = []
    for total in (0, 5, 5, 9, 2, 3, 0, 1):
        metrics.reported(msgspec.structs.replace(PoolReport(), **{field: total}))
        seen.append(shown(metrics, TOTALS[field]))
    assert seen == [0, 5, 5, 9, 11, 12, 12, 13]


@pytest.mark.parametrize("field", TOTALS)
def test_what_was_counted_before_this_gateway_came_is_not_counted_again(field: str) -> None:
    metrics = Metrics()
    for total in (7000, 7003):
        metrics.reported(msgspec.structs.replace(PoolReport(), **{field: total}))
    assert shown(metrics, TOTALS[field]) == 3


@given(st.lists(st.lists(st.integers(0, 50), max_size=8), max_size=6))
def test_whatever_leaders_report_no_counter_ever_goes_down(leaders: list[list[int]]) -> None:
    metrics = Metrics()
    metrics.reported(PoolReport())
    before = counted = 0.0
    for steps in leaders:
        total = 0
        metrics.reported(PoolReport())
        for step in steps:
            total += step
            metrics.reported(PoolReport(prefix_queries=total))
            now = shown(metrics, TOTALS["prefix_queries"])
            assert now >= before
            before = now
        counted += total
    assert shown(metrics, TOTALS["prefix_queries"]) == counted


def test_the_gauges_show_the_last_report() -> None:
    metrics = Metrics()
    for cached, filled, reserved in ((9, 90, 9), (3, 40, 8)):
        report = PoolReport(
            blocks_cached=cached, kv_tokens_filled=filled, kv_tokens_reserved=reserved, kv_tokens_internal=cached + 1
        )
        metrics.reported(report)
    assert shown(metrics, "slipstream_kv_blocks_cached") == 3
    assert shown(metrics, "slipstream_kv_tokens_filled") == 40
    assert shown(metrics, "slipstream_kv_tokens_reserved") == 8
    assert shown(metrics, "slipstream_kv_tokens_internal") == 4


def test_the_help_says_in_what_a_cache_is_counted_and_what_waste_is() -> None:
    text = generate_latest(Metrics().registry).decode()
    helps = dict(line.removeprefix("# HELP ").split(" ", 1) for line in text.splitlines() if line.startswith("# HELP "))
    assert helps["slipstream_prefix_cache_queries_total"].startswith("Tokens")
    assert helps["slipstream_prefix_cache_hits_total"].startswith("Tokens")
    assert "may still come" in helps["slipstream_kv_tokens_reserved"]
    assert "never hold a token" in helps["slipstream_kv_tokens_internal"]
