"""Steps that a worker begins behind the one that runs, before the turn of their plans."""

import asyncio

import pytest
from structlog.testing import capture_logs

from services.worker.fake_executor import fake_next_token
from shared.ids import RequestId, WorkerId
from shared.protocol.messages import (
    ClaimWorker,
    ResultRow,
    StepFailed,
    StepPlan,
    StepResult,
    WorkerState,
)
from shared.runtime.clock import monotonic
from tests.unit.worker_stage import (
    PROMPT,
    WITHIN_S,
    Leader,
    decode_plan,
    laid_out,
    submit,
    within_a_step,
)


async def test_the_next_plan_is_laid_out_while_a_step_runs_and_awaits_its_token() -> None:
    async with within_a_step() as (leader, worker):
        await leader.send(worker, decode_plan(2), decode_plan(3))
        await laid_out(leader, 2)
        assert [row.awaits for row in leader.executor.prepared[1]] == [0]
        assert leader.executor.executed == 1
        laid_out_s = monotonic()
        await asyncio.sleep(0)
        held_s = monotonic() - laid_out_s
        leader.executor.released.set()
        context = list(PROMPT)
        for step in (1, 2, 3):
            result = await leader.answer(worker, StepResult)
            assert result.waited_s is not None
            assert result.waited_s >= (held_s if step > 1 else 0)
            context.append(fake_next_token(context))
            assert (result.step, result.rows[0].token_ids) == (step, (context[-1],))


async def test_a_request_that_ends_in_the_step_is_skipped_in_the_one_begun_behind_it() -> None:
    async with within_a_step(submit(max_tokens=1)) as (leader, worker):
        await leader.send(worker, decode_plan(2), StepPlan(1, 3, released=(RequestId("r"),)))
        await laid_out(leader, 2)
        leader.executor.released.set()
        first = await leader.answer(worker, StepResult)
        assert first.rows[0].finish == "length"
        second = await leader.answer(worker, StepResult)
        assert second.rows == (ResultRow(RequestId("r"), 0, skipped=True),)
        assert (await leader.answer(worker, StepResult)).rows == ()
        assert (await leader.claim(worker)).residents == ()


async def test_a_claim_behind_a_plan_begun_ahead_is_answered_when_both_steps_have_been() -> None:
    async with within_a_step() as (leader, worker):
        await leader.send(worker, decode_plan(2), ClaimWorker("other"))
        await laid_out(leader, 2)
        leader.executor.released.set()
        assert [(await leader.answer(worker, StepResult)).step for _ in range(2)] == [1, 2]
        state = await leader.answer(worker, WorkerState)
        assert (state.epoch, len(state.residents[0].output_ids)) == (2, 2)


async def test_a_step_that_raises_takes_along_the_one_begun_behind_it() -> None:
    async with within_a_step() as (leader, worker):
        leader.executor.breaks_in_the_end = True
        await leader.send(worker, decode_plan(2))
        await laid_out(leader, 2)
        leader.executor.released.set()
        assert (await leader.answer(worker, StepFailed)).step == 1
        await leader.worker(other_than=worker)
        assert (leader.executor.executed, leader.executor.forgotten) == (1, 1)


@pytest.mark.parametrize("is_ahead", [True, False])
async def test_a_batch_that_cannot_be_laid_out_is_a_failed_step_in_its_turn(*, is_ahead: bool) -> None:
    async with within_a_step() as (leader, worker):
        if not is_ahead:
            leader.executor.released.set()
            await leader.answer(worker, StepResult)
        leader.executor.refuses = True
        await leader.send(worker, decode_plan(2))
        await laid_out(leader, 2)
        if is_ahead:
            leader.executor.released.set()
            await leader.answer(worker, StepResult)
        failed = await leader.answer(worker, StepFailed)
        assert failed == StepFailed(1, 2, "RuntimeError: cannot be laid out")


async def test_a_worker_told_to_stop_answers_what_it_began_ahead_and_begins_nothing_more() -> None:
    async with within_a_step() as (leader, worker):
        await leader.bus.make_stream("results kept")
        await leader.send(worker, decode_plan(2), decode_plan(3))
        await laid_out(leader, 2)
        leader.stopping.set()
        answers = asyncio.ensure_future(two_results(leader, worker))
        await asyncio.sleep(0)
        leader.executor.released.set()
        assert await answers == [1, 2]
    assert leader.executor.executed == 2


async def two_results(leader: Leader, worker: WorkerId) -> list[int]:
    return [(await leader.answer(worker, StepResult)).step for _ in range(2)]


async def test_who_is_declared_dead_does_not_run_what_it_began_ahead() -> None:
    async with within_a_step() as (leader, worker):
        await leader.send(worker, decode_plan(2))
        await laid_out(leader, 2)
        with capture_logs() as logs:
            await leader.bus.declare_dead(worker)
            async with asyncio.timeout(WITHIN_S):
                while not any(log["event"] == "worker_life_ended" for log in logs):  # noqa: ASYNC110 - see above
                    await asyncio.sleep(0.001)
        leader.executor.released.set()
        await leader.worker(other_than=worker)
        assert leader.executor.executed == 1
