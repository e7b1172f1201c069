"""The worker on a bus: claims, plans, repeats, gaps, failing steps and deaths, with the fake executor."""

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, TypeVar

import pytest
from structlog.testing import capture_logs

from services.worker.executor import Batch, Loaded, Outcome, Step
from services.worker.fake_executor import FakeExecutor, fake_next_token
from services.worker.fake_tokenizer import fake_tokenizer_files
from services.worker.hung_step import EXIT_HUNG, HungStep
from services.worker.life import FLUSH_S
from services.worker.progress import Progress
from services.worker.service import content_hash_of, serve_on
from shared.bus.memory import MemoryBus, MemoryServer
from shared.bus.port import Entry, Write
from shared.errors import BusUnavailable, StartupError
from shared.ids import START, BlockId, EntryId, GatewayId, RequestId, WorkerId
from shared.paging.block_hash import HashChain
from shared.protocol import names
from shared.protocol.codec import decode, decode_as, encode
from shared.protocol.messages import (
    CancelRequest,
    ClaimWorker,
    Message,
    NamedBlock,
    NewRequest,
    PlanRefused,
    Registration,
    ResultRow,
    Slice,
    StepFailed,
    StepPlan,
    StepResult,
    SubmitRequest,
    TokenBatch,
    TokenizerFiles,
    WorkerState,
)
from shared.runtime.clock import monotonic
from shared.runtime.part import wait_for_bus
from shared.runtime.settings import WorkerSettings

MODEL = "fake-model"
SETTINGS = WorkerSettings(model="./fake", served_model_name=MODEL, executor="fake")
PROMPT = (10, 11, 12)
WITHIN_S = 5.0
HUNG_STEP = HungStep()
_T = TypeVar("_T")


class Breaking:
    """A fake executor whose next step can be made to raise, or to hang until it is released."""

    def __init__(self) -> None:
        self._inner = FakeExecutor(64)
        self.size = self._inner.size
        self.vocabulary = self._inner.vocabulary
        self.breaks = False
        self.hangs = False
        self.breaks_in_the_end = False
        self.refuses = False
        self.prepared: list[Batch] = []
        self.executed = 0
        self.begun = threading.Event()
        self.released = threading.Event()
        self.forgotten = 0

    def expect(self, grammar: str) -> None:
        self._inner.expect(grammar)

    def forget(self) -> None:
        self.forgotten += 1
        self._inner.forget()

    def prepare(self, batch: Batch) -> Step:
        self.prepared.append(batch)
        if self.refuses:
            raise RuntimeError("cannot be laid out")
        return partial(self._run, self._inner.prepare(batch))

    def _run(self, step: Step, before: Sequence[Outcome]) -> tuple[Outcome, ...]:
        self.executed += 1
        if self.breaks:
            self.breaks = False
            raise RuntimeError("out of luck")
        if self.hangs:
            self.begun.set()
            assert self.released.wait(WITHIN_S)
            if self.breaks_in_the_end:
                raise RuntimeError("out of luck in the end")
        return step(before)


class Away(MemoryBus):
    """A bus that answers the check and then nothing that would register a worker."""

    def __init__(self, server: MemoryServer, *, refuses: str) -> None:
        super().__init__(server)
        self._refuses = refuses
        self.asked = asyncio.Event()

    async def put(self, key: str, data: bytes) -> None:
        await self._refuse("put")
        await super().put(key, data)

    async def make_stream(self, stream: str) -> None:
        await self._refuse("make_stream")
        await super().make_stream(stream)

    async def _refuse(self, what: str) -> None:
        if what == self._refuses:
            self.asked.set()
            raise BusUnavailable("nobody answers")


class Flaky(MemoryBus):
    """A bus that does not answer some of its next publications, though they had their effect."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.lost_answers = 0

    async def publish(self, writes: Sequence[Write], *, trim: tuple[str, EntryId] | None = None) -> None:
        await super().publish(writes, trim=trim)
        if self.lost_answers:
            self.lost_answers -= 1
            raise BusUnavailable("the answer was lost")


@dataclass
class Leader:
    """What a leading scheduler and a gateway do on the bus, by hand."""

    bus: MemoryBus
    worker_bus: Flaky
    executor: Breaking
    stopping: asyncio.Event
    cursors: dict[str, EntryId] = field(default_factory=dict)
    claims: int = 0

    async def worker(self, *, other_than: str = "") -> WorkerId:
        async with asyncio.timeout(WITHIN_S):
            while True:
                parts = await self.bus.parts(names.members("worker", MODEL))
                found = sorted(set(parts) - {other_than})
                if found:
                    return WorkerId(found[0])
                await asyncio.sleep(0)

    async def send(self, worker: WorkerId, *messages: Message) -> None:
        await self.bus.publish([Write(names.plans(worker), encode(message)) for message in messages])

    async def next(self, kind: type[_T], stream: str) -> _T:
        entries: list[Entry] = []
        async with asyncio.timeout(WITHIN_S):
            while not entries:
                cursor = self.cursors.get(stream, START)
                entries = await self.bus.read({stream: cursor}, block_s=1.0, count=1)
        self.cursors[stream] = entries[0].id
        return decode_as(kind, entries[0].data)

    async def answer(self, worker: WorkerId, kind: type[_T]) -> _T:
        return await self.next(kind, names.results(worker))

    async def claim(self, worker: WorkerId) -> WorkerState:
        self.claims += 1
        await self.send(worker, ClaimWorker(f"nonce {self.claims}"))
        return await self.answer(worker, WorkerState)


@asynccontextmanager
async def serving(*, flush_s: float = FLUSH_S, hung_step: HungStep = HUNG_STEP) -> AsyncIterator[Leader]:
    server = MemoryServer()
    bus = Flaky(server)
    executor = Breaking()
    stopping = asyncio.Event()
    leader = Leader(MemoryBus(server), bus, executor, stopping)

    def load(_settings: WorkerSettings, _progress: Progress) -> Loaded:
        return Loaded(executor, fake_tokenizer_files(), "none")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_on(bus, SETTINGS, stopping, load=load, flush_s=flush_s, hung_step=hung_step))
        yield leader
        stopping.set()


def submit(name: str = "r", **fields: object) -> SubmitRequest:
    given = {"attempt": 0, "gateway": GatewayId("g"), "prompt_ids": PROMPT, "max_tokens": 50, **fields}
    return SubmitRequest(RequestId(name), **given)  # type: ignore[arg-type] # fields by name


def first_plan(epoch: int = 1, request: SubmitRequest | None = None) -> StepPlan:
    request = request or submit(ignore_eos=True)
    new = NewRequest(request, EntryId("1-1"), 0, (BlockId(0),))
    return StepPlan(epoch, 1, new=(new,), slices=(Slice(request.request, 0, len(PROMPT)),))


def decode_plan(step: int, epoch: int = 1) -> StepPlan:
    return StepPlan(epoch, step, slices=(Slice(RequestId("r"), len(PROMPT) + step - 2, 1),))


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


@asynccontextmanager
async def within_a_step(
    request: SubmitRequest | None = None, *, flush_s: float = FLUSH_S
) -> AsyncIterator[tuple[Leader, WorkerId]]:
    """A worker in the middle of its first step; it ends when the executor is released, at the latest at the end."""
    async with serving(flush_s=flush_s) as leader:
        executor = leader.executor
        executor.hangs = True
        worker = await leader.worker()
        await leader.claim(worker)
        await leader.send(worker, first_plan(request=request))
        try:
            assert await asyncio.to_thread(executor.begun.wait, WITHIN_S)
            yield leader, worker
        finally:
            executor.released.set()


async def laid_out(leader: Leader, batches: int) -> None:
    async with asyncio.timeout(WITHIN_S):
        while len(leader.executor.prepared) < batches:  # noqa: ASYNC110 - an executor raises no event of ours
            await asyncio.sleep(0.001)


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


class Left(Exception):
    """The process would have ended here."""


def leave(status: int) -> NoReturn:
    raise Left(status)


@asynccontextmanager
async def hanging(hung_step: HungStep) -> AsyncIterator[Leader]:
    """A worker that was declared dead in a step that hangs; it is released once the process would have ended."""
    executor = None
    try:
        async with serving(hung_step=hung_step) as leader:
            executor = leader.executor
            executor.hangs = True
            worker = await leader.worker()
            await leader.claim(worker)
            await leader.send(worker, first_plan())
            assert await asyncio.to_thread(executor.begun.wait, WITHIN_S)
            await leader.bus.declare_dead(worker)
            yield leader
            await asyncio.sleep(WITHIN_S)
    finally:
        if executor is not None:
            executor.released.set()


async def test_a_step_that_hangs_beyond_its_life_ends_the_process() -> None:
    with (
        capture_logs() as logs,
        pytest.RaisesGroup(pytest.RaisesExc(Left, match=f"^{EXIT_HUNG}$"), flatten_subgroups=True),
    ):
        async with hanging(HungStep(wait_s=0.05, leave=leave)):
            pass
    assert "step_hangs" in [log["event"] for log in logs]


async def test_a_worker_told_to_stop_waits_no_longer_for_a_step_that_hangs() -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(Left, match=f"^{EXIT_HUNG}$"), flatten_subgroups=True):
        async with hanging(HungStep(wait_s=600.0, leave=leave)) as leader:
            leader.stopping.set()


def test_a_process_whose_step_hangs_really_ends() -> None:
    script = textwrap.dedent("""
        import asyncio, threading
        from services.worker.hung_step import HungStep
        from services.worker.step_thread import StepThread

        async def main():
            with StepThread() as thread:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(thread.call(threading.Event().wait))
                    await asyncio.sleep(0)
                    await HungStep(wait_s=0.05).or_idle(thread, print, asyncio.Event())

        asyncio.run(main())
    """)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=20.0)
    assert ended.returncode == EXIT_HUNG, ended.stderr


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
