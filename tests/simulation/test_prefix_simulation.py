"""Prefix hits of a trace, simulated: a few rows in Mooncake's format, counted by hand."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from loadgen.trace_formats import TraceRequest
from loadgen.trace_prefixes import PrefixHits
from loadgen.traces import Reshape, Trace
from shared.simulation.records import Setup
from tests.benchmarks.prefix_hits import (
    A_MS_A_STEP,
    Account,
    account_of,
    one_after_another,
    serve,
    setup_of,
    times_of_trace,
)

BLOCK = 16
# Lengths / 32, rounded up, and blocks of 16: what each finds when everything before it is kept.
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1600, "output_length": 640, "hash_ids": [0, 1, 2, 3]}\n'  # 50 tokens: nothing
    '{"timestamp": 0, "input_length": 1536, "output_length": 32, "hash_ids": [0, 1, 4]}\n'  # 48 tokens: 0 and 1
    '{"timestamp": 1000, "input_length": 1600, "output_length": 32, "hash_ids": [0, 1, 2, 3]}\n'  # all: 3 is not full
    '{"timestamp": 2000, "input_length": 1536, "output_length": 32, "hash_ids": [0, 1, 4]}\n'  # all: 4 ends with it
    '{"timestamp": 2000, "input_length": 2600, "output_length": 32, "hash_ids": [0, 1, 2, 5, 6, 7]}\n'  # 0, 1 and 2
    '{"timestamp": 3000, "input_length": 1000, "output_length": 32, "hash_ids": [8, 1]}\n'  # a block behind a new one
)
LOOKED_UP = PrefixHits(requests=6, blocks=4 + 3 + 4 + 3 + 6 + 2, hits=0 + 2 + 4 + 3 + 3 + 0)
FOUND = 0 + 2 + 3 + 2 + 3 + 0
DISTINCT = 9


@pytest.fixture
def rows(tmp_path: Path) -> list[TraceRequest]:
    path = tmp_path / "conversation.jsonl"
    path.write_text(MOONCAKE)
    return [*Trace(path, Reshape(scale_lengths=Fraction(1, 32)))]


def pool_of(blocks: int) -> Setup:
    return setup_of(A_MS_A_STEP, 1, blocks * BLOCK)


def test_one_after_another_the_planner_finds_what_was_seen_but_for_last_blocks_not_full_or_with_the_last_token(
    rows: list[TraceRequest],
) -> None:
    # 19 of the first answer's 20 tokens are fed: 69 positions fill block 3, which the fifth request could find
    assert account_of(rows, BLOCK) == Account(LOOKED_UP, DISTINCT, partial=1, whole=1, of_answers=1)
    found = one_after_another(pool_of(100), rows)
    assert found.hits == account_of(rows, BLOCK).hits == FOUND
    prompt_tokens = sum(row.prompt_tokens for row in rows)
    assert found.summary.tokens == prompt_tokens + sum(row.output_tokens - 1 for row in rows) - FOUND * BLOCK
    assert found.evictions == 0


def test_without_names_nothing_is_found_and_nothing_is_evicted(rows: list[TraceRequest]) -> None:
    found = serve(pool_of(100), rows, times_of_trace(rows, 1.0), shares=False)
    assert (found.hits, found.evictions) == (0, 0)


def test_a_small_memory_forgets_what_was_used_longest_ago() -> None:
    # Three blocks. a fills 2 and has an answer block of its own; b, as long, takes the blank one, then a's tail (2);
    # a again finds its first block (1), evicts one of b's two (4, the tail), and computes 2 anew.
    a = TraceRequest(None, 33, 1, (1, 2, 100))
    b = TraceRequest(None, 17, 1, (3, 101))
    found = one_after_another(pool_of(3), [a, b, a])
    assert (found.hits, found.evictions) == (1, 2)


def test_under_a_small_memory_less_is_found(rows: list[TraceRequest]) -> None:
    twice = rows * 2
    roomy, small = (one_after_another(pool_of(blocks), twice) for blocks in (100, 6))
    assert roomy.hits == account_of(twice, BLOCK).hits
    assert small.hits < roomy.hits
    assert small.evictions > 0
    assert small.summary.tokens - roomy.summary.tokens == (roomy.hits - small.hits) * BLOCK


def test_two_that_come_at_once_compute_the_same_twice_and_workers_share_nothing(rows: list[TraceRequest]) -> None:
    together = serve(pool_of(100), rows, [0.0] * len(rows))
    assert together.hits == 0
    alike = [rows[0]] * 2
    assert serve(pool_of(100), alike, [0.0, 1.0]).hits == 3
    both_busy = [rows[0]._replace(output_tokens=1000), rows[0]]
    apart = replace(pool_of(100), workers=2, max_model_len=2048)
    assert serve(apart, both_busy, [0.0, 0.1]).hits == 0


def test_the_same_requests_at_the_same_times_find_the_same(rows: list[TraceRequest]) -> None:
    setup = replace(pool_of(8), workers=2)
    one, other = (serve(setup, rows * 20, times_of_trace(rows * 20, 50.0)) for _ in range(2))
    assert repr(one) == repr(other)
    assert one.hits > 0


def test_a_trace_keeps_its_gaps_at_another_rate(rows: list[TraceRequest]) -> None:
    assert times_of_trace(rows, 4.0) == [0.0, 0.0, 0.5, 1.0, 1.0, 1.5]
