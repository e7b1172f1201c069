"""Sharing a step's tokens among prompts, so that a long one does not hold up the short ones behind it."""

from collections.abc import Sequence

from shared.scheduling.draft import Draft
from shared.scheduling.limits import TokenBudget
from shared.scheduling.request import Phase, Request

PASSED_OVER_AT_MOST = 64
"""Long prompts that one plan looks behind for shorter ones: 1,000 of 2,000 tokens would cost it 3.5 ms."""


def feed_prompts(draft: Draft, unfinished: Sequence[Request]) -> None:
    """Feed unfinished prefills, then admit newcomers in queue order, as far as the budget goes.

    If the limits say so, prompts that miss more than the cap take together no more than the cap at first, and after
    them the shorter ones whatever they need; what is left then goes to the long ones. So the cap bites only while
    another prompt waits, and no token is wasted. Without it a prompt of 8,000 tokens keeps everybody behind it from a
    first token for 16 steps of 512.
    """
    cap = draft.limits.long_prefill_tokens or draft.limits.step_tokens
    share = TokenBudget(cap)
    long_ones = _admit_invited(draft, share, cap)
    long_ones += _extend(draft, unfinished, share, cap)
    long_ones += _admit(draft, share, cap)
    for request in long_ones:
        if not draft.budget.left:
            break
        if request.phase is Phase.RUNNING:
            draft.extend(request)
        elif not draft.admit(request):
            break


def _extend(draft: Draft, unfinished: Sequence[Request], share: TokenBudget, cap: int) -> list[Request]:
    """Feed unfinished prefills in queue order and return the long ones."""
    long_ones: list[Request] = []
    for request in unfinished:
        if not draft.budget.left:
            break
        if request.phase is not Phase.RUNNING:
            continue  # it gave way in this very step
        is_long = draft.misses_more_than(cap, request)
        if is_long:
            long_ones.append(request)
        draft.extend(request, share.take(cap) if is_long else None)
    return long_ones


def _admit_invited(draft: Draft, share: TokenBudget, cap: int) -> list[Request]:
    """Admit who took somebody's place, before less urgent prompts are fed; return it if it is long."""
    urgent = draft.invited
    if urgent is None:
        return []
    is_long = draft.misses_more_than(cap, urgent)
    draft.admit(urgent, at_most=share.take(cap) if is_long else None)
    return [urgent] if is_long else []


def _admit(draft: Draft, share: TokenBudget, cap: int) -> list[Request]:
    """Admit in queue order and return the long ones, whether they have begun or found their share used up."""
    long_ones: list[Request] = []
    for request in draft.waiting():
        if not draft.misses_more_than(cap, request):
            if not draft.admit(request):
                break
            continue
        long_ones.append(request)
        if len(long_ones) > PASSED_OVER_AT_MOST:
            break
        granted = share.take(cap)
        if granted and not draft.admit(request, at_most=granted):
            break
    return long_ones
