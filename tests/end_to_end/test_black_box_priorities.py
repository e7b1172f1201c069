"""Black-box cases of priorities, by number: who is urgent takes a running place, and who lost it loses no token."""

import asyncio
import statistics
from pathlib import Path

import pytest

from shared.runtime.clock import monotonic
from tests.end_to_end.asking import serves, session_of
from tests.end_to_end.asking import stream as raw_stream
from tests.end_to_end.served import FAKE, eventually, nothing_is_left
from tests.end_to_end.undisturbed import expected_text, stream
from tests.integration.processes import Up, slipstream_up

pytestmark = pytest.mark.timeout(120)

SLOTS = 4
URGENT, PATIENT = -10, 10
FEW_STEPS = 8
"""Two plans in flight, its own, and what the processes need for them."""


async def fill(tasks: asyncio.TaskGroup, up: Up, tokens: int) -> list[asyncio.Task[str]]:
    """Ask for twice as many patient answers as there are places, and return once all places are taken."""
    begun = [asyncio.Event() for _ in range(2 * SLOTS)]
    patient = [
        tasks.create_task(stream(up, f"patient {n}", tokens, begun[n], priority=PATIENT)) for n in range(2 * SLOTS)
    ]
    first = asyncio.as_completed([event.wait() for event in begun], timeout=30)
    for _ in range(SLOTS):
        await next(first)
    return patient


async def all_as_alone(asked: list[asyncio.Task[str]], name: str, tokens: int) -> None:
    assert [await one for one in asked] == [expected_text(f"{name} {n}", tokens) for n in range(len(asked))]


@pytest.mark.parametrize("kv_tokens", [65_536, 720])
async def test_bb_4_urgent_requests_in_a_full_house_are_served_and_nobody_loses_a_token(
    kv_tokens: int, short_folder: Path
) -> None:
    """The second pool holds three of them: memory is taken from the patient as well as places."""
    flags = ("--queue", "priority", "--max-num-seqs", str(SLOTS), "--kv-tokens", str(kv_tokens))
    with slipstream_up(short_folder, *FAKE, *flags, "--fake-step-ms", "5") as up:
        up.until_ready()
        async with asyncio.TaskGroup() as tasks:
            patient = await fill(tasks, up, 200)
            urgent = [
                tasks.create_task(stream(up, f"urgent {n}", 200, asyncio.Event(), priority=URGENT)) for n in range(8)
            ]
            await all_as_alone(urgent, "urgent", 200)
            assert not all(one.done() for one in patient), "who is urgent comes first"
            await all_as_alone(patient, "patient", 200)
        # at least one: on a busy machine some of the patient may have ended before the last of the urgent comes
        found = await eventually(lambda found: found["slipstream_preemptions_total"] > 0, up)
        assert found["slipstream_generation_tokens_total"] == (8 + 2 * SLOTS) * 200
        await eventually(nothing_is_left, up)
        async with session_of(up) as session:
            await serves(session)


async def test_bb_5_an_urgent_request_has_its_first_token_after_a_few_steps_and_who_gave_way_says_the_same(
    short_folder: Path,
) -> None:
    flags = ("--queue", "priority", "--max-num-seqs", str(SLOTS), "--fake-step-ms", "30", "--log-level", "debug")
    with slipstream_up(short_folder, *FAKE, *flags) as up:
        up.until_ready()
        async with session_of(up) as session, asyncio.TaskGroup() as tasks:
            patient = await fill(tasks, up, 60)
            began_s = monotonic()
            async with raw_stream(session, prompt="urgent", max_tokens=5, priority=URGENT) as response:
                assert await response.content.readline()
                ttft_s = monotonic() - began_s
                assert await response.content.read()
            await all_as_alone(patient, "patient", 60)
        step_s = statistics.median(event["step_ms"] for event in up.events("step_executed")) / 1000
        assert ttft_s < FEW_STEPS * step_s, f"{ttft_s / step_s:.1f} steps"
        (urgent,) = [event["request"] for event in up.events("submitted")][-1:]
        joined = next(plan for plan in up.events("plan") if urgent in plan["new"])
        assert len(joined["preempted"]) == 1
        again = [plan for plan in up.events("plan") if joined["preempted"][0] in {row[0] for row in plan["slices"]}]
        assert again[-1]["step"] > joined["step"], "and goes on later"
