"""Planner, ledger and the fake executor together: what is found in the prefix cache, and what must not be."""

from itertools import count

import pytest

from services.worker.fake_executor import FakeExecutor, fake_next_token
from services.worker.fake_tokenizer import EOS_ID
from shared.scheduling.limits import Limits
from tests.conductor import Conductor, Ids

BLOCK = 16


def conductor(*, blocks: int = 64, depth: int = 1, budget: int = 512) -> Conductor:
    return Conductor(FakeExecutor(blocks), (EOS_ID,), Limits(budget, 8), depth=depth)


def answer(prompt: Ids, max_tokens: int) -> Ids:
    context = list(prompt)
    while len(context) < len(prompt) + max_tokens:
        context.append(fake_next_token(context))
        if context[-1] == EOS_ID:
            break
    return tuple(context[len(prompt) :])


def prompt_that_ends_at_once(length: int) -> Ids:
    """Return a prompt whose very first token ends the answer."""
    return next(ids for n in count() if fake_next_token(ids := (n, *range(length - 1))) == EOS_ID)


@pytest.mark.parametrize(("length", "hit"), [(16, 0), (17, 16), (47, 32), (48, 32), (49, 48), (50, 48)])
def test_a_prompt_asked_again_is_found_but_for_its_last_token(length: int, hit: int) -> None:
    one = conductor()
    prompt = tuple(range(length))
    one.submit("cold", prompt, 5)
    one.run_dry()
    one.submit("warm", prompt, 5)
    one.run_dry()
    assert one.starts == [("cold", 0), ("warm", hit)]
    assert one.text("warm") == one.text("cold") == answer(prompt, 5)
    assert (one.answers["cold"].cached_tokens, one.answers["warm"].cached_tokens) == (0, hit)


def test_another_salt_finds_nothing() -> None:
    one = conductor()
    for name, salt in (("mine", "m"), ("theirs", "t"), ("mine again", "m")):
        one.submit(name, tuple(range(40)), 3, salt=salt)
        one.run_dry()
    assert one.starts == [("mine", 0), ("theirs", 0), ("mine again", 32)]


def test_the_next_turn_of_a_chat_finds_what_was_generated() -> None:
    one = conductor()
    prompt = tuple(range(60, 90))
    one.submit("first", prompt, 40)
    one.run_dry()
    turn = (*prompt, *one.text("first"), 1, 2, 3)
    one.submit("second", turn, 5)
    one.run_dry()
    computed = len(prompt) + len(one.text("first")) - 1  # the token sampled last has no keys and values
    assert one.starts[-1] == ("second", computed // BLOCK * BLOCK)
    assert one.starts[-1][1] > len(prompt)
    assert one.text("second") == answer(turn, 5)


@pytest.mark.parametrize("depth", [2, 3])
def test_the_block_that_a_skipped_row_would_have_filled_is_not_found(depth: int) -> None:
    prompt = prompt_that_ends_at_once(BLOCK - 1)
    one = conductor(depth=depth)
    one.submit("ends", prompt, 9)
    one.run_dry()
    assert one.text("ends") == (EOS_ID,)
    turn = (*prompt, EOS_ID, 5)
    one.submit("turn", turn, 4)
    one.run_dry()
    assert one.starts[-1] == ("turn", 0)
    assert one.text("turn") == answer(turn, 4)


def test_preempted_found_again_and_resumed_with_the_same_tokens() -> None:
    one = conductor(blocks=6)
    prompts = {f"r{n}": (*range(n * 40, n * 40 + 17), n) for n in range(3)}
    for name, prompt in prompts.items():
        one.submit(name, prompt, 40)
    one.run_dry()
    again = [(name, start) for name, start in one.starts if name in one.preempted and start]
    assert one.preempted
    assert again
    for name, prompt in prompts.items():
        assert one.text(name) == answer(prompt, 40)


def test_a_new_leader_finds_what_the_old_one_left() -> None:
    one = conductor()
    prompt = tuple(range(50))
    one.submit("before", prompt, 30)
    for _ in range(5):
        one.iterate()
    one.claim()
    one.submit("after", prompt, 4)
    one.run_dry()
    assert one.starts == [("before", 0), ("after", 48)]
    assert one.text("before") == answer(prompt, 30)
    assert one.text("after") == answer(prompt, 4)
