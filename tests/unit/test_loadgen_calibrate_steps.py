from collections.abc import Iterable

import pytest

from loadgen.answer import Answer, Chunk, Failure, Usage
from loadgen.calibrate_cells import Batch, Mixed, Prompts, output_tokens, to_measure
from loadgen.calibrate_steps import LeftOut, step_while_all_run, step_with_a_prompt, tokens_of
from loadgen.client import Record
from loadgen.measure import Arrival
from loadgen.prompts import Request


def stream(*moments_s: float) -> list[Arrival]:
    return [Arrival(moment_s, 1) for moment_s in moments_s]


def every(step_s: float, steps: Iterable[int], offset_s: float = 0.0) -> list[Arrival]:
    return stream(*(offset_s + step * step_s for step in steps))


def test_only_the_time_when_every_stream_runs_counts() -> None:
    # alone, the first stream takes 1 s per token; together both take 3 s; alone again, the second takes 1 s
    first = stream(0, 1, 2, 3, *range(6, 28, 3))
    second = stream(*range(3, 28, 3), 28, 29, 30)
    step_s, positions = step_while_all_run([first, second], prompt_tokens=16)
    assert step_s == 3.0
    # the gaps from 3 to 27: the first stream feeds its 4th to 11th token, the second its 1st to 8th
    assert positions == 16 + (sum(range(4, 12)) + sum(range(1, 9))) / 16


def test_a_stall_is_not_a_step() -> None:
    moments = [0.0, 0.1, 0.2, 2.7, 2.8, 2.9, 3.0, 3.1]
    assert step_while_all_run([stream(*moments), stream(*moments)], 16)[0] == pytest.approx(0.1)


def test_a_chunk_of_several_tokens_is_several_steps() -> None:
    halting = [Arrival(0.0, 1), Arrival(0.1, 1), Arrival(0.3, 2), Arrival(0.4, 1), Arrival(0.5, 1), Arrival(0.6, 1)]
    step_s, positions = step_while_all_run([halting], 16)
    assert step_s == pytest.approx(0.1)
    assert positions == 16 + sum(range(1, 7)) / 6


def test_streams_that_ran_one_after_another_are_left_out() -> None:
    with pytest.raises(LeftOut, match="hardly ever ran 2 at once"):
        step_while_all_run([every(0.1, range(20)), every(0.1, range(19, 40))], 16)
    with pytest.raises(LeftOut, match="hardly ever ran 1 at once"):
        step_while_all_run([stream(0.0)], 16)


def test_a_mixed_step_is_the_gap_that_ends_when_the_prompt_has_its_token() -> None:
    # steps of 0.1 s, the one that ends at 1.0 took 0.4 s and the one that ends at 1.8 took 0.6 s
    moments = [0.3, 0.4, 0.5, 0.6, 1.0, 1.1, 1.2, 1.8, 1.9, 2.0]
    streams = [stream(*moments), stream(*(moment + 0.002 for moment in moments))]
    step_s, positions = step_with_a_prompt(streams, [(0.55, 1.001), (1.15, 1.801)], 16)
    assert step_s == pytest.approx(0.5)  # half of the samples are 0.4 s, half 0.6 s
    assert positions == 16 + (4 + 7) / 2


def test_a_prompt_that_joined_too_early_or_too_late_tells_nothing() -> None:
    streams = [every(0.1, range(3, 12)), every(0.1, range(14), 0.01)]
    with pytest.raises(LeftOut, match="no prompt was seen to join"):
        step_with_a_prompt(streams, [(0.05, 0.4), (1.05, 1.2)], 16)


def record(*chunks: Chunk, tokens: int, failure: Failure | None = None) -> Record:
    answer = Answer()
    answer.chunks, answer.usage = [*chunks], Usage(4, tokens)
    return Record(Request(0, (33,) * 4, tokens, leaves_early=False), 0.0, 0.0, answer=answer, failure=failure)


def test_tokens_without_text_have_their_moment_too() -> None:
    assert tokens_of(record(Chunk(1.0, 1, False), Chunk(2.0, 2, True), tokens=2)) == stream(1.0, 2.0)
    assert tokens_of(record(Chunk(1.0, None, False), tokens=1)) == stream(1.0)


def test_failures_and_uncounted_tokens_are_left_out_with_their_reason() -> None:
    with pytest.raises(LeftOut, match="http_400: too long"):
        tokens_of(record(tokens=1, failure=Failure("http", "too long", 400)))
    with pytest.raises(LeftOut, match="unknown number of tokens"):
        tokens_of(record(Chunk(1.0, None, True), tokens=9))


def test_sizes_double_up_to_what_was_asked_and_short_measurements_come_first() -> None:
    cells = to_measure(step_tokens=100, max_streams=12)
    within = [1, 2, 4, 8, 16, 32, 64, 100]
    assert [cell.tokens for cell in cells if isinstance(cell, Prompts)] == [*within, *reversed(within), 112, 200, 288]
    batches = [cell for cell in cells if isinstance(cell, Batch)]
    assert [batch.streams for batch in batches if batch.prompt_tokens == 16] == [2, 4, 8, 12]  # 1 is always measured
    assert {batch.streams for batch in batches if batch.prompt_tokens == 1024} == {1, 2, 4, 8, 12}
    longer = [batch.streams * batch.prompt_tokens for batch in batches if batch.prompt_tokens > 16]
    assert longer == sorted(longer)
    assert [cell for cell in cells if isinstance(cell, Mixed)] == [Mixed(Batch(8, 16), 25), Mixed(Batch(8, 16), 50)]


@pytest.mark.parametrize("batch", [Batch(1, 16), Batch(64, 16), Batch(64, 1024)])
def test_answers_are_long_enough_for_the_first_to_meet_the_last(batch: Batch) -> None:
    # decodes come first in a step, so that prompts have less of it the more streams run already
    started = steps = 0.0
    while started < batch.streams:
        started += (512 - int(started)) / batch.prompt_tokens
        steps += 1
    assert output_tokens(batch, 512) >= steps + 12
