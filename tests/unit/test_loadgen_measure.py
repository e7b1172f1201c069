import numpy as np
import pytest

from loadgen.answer import Answer, Chunk, Failure, Usage
from loadgen.client import Record
from loadgen.measure import Arrival, Gap, arrivals_of, distribution, time_of, tpot_s
from loadgen.prompts import Request
from loadgen.summary import Run, Summary, summarise


def record(  # noqa: PLR0913 - each test names the few facts that it is about
    chunks: list[Chunk] | None = None,
    *,
    tokens: int = 1,
    intended_s: float = 0.0,
    sent_s: float = 0.0,
    done_s: float = 10.0,
    finish: str = "length",
    failure: Failure | None = None,
    cancelled: bool = False,
) -> Record:
    answer = Answer()
    answer.chunks = [Chunk(1.0, 1, has_text=True)] if chunks is None else chunks
    answer.first_text_s = next((chunk.at_s for chunk in answer.chunks if chunk.has_text), None)
    answer.usage = Usage(prompt_tokens=4, completion_tokens=tokens)
    answer.finish_reason = finish
    answer.done_s = done_s
    return Record(
        Request(0, (33, 34, 35, 36), tokens, leaves_early=cancelled),
        intended_s,
        sent_s,
        ended_s=done_s,
        answer=answer,
        failure=failure,
        cancelled=cancelled,
    )


def text(at_s: float, tokens: int | None = None) -> Chunk:
    return Chunk(at_s, tokens, has_text=True)


def summary(*records: Record, is_open_loop: bool = False, warmup: tuple[Record, ...] = ()) -> Summary:
    run = Run(records, 0.0, is_open_loop=is_open_loop, interrupted=0, warmup=warmup, asked_full_length=True)
    return summarise(run)


def test_tpot_leaves_the_first_token_out_of_both_time_and_count() -> None:
    assert tpot_s(e2e_s=3.0, ttft_s=1.0, tokens=5) == pytest.approx(0.5)


def test_tpot_needs_a_second_token_and_a_first_text() -> None:
    assert tpot_s(e2e_s=3.0, ttft_s=1.0, tokens=1) is None
    assert tpot_s(e2e_s=3.0, ttft_s=None, tokens=5) is None


def test_latencies_are_taken_from_the_sending_and_from_the_intended_moment() -> None:
    timing = time_of(record([text(4.0, 1)], intended_s=1.0, sent_s=3.0, done_s=9.0))
    assert (timing.ttft_s, timing.ttft_from_intended_s) == (1.0, 3.0)
    assert (timing.e2e_s, timing.e2e_from_intended_s) == (6.0, 8.0)


def test_normalised_latency_is_seconds_per_token_of_the_answer() -> None:
    assert time_of(record([text(1.0, 4)], tokens=4, done_s=8.0)).normalised_s == 2.0


def test_a_gap_is_divided_over_the_tokens_that_ended_it_and_the_longest_is_kept_whole() -> None:
    timing = time_of(record([text(1.0, 1), text(2.0, 2), text(5.0, 5)], tokens=5))
    assert timing.tokens_known_by == "usage"
    assert timing.gaps == (Gap(1.0, 1), Gap(1.0, 3))
    assert timing.max_gap_s == 3.0


def test_events_read_at_one_moment_are_one_arrival() -> None:
    timing = time_of(record([text(1.0, 1), text(3.0, 2), text(3.0, 3)], tokens=3))
    assert timing.gaps == (Gap(1.0, 2),)


def test_tokens_whose_text_is_held_back_count_when_they_come() -> None:
    chunks = [text(1.0, 1), Chunk(2.0, 2, has_text=False), text(3.0, 3), Chunk(9.0, 3, has_text=False)]
    timing = time_of(record(chunks, tokens=3))
    assert timing.gaps == (Gap(1.0, 1), Gap(1.0, 1))
    assert timing.max_gap_s == 1.0


def test_a_chunk_with_only_the_finish_reason_needs_no_count() -> None:
    timing = time_of(record([text(1.0, 1), text(2.0, 3), Chunk(2.5, None, has_text=False)], tokens=3))
    assert (timing.tokens_known_by, timing.gaps) == ("usage", (Gap(0.5, 2),))


def test_a_last_token_without_text_came_with_the_finish_reason() -> None:
    finish = Chunk(2.5, None, has_text=False)
    timing = time_of(record([text(1.0, 1), finish], tokens=2))
    assert (timing.tokens_known_by, timing.gaps) == ("usage", (Gap(1.5, 1),))
    assert arrivals_of(record([finish], tokens=1).answer) == ("usage", [Arrival(2.5, 1)])


def test_a_text_without_a_count_leaves_it_open_how_many_tokens_it_had() -> None:
    assert time_of(record([text(1.0, 1), text(2.0), text(3.0, 5)], tokens=5)).tokens_known_by == "unknown"


def test_without_counts_there_are_gaps_only_if_there_are_as_many_texts_as_tokens() -> None:
    chunks = [text(1.0), text(2.0), text(4.0)]
    known = time_of(record(chunks, tokens=3))
    assert (known.tokens_known_by, known.gaps) == ("one_per_chunk", (Gap(1.0, 1), Gap(2.0, 1)))
    unknown = time_of(record(chunks, tokens=7))
    assert (unknown.tokens_known_by, unknown.gaps, unknown.max_gap_s) == ("unknown", (), 2.0)


def test_the_token_that_ends_an_answer_has_no_text_and_spoils_nothing() -> None:
    assert time_of(record([text(1.0), text(2.0)], tokens=3, finish="stop")).tokens_known_by == "one_per_chunk"
    assert time_of(record([text(1.0), text(2.0)], tokens=3, finish="length")).tokens_known_by == "unknown"


def test_percentiles_are_exact_with_linear_interpolation() -> None:
    of = distribution([4.0, 1.0, 3.0, 2.0])
    assert of is not None
    assert (of.count, of.mean, of.p50, of.largest) == (4, 2.5, 2.5, 4.0)
    assert of.p90 == pytest.approx(1 + 0.9 * 3)
    assert of.p99 == pytest.approx(1 + 0.99 * 3)


def test_a_weight_counts_a_sample_as_often() -> None:
    values, weights = [1.0, 5.0, 2.0], [3, 1, 7]
    assert distribution(values, weights) == distribution(np.repeat(values, weights).tolist())


def test_no_samples_have_no_distribution() -> None:
    assert distribution([]) is None
    assert distribution([], []) is None


def test_throughput_counts_what_ended_well_over_the_whole_run() -> None:
    bad = record(done_s=20.0, tokens=9, failure=Failure("timeout", "late"))
    shown = summary(record([text(1.0, 5)], tokens=5), record([text(1.0, 5)], tokens=5), bad)
    assert shown.run_s == 20.0
    assert shown.throughput.requests_per_s == pytest.approx(2 / 20)
    assert shown.throughput.output_tokens_per_s == pytest.approx(10 / 20)
    assert shown.throughput.total_tokens_per_s == pytest.approx(18 / 20)


def test_failures_are_counted_by_kind_and_statuses_apart() -> None:
    shown = summary(
        record(failure=Failure("http", "busy", 429)),
        record(failure=Failure("http", "busy", 429)),
        record(failure=Failure("http", "broken", 500)),
        record(failure=Failure("no_done", "cut")),
    )
    assert shown.failures == {"http_429": 2, "http_500": 1, "no_done": 1}
    assert (shown.succeeded, shown.failed, shown.all_went_well) == (0, 4, False)
    assert shown.latency.ttft is None


def test_clients_that_leave_on_purpose_are_neither_successes_nor_failures() -> None:
    shown = summary(record(), record(cancelled=True))
    assert (shown.succeeded, shown.failed, shown.cancelled, shown.all_went_well) == (1, 0, 1, True)
    assert shown.latency.e2e is not None
    assert shown.latency.e2e.count == 1


def test_a_failed_warm_up_is_said_and_not_measured() -> None:
    shown = summary(record(), warmup=(record(failure=Failure("http", "busy", 503)),))
    assert (shown.succeeded, shown.failed, shown.warmup_failed, shown.all_went_well) == (1, 0, 1, False)


def test_a_client_that_fell_behind_its_schedule_says_that_the_run_is_invalid() -> None:
    late = record([text(11.1, 1)], intended_s=10.0, sent_s=10.1, done_s=12.0)
    prompt = record([text(11.1, 1)], intended_s=10.0, sent_s=10.01, done_s=12.0)
    assert any("INVALID" in note for note in summary(late, is_open_loop=True).notes)
    assert not any("INVALID" in note for note in summary(prompt, is_open_loop=True).notes)
    assert not any("INVALID" in note for note in summary(late, is_open_loop=False).notes)


def test_what_a_reader_must_not_miss_is_noted() -> None:
    short = record([text(1.0, 1)], tokens=1)
    short.request = Request(0, (33,), 8, leaves_early=False)
    silent = record([Chunk(1.0, 1, has_text=False)])
    notes = summary(short, silent, record([text(1.0), text(2.0)], tokens=5)).notes
    assert [note.split(" ", 1) for note in notes] == [
        ["1", "answers are shorter than asked"],
        ["1", "prompts have another length by the server's count"],
        ["1", "answers had no text, so they have no TTFT"],
        ["1", "answers came in chunks of unknown size: left out of TBT"],
    ]


def test_an_empty_run_has_a_summary() -> None:
    shown = summary()
    assert (shown.succeeded, shown.failed, shown.run_s, shown.throughput.requests_per_s) == (0, 0, 0.0, 0.0)
