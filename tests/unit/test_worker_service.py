"""The worker on a bus: claims, plans, repeats, gaps, failing steps and deaths, with the fake executor."""

import asyncio

import pytest
from structlog.testing import capture_logs

from services.worker.executor import Loaded
from services.worker.fake_executor import fake_next_token
from services.worker.fake_tokenizer import fake_tokenizer_files
from services.worker.progress import Progress
from services.worker.service import content_hash_of, serve_on
from shared.bus.memory import MemoryBus, MemoryServer
from shared.bus.port import Write
from shared.errors import BusUnavailable, StartupError
from shared.ids import START, BlockId, EntryId, GatewayId, RequestId
from shared.paging.block_hash import HashChain
from shared.protocol import names
from shared.protocol.codec import decode, decode_as
from shared.protocol.messages import (
    CancelRequest,
    NamedBlock,
    NewRequest,
    PlanRefused,
    Registration,
    ResultRow,
    Slice,
    StepFailed,
    StepPlan,
    StepResult,
    TokenBatch,
    TokenizerFiles,
)
from shared.runtime.part import wait_for_bus
from shared.runtime.settings import WorkerSettings
from tests.unit.worker_stage import (
    MODEL,
    PROMPT,
    SETTINGS,
    WITHIN_S,
    Away,
    Breaking,
    Flaky,
    Leader,
    decode_plan,
    first_plan,
    serving,
    submit,
)


async def test_a_worker_registers_with_its_tokenizer_and_both_its_streams() -> None:
    async with serving() as leader:
        worker = await leader.worker()
        value = (await leader.bus.parts(names.members("worker", MODEL)))[worker]
        registration = decode_as(Registration, value)
        assert registration.tokenizer == content_hash_of(fake_tokenizer_files())
        async with asyncio.timeout(WITHIN_S):
            while (stored := await leader.bus.get(names.tokenizer(registration.tokenizer))) is None:  # noqa: ASYNC110 - the bus raises no event of ours
                await asyncio.sleep(0)
        assert decode_as(TokenizerFiles, stored).eos_ids == (256,)


async def test_a_claim_is_answered_with_what_the_worker_holds() -> None:
    async with serving() as leader:
        worker = await leader.worker()
        state = await leader.claim(worker)
        assert (state.worker, state.epoch, state.nonce, state.residents) == (worker, 1, "nonce 1", ())
        assert state.size == leader.executor.size


async def test_each_life_has_a_hash_key_of_its_own_and_knows_nothing_of_what_the_pool_held_before() -> None:
    async with serving() as leader:
        worker = await leader.worker()
        key = (await leader.claim(worker)).hash_key
        request = submit(prompt_ids=tuple(range(20)))
        new = NewRequest(request, EntryId("1-1"), 0, (BlockId(0), BlockId(1)))
        await leader.send(worker, StepPlan(1, 1, new=(new,), slices=(Slice(request.request, 0, 20),)))
        await leader.answer(worker, StepResult)
        again = await leader.claim(worker)
        assert again.hash_key == key
        chain = HashChain(key, 16)
        chain.extend(range(16))
        assert again.named == (NamedBlock(BlockId(0), chain.hashes[0]),)
        await leader.bus.declare_dead(worker)
        state = await leader.claim(await leader.worker(other_than=worker))
        assert len(state.hash_key) == len(key) == 32
        assert state.hash_key != key
        assert state.named == ()


async def test_tokens_go_to_the_gateway_and_the_result_to_the_leader() -> None:
    async with serving() as leader:
        worker = await leader.worker()
        await leader.bus.make_stream(names.tokens(GatewayId("g")))
        await leader.claim(worker)
        await leader.send(worker, first_plan())
        result = await leader.answer(worker, StepResult)
        first = fake_next_token(PROMPT)
        assert result.rows == (ResultRow(RequestId("r"), 0, (first,)),)
        batch = await leader.next(TokenBatch, names.tokens(GatewayId("g")))
        assert batch.worker == worker
        assert batch.rows[0].token_ids == (first,)


async def test_several_plans_at_once_are_executed_in_order_and_their_entries_go() -> None:
    async with serving() as leader:
        worker = await leader.worker()
        await leader.claim(worker)
        await leader.send(worker, first_plan(), decode_plan(2), decode_plan(3))
        context = list(PROMPT)
        for step in (1, 2, 3):
            result = await leader.answer(worker, StepResult)
            context.append(fake_next_token(context))
            assert (result.step, result.rows[0].token_ids) == (step, (context[-1],))
        assert await leader.bus.length(names.plans(worker)) == 0


async def test_a_plan_without_slices_is_answered_too() -> None:
    async with serving() as leader:
        worker = await leader.worker()
        await leader.claim(worker)
        await leader.send(worker, StepPlan(1, 1, released=(RequestId("gone"),)))
        assert (await leader.answer(worker, StepResult)).rows == ()


async def test_a_repeated_plan_is_executed_once() -> None:
    async with serving() as leader:
        worker = await leader.worker()
        await leader.claim(worker)
        await leader.send(worker, first_plan(), first_plan(), decode_plan(2))
        assert [(await leader.answer(worker, StepResult)).step for _ in range(2)] == [1, 2]


async def test_a_gap_is_refused_until_the_worker_is_claimed_again() -> None:
    async with serving() as leader:
        worker = await leader.worker()
        await leader.claim(worker)
        await leader.send(worker, first_plan(), decode_plan(3))
        await leader.answer(worker, StepResult)
        assert await leader.answer(worker, PlanRefused) == PlanRefused(1, expected=2, got=3)
        state = await leader.claim(worker)
        assert state.epoch == 2
        assert state.residents[0].output_ids == (fake_next_token(PROMPT),)
        await leader.send(worker, StepPlan(2, 1, slices=(Slice(RequestId("r"), 3, 1),)))
        assert (await leader.answer(worker, StepResult)).rows[0].token_ids


async def test_a_cancelled_request_is_released_and_forgotten() -> None:
    async with serving() as leader:
        worker = await leader.worker()
        await leader.claim(worker)
        await leader.send(worker, first_plan(), StepPlan(1, 2, released=(RequestId("r"),)))
        await leader.answer(worker, StepResult)
        await leader.answer(worker, StepResult)
        assert (await leader.claim(worker)).residents == ()


async def test_a_step_that_raises_is_told_and_the_worker_goes_on_under_a_new_id() -> None:
    async with serving() as leader:
        worker = await leader.worker()
        await leader.claim(worker)
        leader.executor.breaks = True
        await leader.send(worker, first_plan())
        second = await leader.worker(other_than=worker)
        failed = await leader.answer(worker, StepFailed)
        assert failed == StepFailed(1, 1, "RuntimeError: out of luck")
        state = await leader.claim(second)
        assert (state.epoch, state.residents) == (1, ())
        assert leader.executor.forgotten == 1
        await leader.send(second, first_plan())
        assert (await leader.answer(second, StepResult)).rows[0].token_ids == (fake_next_token(PROMPT),)


async def test_who_finds_itself_declared_dead_registers_under_a_new_id() -> None:
    async with serving() as leader:
        worker = await leader.worker()
        await leader.claim(worker)
        await leader.bus.declare_dead(worker)
        second = await leader.worker(other_than=worker)
        assert (await leader.claim(second)).epoch == 1


async def test_a_bus_that_is_waited_for_is_named_once() -> None:
    class Late(MemoryBus):
        refusals = 2

        async def check(self) -> None:
            if self.refusals:
                self.refusals -= 1
                raise BusUnavailable("nobody answers")
            await super().check()

    bus, stopping = Late(MemoryServer()), asyncio.Event()
    with capture_logs() as logs:
        await wait_for_bus(bus, stopping)
    assert bus.refusals == 0
    assert [(log["event"], log["log_level"], log["error"]) for log in logs] == [
        ("bus_awaited", "warning", "nobody answers")
    ]


async def test_a_message_that_cannot_be_read_goes_to_the_dead_letters_and_the_rest_goes_on() -> None:
    async with serving() as leader:
        worker = await leader.worker()
        await leader.bus.publish([Write(names.plans(worker), b"\x93what")])
        await leader.send(worker, CancelRequest(RequestId("r"), 0))
        assert (await leader.claim(worker)).epoch == 1
        letters = await leader.bus.read({names.DEAD_LETTER: START}, block_s=1.0)
        assert [letter.data[:5] for letter in letters] == [b"\x93what", letters[1].data[:5]]
        assert isinstance(decode(letters[1].data), CancelRequest)


async def test_a_publication_whose_answer_was_lost_is_repeated_with_the_same_position() -> None:
    async with serving() as leader:
        worker = await leader.worker()
        await leader.claim(worker)
        leader.worker_bus.lost_answers = 1
        await leader.send(worker, first_plan())
        first, again = [await leader.answer(worker, StepResult) for _ in range(2)]
        assert first == again


async def test_stopping_while_redis_is_away_gives_the_last_answer_up() -> None:
    async with serving(flush_s=0.05) as leader:
        worker = await leader.worker()
        await leader.claim(worker)
        leader.worker_bus.lost_answers = 1_000_000
        await leader.send(worker, first_plan())
        await leader.answer(worker, StepResult)
    # reaching this line is the test: the service has returned


async def test_stopping_takes_the_worker_off_the_list() -> None:
    async with serving() as leader:
        await leader.worker()
        members = names.members("worker", MODEL)
    assert await leader.bus.parts(members) == {}


async def test_stopping_while_it_loads_ends_without_registering() -> None:
    bus = MemoryBus(MemoryServer())
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def load(_settings: WorkerSettings, progress: Progress) -> Loaded:
        loop.call_soon_threadsafe(stopping.set)
        assert progress.stopping.wait(WITHIN_S)
        progress.check()
        raise AssertionError("went on loading")

    async with asyncio.timeout(WITHIN_S):
        await serve_on(bus, SETTINGS, stopping, load=load)
    assert await bus.parts(names.members("worker", MODEL)) == {}


@pytest.mark.parametrize("refuses", ["put", "make_stream"])
async def test_stopping_while_redis_is_away_before_it_registered_ends_at_once(refuses: str) -> None:
    bus = Away(MemoryServer(), refuses=refuses)
    stopping = asyncio.Event()
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_on(bus, SETTINGS, stopping))
        await bus.asked.wait()
        stopping.set()
    assert await bus.parts(names.members("worker", MODEL)) == {}


async def test_a_model_that_cannot_be_had_ends_the_start_with_its_sentence() -> None:
    def load(_settings: WorkerSettings, _progress: Progress) -> Loaded:
        raise StartupError("there is no such model")

    with pytest.raises(StartupError, match="no such model"):
        await serve_on(MemoryBus(MemoryServer()), SETTINGS, asyncio.Event(), load=load)


async def test_the_fake_executor_is_what_its_setting_names() -> None:
    server = MemoryServer()
    stopping = asyncio.Event()
    bus = MemoryBus(server)
    leader = Leader(bus, Flaky(server), Breaking(), stopping)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_on(MemoryBus(server), SETTINGS, stopping))
        state = await leader.claim(await leader.worker())
        assert (state.size.blocks, state.size.max_model_len) == (8192, 8192)
        stopping.set()
