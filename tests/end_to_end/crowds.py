"""Black-box cases of many clients at once, in any size: the short forms are tests, the long ones run by hand."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.benchmarks.company import Company
from tests.end_to_end.asking import post, serves, session_of, stream
from tests.end_to_end.served import eventually, figures, nothing_is_left
from tests.integration.processes import Up

SETTLED_S = 2.0
REFUSED_WITHIN_S = 0.1
QUIET_CORES = 0.3
"""Others may keep so much of the machine busy while a refusal is timed; beyond it only the median is looked at."""


@dataclass(frozen=True)
class Flood:
    """What became of a flood."""

    served: int
    refused: int
    slowest_refusal_s: float
    """Of those that came one after another while the line was full."""
    others_cores: float

    def __str__(self) -> str:
        return (
            f"{self.served} served, {self.refused} refused; with a full line the slowest refusal took "
            f"{self.slowest_refusal_s * 1000:.1f} ms (others kept {self.others_cores:.2f} cores busy)"
        )


async def leave_after_first_chunk(up: Up, clients: int) -> None:
    """BB-8: so many clients close their socket after their first chunk; two seconds later nothing is left of them."""
    aborts = 'slipstream_requests_finished_total{reason="abort"}'
    before = await figures(up)
    async with session_of(up) as session:

        async def leave_early(number: int) -> None:
            async with stream(session, prompt=f"n {number}", max_tokens=500) as response:
                assert response.status == 200
                assert await response.content.readany()
                response.close()

        await asyncio.gather(*map(leave_early, range(clients)))
        await asyncio.sleep(SETTLED_S)  # part of the case, and longer than a figure of the leader's is old
        found = await figures(up)
        assert nothing_is_left(found), found
        assert found[aborts] - before[aborts] == clients
        await serves(session)


async def leave_again_and_again(up: Up, slots: int, rounds: int) -> None:
    """BB-22: three times as many requests as slots, every third of which goes away, so many times over."""
    async with session_of(up) as session:

        async def ask(number: int) -> int:
            fields: dict[str, Any] = {"prompt": f"n {number}", "max_tokens": 20, "ignore_eos": True}
            if number % 3:
                return (await post(session, **fields))[0]
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await post(session, **fields)
            return 0

        for _ in range(rounds):
            statuses = await asyncio.gather(*map(ask, range(3 * slots)))
            assert [status for number, status in enumerate(statuses) if number % 3] == [200] * (2 * slots)
        await eventually(nothing_is_left, up)
        await serves(session)


async def flood(up: Up, slots: int, queue: int, *, timed: int) -> Flood:
    """BB-14: five times what there is room for, at once; then so many more, one by one, while the line is full.

    A refusal's time is taken one by one: in a flood it is that of the client's own thread.
    """
    async with session_of(up) as session:
        count = 5 * (slots + queue)
        answers = await asyncio.gather(
            *(post(session, prompt="x", max_tokens=100, ignore_eos=True) for _ in range(count))
        )
        whole = [answer for status, answer, _ in answers if status == 200]
        refused = [answer for status, answer, _ in answers if status in {429, 503}]
        assert len(whole) + len(refused) == count
        assert len(whole) >= queue
        assert {answer["error"]["code"] for answer in refused} == {"queue_full"}
        assert all(answer["usage"]["completion_tokens"] == 100 for answer in whole)
        await serves(session)
        company = Company()
        took_s = await _time_refusals(up, session, slots, queue, timed)
        cores = company.cores()
    judged_s = took_s[-1] if cores < QUIET_CORES else took_s[len(took_s) // 2]
    assert judged_s < REFUSED_WITHIN_S, took_s
    await eventually(nothing_is_left, up)
    return Flood(len(whole), len(refused), took_s[-1], cores)


async def _time_refusals(up: Up, session: aiohttp.ClientSession, slots: int, queue: int, times: int) -> list[float]:
    """Fill the slots, then the queue; return what those take who come after that, sorted."""
    fields: dict[str, Any] = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
    asked = [asyncio.ensure_future(post(session, **fields)) for _ in range(slots)]
    try:
        await eventually(lambda found: found["slipstream_requests_running"] == slots, up)
        asked += [asyncio.ensure_future(post(session, **fields)) for _ in range(queue)]
        await eventually(lambda found: found["slipstream_requests_waiting"] == queue, up)
        return sorted([await _refusal_s(session, fields) for _ in range(times)])
    finally:
        for one in asked:
            one.cancel()
        await asyncio.wait(asked, timeout=20)


async def _refusal_s(session: aiohttp.ClientSession, fields: dict[str, Any]) -> float:
    status, said, took_s = await post(session, **fields)
    assert (status, said["error"]["code"]) == (429, "queue_full")
    return took_s
