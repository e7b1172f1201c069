import numpy as np
import pytest

from loadgen.arrivals import poisson_times_s
from loadgen.lengths import Span
from loadgen.prompts import TOKEN_IDS, Request, Workload, draw_requests


def take(workload: Workload, seed: int, count: int) -> list[Request]:
    requests = draw_requests(workload, seed)
    return [next(requests) for _ in range(count)]


def workload(*, endpoint: str = "completions", prompt: str = "8", output: str = "4", cancel: float = 0.0) -> Workload:
    assert endpoint in {"completions", "chat"}
    return Workload("chat" if endpoint == "chat" else "completions", Span.parse(prompt), Span.parse(output), cancel)


def test_gaps_are_exponential_with_the_mean_of_the_rate() -> None:
    times_s = poisson_times_s(20.0, 7, limit=20_000, duration_s=1e9)
    gaps_s = np.diff(times_s, prepend=0.0)
    assert gaps_s.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.0, rel=0.03)
    assert np.mean(gaps_s > 1 / 20) == pytest.approx(np.exp(-1), rel=0.03)


def test_the_number_in_a_second_varies_as_a_poisson_count_does_for_nothing_is_rescaled() -> None:
    counts = [len(poisson_times_s(50.0, seed, limit=1_000, duration_s=1.0)) for seed in range(400)]
    assert np.mean(counts) == pytest.approx(50, rel=0.03)
    assert np.var(counts) == pytest.approx(50, rel=0.25)


def test_the_first_arrival_waits_for_its_gap_instead_of_opening_with_a_burst() -> None:
    firsts_s = [poisson_times_s(10.0, seed, limit=1, duration_s=60.0)[0] for seed in range(300)]
    assert np.mean(firsts_s) == pytest.approx(0.1, rel=0.2)


def test_arrivals_are_bounded_in_number_and_in_time_and_run_forwards() -> None:
    assert len(poisson_times_s(1000.0, 1, limit=10, duration_s=60.0)) == 10
    times_s = poisson_times_s(10.0, 1, limit=1_000, duration_s=2.0)
    assert 5 < len(times_s) < 40
    assert times_s == sorted(times_s)
    assert max(times_s) < 2.0


def test_the_same_seed_gives_the_same_arrivals_and_another_seed_others() -> None:
    assert poisson_times_s(5.0, 3, limit=9, duration_s=60.0) == poisson_times_s(5.0, 3, limit=9, duration_s=60.0)
    assert poisson_times_s(5.0, 3, limit=9, duration_s=60.0) != poisson_times_s(5.0, 4, limit=9, duration_s=60.0)


@pytest.mark.parametrize(("text", "span"), [("128", Span(128, 128)), ("64-256", Span(64, 256)), (" 1-1 ", Span(1, 1))])
def test_a_span_is_a_number_or_a_range(text: str, span: Span) -> None:
    assert Span.parse(text) == span


@pytest.mark.parametrize("text", ["", "0", "a", "3-", "-3", "9-2", "1.5", "0-4", "12345678", "1-2-3"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must|neither"):
        Span.parse(text)


def test_lengths_are_uniform_with_both_ends_included() -> None:
    requests = take(workload(prompt="3-6", output="1-2"), 5, 4_000)
    lengths = np.bincount([request.prompt_tokens or 0 for request in requests])
    assert lengths[3:].tolist() == pytest.approx([1000] * 4, rel=0.15)
    assert {request.output_tokens for request in requests} == {1, 2}


def test_prompts_of_completions_are_token_ids_of_the_exact_length_that_no_vocabulary_lacks() -> None:
    for request in take(workload(prompt="500"), 1, 20):
        assert request.prompt_tokens == len(request.prompt) == 500
        assert all(TOKEN_IDS.low <= int(token_id) <= TOKEN_IDS.high for token_id in request.prompt)


def test_prompts_of_a_chat_are_words_whose_length_in_tokens_only_the_server_knows() -> None:
    (request,) = take(workload(endpoint="chat", prompt="12"), 1, 1)
    assert isinstance(request.prompt, str)
    assert len(request.prompt.split()) == 12
    assert request.prompt_tokens is None


def test_requests_repeat_with_the_seed_and_not_within_a_run() -> None:
    first = take(workload(prompt="16"), 11, 200)
    assert first == take(workload(prompt="16"), 11, 200)
    assert len({request.prompt for request in first}) == 200
    assert not {r.prompt for r in first} & {r.prompt for r in take(workload(prompt="16"), 12, 200)}


def test_the_share_of_clients_that_leave_early_is_the_one_asked_for() -> None:
    leaving = [request.leaves_early for request in take(workload(prompt="1", cancel=0.25), 3, 4_000)]
    assert np.mean(leaving) == pytest.approx(0.25, abs=0.03)
    assert not any(request.leaves_early for request in take(workload(), 3, 100))
    assert all(request.leaves_early for request in take(workload(cancel=1.0), 3, 100))
