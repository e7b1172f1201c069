"""Worked examples of the papers and articles that belong to loadgen, by number."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.answer import Answer, Chunk, Failure, Usage
from loadgen.client import Record
from loadgen.goodput import Bounds
from loadgen.prompts import Request
from loadgen.report import print_tables, row
from loadgen.settings import RunSettings
from loadgen.summary import Goodput, Run, summarise
from loadgen.trace_prefixes import shared_prefix_tokens
from loadgen.traces import Reshape, Trace

ARTICLE = RunSettings(goodput_ttft_ms=2000, goodput_tbt_ms=100).bounds


def answered(
    *token_times_s: float, intended_s: float = 0.0, counted: bool = True, failure: Failure | None = None
) -> Record:
    """Return a request sent at 0 whose tokens came at these moments."""
    answer = Answer()
    answer.chunks = [
        Chunk(at_s, count if counted else None, has_text=True) for count, at_s in enumerate(token_times_s, start=1)
    ]
    answer.first_text_s, answer.done_s = token_times_s[0], token_times_s[-1]
    tokens = len(token_times_s) if counted else len(token_times_s) + 5
    answer.usage, answer.finish_reason = Usage(4, tokens), "length"
    request = Request(0, (33, 34, 35, 36), tokens, leaves_early=False)
    return Record(request, intended_s, 0.0, ended_s=token_times_s[-1], answer=answer, failure=failure)


def left_early() -> Record:
    record = answered(0.5)
    record.cancelled = True
    return record


@pytest.mark.parametrize(
    ("record", "is_good"),
    [
        (answered(2.0, 2.0625, 2.125), True),
        (answered(0.0, 0.1), True),  # a bound that is reached is not passed
        (answered(2.001, 2.05), False),  # the first token is late
        (answered(0.5, 0.55, 0.7, 0.75), False),  # one stall, though 83 ms on average
        (answered(1.5, 1.55, intended_s=-0.6), False),  # its user had wanted it sent before
        (answered(1.0), True),  # there is nothing between one token
        (answered(0.5, 0.55, counted=False), False),  # chunks of unknown size: nobody can tell
        (answered(0.5, 0.55, failure=Failure("no_done", "cut")), False),
        (left_early(), False),
    ],
)
def test_t29_a_request_is_good_if_ttft_is_within_2_s_and_itl_within_100_ms(record: Record, *, is_good: bool) -> None:
    assert ARTICLE is not None
    assert ARTICLE.are_met_by(record) is is_good
    assert row(record, 0.0, ARTICLE)["is_good"] is is_good
    assert row(record, 0.0)["is_good"] is None


def test_t29_either_bound_may_stand_alone_and_tpot_bounds_the_mean() -> None:
    late, stalled, slow = answered(3.0, 3.05), answered(0.5, 0.55, 0.7, 0.75), answered(0.5, 0.7, 0.9)
    kept = {
        Bounds(ttft_s=2.0): [False, True, True],
        Bounds(tbt_s=0.1): [True, False, False],
        Bounds(tpot_s=0.1): [True, True, False],
    }
    for bounds, expected in kept.items():
        assert [bounds.are_met_by(record) for record in (late, stalled, slow)] == expected


def test_t29_goodput_is_good_requests_per_second_of_the_run_and_a_share_of_all_that_were_sent() -> None:
    records = [answered(1.0, 1.05), answered(1.0, 1.05), answered(3.0, 4.0), left_early()]
    summary = summarise(Run(records, 0.0, is_open_loop=True, interrupted=1, bounds=ARTICLE))
    assert ARTICLE is not None
    assert summary.goodput == Goodput(ARTICLE, good=2, sent=5, requests_per_s=2 / 4.0)
    out = StringIO()
    print_tables(summary, Console(file=out, width=120))
    (line,) = [line for line in out.getvalue().splitlines() if "good requests / s" in line]
    assert "TTFT ≤ 2000 ms, TBT ≤ 100 ms" in line
    assert "0.50 (40.0% of 5)" in line


def test_t29_without_bounds_nothing_is_said_of_goodput() -> None:
    assert RunSettings().bounds is None
    summary = summarise(Run([answered(1.0)], 0.0, is_open_loop=True, interrupted=0))
    out = StringIO()
    print_tables(summary, Console(file=out, width=120))
    assert summary.goodput is None
    assert "good" not in out.getvalue()


def test_t46_two_requests_with_12_common_hash_ids_share_6144_tokens(tmp_path: Path) -> None:
    common = ", ".join(str(46 + i) for i in range(12))
    path = tmp_path / "two.jsonl"
    path.write_text(
        f'{{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [{common}, 2353, 2354]}}\n'
        f'{{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [{common}, 2366]}}\n'
    )
    whole = Reshape()
    one, other = Trace(path, whole)
    assert shared_prefix_tokens(one, other, whole.block_tokens) == 12 * 512 == 6144
    assert shared_prefix_tokens(one, one, whole.block_tokens) == 6955  # the last block is not full
