import json
from typing import Any

import pytest

from loadgen.answer import Answer, Usage

Event = dict[str, Any] | bytes

ROLE: Event = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
STOP: Event = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None}
DONE: Event = b"[DONE]"


def delta(text: str, tokens: int | None = None) -> Event:
    usage = None if tokens is None else {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], "usage": usage}


def usage(tokens: int) -> Event:
    return {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}}


def answer(*events: Event) -> Answer:
    """One event per second, from second 0."""
    taken = Answer()
    for second, event in enumerate(events):
        taken.take(event if isinstance(event, bytes) else json.dumps(event).encode(), float(second))
    return taken


def failure_of(*events: Event) -> str | None:
    verdict = answer(*events).verdict()
    return verdict and verdict.name


def test_a_whole_answer_has_every_moment_and_no_failure() -> None:
    whole = answer(ROLE, delta("Hel"), delta("lo"), STOP, usage(2), DONE)
    assert whole.verdict() is None
    assert (whole.first_event_s, whole.first_text_s, whole.done_s) == (0.0, 1.0, 5.0)
    assert whole.finish_reason == "stop"
    assert whole.usage == Usage(prompt_tokens=9, completion_tokens=2)


def test_the_first_text_is_neither_the_role_nor_an_empty_text() -> None:
    assert answer(ROLE, delta(""), delta("Hi")).first_text_s == 2.0
    assert answer(ROLE, delta("", 1), STOP, usage(1), DONE).first_text_s is None


def test_text_is_found_in_completions_and_in_thoughts() -> None:
    assert answer({"choices": [{"text": ""}]}, {"choices": [{"text": "a"}]}).first_text_s == 1.0
    assert answer({"choices": [{"delta": {"reasoning_content": "hm"}}]}).first_text_s == 0.0


def test_a_finish_reason_may_come_with_the_last_text() -> None:
    last = {"choices": [{"text": "end", "finish_reason": "length"}]}
    assert failure_of(last, usage(1), DONE) is None


def test_chunks_carry_the_servers_count_and_the_final_sum_is_no_chunk() -> None:
    chunks = answer(delta("a", 1), delta("bc", 3), STOP, usage(3), DONE).chunks
    assert [(chunk.at_s, chunk.tokens_so_far, chunk.has_text) for chunk in chunks] == [
        (0.0, 1, True),
        (1.0, 3, True),
        (2.0, None, False),
    ]


def test_a_stream_that_stops_short_of_done_has_failed_however_much_came() -> None:
    assert failure_of(delta("a"), STOP, usage(1)) == "no_done"
    assert failure_of() == "no_done"


def test_an_answer_without_a_finish_reason_has_failed() -> None:
    assert failure_of(delta("a"), usage(1), DONE) == "no_finish_reason"


def test_an_answer_whose_tokens_nobody_counted_has_failed() -> None:
    assert failure_of(delta("a"), STOP, DONE) == "no_usage"


def test_a_sum_below_the_count_on_the_way_is_a_failure() -> None:
    assert failure_of(delta("a", 5), STOP, usage(4), DONE) == "usage_mismatch"


@pytest.mark.parametrize("error", [{"message": "out of memory", "type": "server_error"}, "out of memory"])
def test_an_error_event_is_a_failure_even_if_done_follows(error: object) -> None:
    failed = answer(delta("a"), {"error": error}, DONE)
    verdict = failed.verdict()
    assert verdict is not None
    assert (verdict.kind, verdict.message) == ("error_event", "out of memory")


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"choices": 3}', b'"\xff"', b'{"usage": {"completion_tokens": "x"}}'])
def test_an_event_that_is_not_what_it_should_be_is_a_failure(data: bytes) -> None:
    assert failure_of(delta("a"), data, DONE) == "bad_event"


def test_what_comes_after_the_end_does_not_count() -> None:
    ended = answer(delta("a"), STOP, usage(1), DONE, {"error": "too late"}, delta("b"))
    assert ended.verdict() is None
    assert ended.done_s == 3.0
    assert len(ended.chunks) == 2
