"""What a gateway accepts, and when it asks again."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.answer import FRUITLESS_ATTEMPTS, Accepted, Answer, Lost, Wanted
from shared.ids import EntryId, GatewayId, RequestId, WorkerId
from shared.protocol.messages import Logprobs, Sampling, SubmitRequest, TokenRow

EOS = 0
W1, W2 = WorkerId("w1"), WorkerId("w2")
GATEWAY = GatewayId("g")


def answer(**fields: Any) -> Answer:
    wanted = {"prompt_ids": (7, 8), "max_tokens": 10, "sampling": Sampling(seed=3), "ignore_eos": False}
    return Answer(Wanted(request=RequestId("r"), eos_ids=frozenset({EOS}), **{**wanted, **fields}))


def row(first_index: int, *token_ids: int, attempt: int = 1, finish: Any = None, cached: int = 0) -> TokenRow:
    return TokenRow(RequestId("r"), attempt, first_index, token_ids, finish, cached)


def test_tokens_in_order_are_accepted_once() -> None:
    one = answer()
    assert one.accept(W1, row(0, 1, 2)) == Accepted((1, 2))
    assert one.accept(W1, row(0, 1, 2)) == Accepted(())
    assert one.accept(W1, row(1, 2, 3)) == Accepted((3,))
    assert one.accept(W1, row(3, finish="length")) == Accepted((), "length")
    assert one.output_ids == [1, 2, 3]


def test_a_gap_is_a_loss() -> None:
    assert answer().accept(W1, row(1, 5)) == Lost("gap")


def test_a_second_worker_in_one_attempt_is_a_loss() -> None:
    one = answer()
    one.accept(W1, row(0, 1))
    assert one.accept(W2, row(1, 2)) == Lost("two workers")


def test_another_worker_is_welcome_in_the_next_attempt_and_the_old_one_is_not_heard() -> None:
    one = answer()
    one.accept(W1, row(0, 1))
    assert one.try_again()
    assert one.accept(W1, row(1, 9, attempt=1)) == Accepted(())
    assert one.accept(W2, row(1, 2, attempt=2)) == Accepted((2,))
    assert one.output_ids == [1, 2]


def test_a_resubmission_carries_what_was_accepted_and_its_old_place_in_line() -> None:
    one = answer()
    first = SubmitRequest(RequestId("r"), 1, GATEWAY, (7, 8), 10, Sampling(seed=3))
    assert one.submission(GATEWAY) == first
    one.submitted(1, EntryId("5-0"))
    one.accept(W1, row(0, 1, 2))
    one.try_again()
    again = one.submission(GATEWAY)
    assert (again.attempt, again.output_ids, again.arrival, again.max_tokens) == (2, (1, 2), EntryId("5-0"), 10)


def test_how_urgent_whose_and_how_salted_it_is_goes_with_every_attempt() -> None:
    one = answer(priority=-7, tenant="0123456789abcdef", cache_salt="s")
    for attempt in (1, 2):
        sent = one.submission(GATEWAY)
        assert (sent.attempt, sent.priority, sent.tenant, sent.cache_salt) == (attempt, -7, "0123456789abcdef", "s")
        one.try_again()


def test_what_the_first_token_says_of_the_cache_stands_whatever_later_rows_and_attempts_say() -> None:
    one = answer()
    assert one.cached_tokens == 0
    one.accept(W1, row(0, 1, cached=1))
    one.accept(W1, row(1, 2, cached=2))
    one.try_again()
    one.accept(W2, row(2, 3, attempt=2, cached=2))
    assert one.cached_tokens == 1


def test_a_first_token_that_was_computed_from_nothing_stays_uncached_after_a_recovery() -> None:
    one = answer()
    one.accept(W1, row(0, 1, cached=0))
    one.try_again()
    one.accept(W2, row(1, 2, attempt=2, cached=2))
    assert one.cached_tokens == 0


def test_an_attempt_that_brought_no_token_says_nothing_of_the_cache() -> None:
    one = answer()
    one.accept(W1, row(0, cached=2))
    assert one.accept(W1, row(3, 1, cached=2)) == Lost("gap")
    one.try_again()
    one.accept(W1, row(0, 1, attempt=1, cached=2))
    one.accept(W2, row(0, 1, attempt=2, cached=1))
    assert one.cached_tokens == 1


@given(st.integers(-(2**63), 2**63 - 1))
def test_never_more_of_a_prompt_is_cached_than_it_has(cached: int) -> None:
    one = answer()
    one.accept(W1, row(0, 1, cached=cached))
    assert one.cached_tokens == min(max(cached, 0), 2)


def test_a_late_answer_to_the_first_write_still_gives_the_place_in_line() -> None:
    one = answer()
    one.try_again()
    one.submitted(1, EntryId("5-0"))
    assert (one.arrival, one.entry) == (EntryId("5-0"), None)


def test_three_attempts_in_a_row_without_a_token_are_the_end() -> None:
    one = answer()
    assert [one.try_again() for _ in range(FRUITLESS_ATTEMPTS)] == [True, True, False]


def test_a_token_makes_up_for_earlier_losses_and_the_gateways_own_death_is_nobodys_fault() -> None:
    one = answer()
    for index in range(2 * FRUITLESS_ATTEMPTS):
        one.accept(W1, row(index, 5, attempt=one.attempt))
        assert one.try_again()
    assert all(one.try_again(blameless=True) for _ in range(2 * FRUITLESS_ATTEMPTS))


def test_missing_is_what_was_read_and_is_not_held() -> None:
    one = answer()
    assert not one.is_missing(EntryId("99-0"), None), "the write is still under way"
    one.submitted(1, EntryId("10-2"))
    assert not one.is_missing(EntryId("9-9"), None), "not read yet"
    assert not one.is_missing(EntryId("10-2"), 1), "held"
    assert one.is_missing(EntryId("10-2"), None)
    assert one.is_missing(EntryId("11-0"), 2), "held at another attempt"


def test_a_complete_answer_needs_nobody() -> None:
    one = answer(max_tokens=2)
    assert one.complete() is None
    one.accept(W1, row(0, 1, 2))
    assert one.complete() == "length"
    ended = answer()
    ended.accept(W1, row(0, 1, EOS))
    assert ended.complete() == "stop"
    longer = answer(ignore_eos=True)
    longer.accept(W1, row(0, 1, EOS))
    assert longer.complete() is None


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(1, 3), st.sampled_from([W1, W2]))))
def test_whatever_comes_the_accepted_tokens_are_a_prefix_of_the_true_answer(
    rows: list[tuple[int, int, int, WorkerId]],
) -> None:
    truth = tuple(range(100, 120))
    one = answer(max_tokens=20)
    for first_index, count, attempt, worker in rows:
        before = tuple(one.output_ids)
        heard = one.accept(worker, row(first_index, *truth[first_index : first_index + count], attempt=attempt))
        if isinstance(heard, Lost):
            assert tuple(one.output_ids) == before
            one.try_again(blameless=True)
        else:
            assert before + heard.token_ids == tuple(one.output_ids)
        assert tuple(one.output_ids) == truth[: len(one.output_ids)]


def asking(prompt_tokens: int) -> Answer:
    return answer(prompt_ids=tuple(range(prompt_tokens)), sampling=Sampling(prompt_logprobs=0))


def told(first: int, end: int, *token_ids: int, attempt: int = 1) -> TokenRow:
    """Bring what is told of some tokens of a prompt: of each its own place."""
    of_prompt = tuple(Logprobs(-float(place)) for place in range(first, end))
    return TokenRow(RequestId("r"), attempt, 0, token_ids, prompt_first=first, prompt_logprobs=of_prompt)


def places(heard: Accepted | Lost) -> list[int]:
    assert isinstance(heard, Accepted)
    return [-int(one.logprob) for one in heard.of_prompt]


def test_what_is_told_of_a_prompt_is_accepted_once_and_comes_before_its_first_token() -> None:
    one = asking(6)
    assert places(one.accept(W1, told(1, 3))) == [1, 2]
    assert places(one.accept(W1, told(1, 3))) == []
    assert places(one.accept(W1, told(1, 4))) == [3], "it was preempted, and is computed again"
    assert places(one.accept(W1, told(4, 6, 9))) == [4, 5]
    assert one.output_ids == [9]
    assert one.accept(W1, told(4, 6, 9)) == Accepted()


def test_a_gap_in_what_is_told_of_a_prompt_is_a_loss() -> None:
    one = asking(6)
    one.accept(W1, told(1, 3))
    assert one.accept(W1, told(4, 6)) == Lost("gap")
    assert one.accept(W1, told(3, 5, 9)) == Lost("gap"), "a token without all of the prompt"
    assert asking(6).accept(W1, row(0, 9)) == Lost("gap")
    assert asking(1).accept(W1, row(0, 9)) == Accepted((9,)), "nothing is told of a first token"


def test_another_attempt_tells_what_is_missing_and_asks_no_more_once_nothing_is() -> None:
    one = asking(6)
    one.accept(W1, told(1, 3))
    one.try_again()
    assert one.submission(GATEWAY).sampling.prompt_logprobs == 0
    assert one.accept(W1, told(3, 6, attempt=1)) == Accepted(), "the lost one is not heard"
    assert places(one.accept(W2, told(1, 6, 9, attempt=2))) == [3, 4, 5]
    one.try_again()
    assert one.submission(GATEWAY) == SubmitRequest(
        RequestId("r"), 3, GATEWAY, tuple(range(6)), 10, Sampling(), output_ids=(9,)
    )
    assert one.accept(W1, TokenRow(RequestId("r"), 3, 1, (8,))) == Accepted((8,))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=12))
def test_whatever_comes_twice_or_too_early_a_prompt_is_told_in_order_and_once(rows: list[tuple[int, int]]) -> None:
    one = asking(10)
    heard: list[int] = []
    for first, count in rows:
        accepted = one.accept(W1, told(first, min(first + count, 10)))
        if first > len(heard) + 1:
            assert accepted == Lost("gap")
        else:
            heard += places(accepted)
            assert heard == list(range(1, len(heard) + 1))
