"""Who runs when, as the plans of the real services say it: iteration-level scheduling beside request-level batching."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.token_client import TokenClient, Wanted, token_client
from tests.integration.processes import slipstream_up, variable_of

MODEL = "fake"
Event = dict[str, Any]


def run(
    folder: Path, course: Callable[[TokenClient], Awaitable[list[str]]], *flags: str
) -> tuple[list[str], list[Event]]:
    """Run a course on the fake executor; return the names it made and the scheduler's events, in order."""
    with slipstream_up(
        folder, "--executor", "fake", "--served-model-name", MODEL, "--log-level", "debug", *flags
    ) as up:
        up.until_ready()
        redis_url = variable_of(up.part("worker"), "SLIPSTREAM_REDIS_URL")

        async def within() -> list[str]:
            async with token_client(redis_url, MODEL) as client:
                return await course(client)

        names = asyncio.run(within())
        return names, [event for event in up.events() if event["event"] in {"plan", "result", "submitted", "cancelled"}]


def steps_of(name: str, events: list[Event]) -> list[int]:
    """Return the steps whose plans feed a request, as the epoch counts them."""
    return [e["step"] for e in events if e["event"] == "plan" and name in {slice_[0] for slice_ in e["slices"]}]


def next_plan(events: list[Event], after: Callable[[Event], bool]) -> Event:
    """Return the first plan made after an event."""
    at = next(index for index, event in enumerate(events) if after(event))
    return next(event for event in events[at:] if event["event"] == "plan")


async def ends_leaves_and_joins(client: TokenClient) -> list[str]:
    """A ends first and B goes on; C arrives while both run; a third place is free from the start."""
    a, b = await client.submit(Wanted((65,) * 4, 3), Wanted((66,) * 4, 12))
    await client.first_token(a)
    (c,) = await client.submit(Wanted((67,) * 6, 2))
    for name in (a, b, c):
        await client.answer(name)
    return [a, b, c]


STEP = ("--fake-step-ms", "40", "--plan-depth", "1")


@pytest.mark.timeout(90)
@pytest.mark.parametrize("policy", ["sarathi", "orca"])
def test_t2_a_late_request_joins_the_next_plan_made_and_one_that_ended_is_in_none(
    policy: str, short_folder: Path
) -> None:
    (a, b, c), events = run(short_folder, ends_leaves_and_joins, "--policy", policy, *STEP)
    joined = next_plan(events, lambda e: e["event"] == "submitted" and e["request"] == c)
    assert joined["new"] == [c]
    assert b in {slice_[0] for slice_ in joined["slices"]}
    left = next_plan(events, lambda e: e["event"] == "result" and a in e["ended"])
    assert a in left["released"]
    assert max(steps_of(a, events)) < left["step"]
    assert [len(steps_of(name, events)) for name in (a, b, c)] == [3, 12, 2]


@pytest.mark.timeout(90)
def test_t1_under_static_a_late_request_waits_until_the_whole_batch_has_ended(short_folder: Path) -> None:
    (a, b, c), events = run(short_folder, ends_leaves_and_joins, "--policy", "static", *STEP)
    assert min(steps_of(c, events)) == max(*steps_of(a, events), *steps_of(b, events)) + 1


async def four_for_three_places(client: TokenClient) -> list[str]:
    """A 20 tokens, B 57, C 200, and D, for whom there is no place at first."""
    names = await client.submit(*(Wanted((65 + i,) * 4, length) for i, length in enumerate((20, 57, 200, 5))))
    for name in names:
        await client.answer(name)
    return names


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("policy", "step_of_d"), [("sarathi", 21), ("orca", 21), ("static", 201)])
def test_t14_t15_the_fourth_request_takes_the_place_of_the_first_that_ends_or_waits_for_the_last(
    policy: str, step_of_d: int, short_folder: Path
) -> None:
    flags = ("--policy", policy, "--max-num-seqs", "3", "--plan-depth", "1")
    (a, b, c, d), events = run(short_folder, four_for_three_places, *flags)
    first = min(steps_of(a, events))
    assert min(steps_of(b, events)) == min(steps_of(c, events)) == first
    assert min(steps_of(d, events)) - first + 1 == step_of_d
    assert len(steps_of(c, events)) == 200


async def one_leaves_while_it_runs(client: TokenClient) -> list[str]:
    """A is cancelled in mid-stream; B runs on."""
    a, b = await client.submit(Wanted((65,) * 4, 500), Wanted((66,) * 4, 30))
    await client.first_token(a)
    await client.cancel(a)
    await client.answer(b)
    return [a, b]


@pytest.mark.timeout(90)
def test_a_cancelled_request_is_in_no_plan_made_after_it(short_folder: Path) -> None:
    (a, _), events = run(short_folder, one_leaves_while_it_runs, "--fake-step-ms", "20", "--plan-depth", "2")
    told = next_plan(events, lambda e: e["event"] == "cancelled" and e["request"] == a)
    assert a in told["released"]
    assert max(steps_of(a, events)) < told["step"]


async def an_urgent_one_finds_both_places_taken(client: TokenClient) -> list[str]:
    """A and B run, neither of them urgent, and C waits behind them; then U comes, who is."""
    a, b, c = await client.submit(*(Wanted((65 + i,) * 4, 30, priority=5) for i in range(3)))
    await client.first_token(b)
    (u,) = await client.submit(Wanted((70,) * 4, 3, priority=0))
    for name in (a, b, c, u):
        await client.answer(name)
    return [a, b, c, u]


@pytest.mark.timeout(90)
def test_t18_under_priority_an_urgent_request_takes_the_place_of_the_least_urgent_that_runs(short_folder: Path) -> None:
    flags = ("--queue", "priority", "--max-num-seqs", "2", *STEP)
    (a, b, c, u), events = run(short_folder, an_urgent_one_finds_both_places_taken, *flags)
    joined = next_plan(events, lambda e: e["event"] == "submitted" and e["request"] == u)
    assert (joined["new"], joined["preempted"]) == ([u], [b])
    assert max(steps_of(u, events)) < min(steps_of(c, events)), "and who waited is not let in before"
    assert len(steps_of(u, events)) == 3
    assert len(steps_of(a, events)) == 30, "the first goes on"


@pytest.mark.timeout(90)
def test_without_the_priority_queue_the_urgent_one_waits_for_its_turn(short_folder: Path) -> None:
    flags = ("--max-num-seqs", "2", *STEP)
    (_, _, c, u), events = run(short_folder, an_urgent_one_finds_both_places_taken, *flags)
    assert min(steps_of(c, events)) <= min(steps_of(u, events))
    assert not any(event["preempted"] for event in events if event["event"] == "plan")


async def one_tenant_floods(client: TokenClient) -> list[str]:
    """A tenant submits six requests at once, another one right behind them."""
    names = await client.submit(
        *(Wanted((65 + i,) * 4, 4, tenant="many") for i in range(6)), Wanted((75,) * 4, 4, tenant="one")
    )
    for name in names:
        await client.answer(name)
    return names


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("queue", "behind"), [("fair", 1), ("fcfs", 6)])
def test_under_fair_a_tenant_does_not_wait_for_all_that_another_has_sent(
    queue: str, behind: int, short_folder: Path
) -> None:
    names, events = run(short_folder, one_tenant_floods, "--queue", queue, "--max-num-seqs", "1", *STEP)
    starts = sorted(names, key=lambda name: min(steps_of(name, events)))
    assert starts.index(names[6]) == behind
