"""Scheduler and worker as services on the memory bus, a gateway made by hand before them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest

from services.scheduler.service import serve_on as schedule_on
from services.worker.executor import Batch, Executor, Loaded, Outcome, Step
from services.worker.fake_executor import fake_next_token, load_fake
from services.worker.progress import Progress
from services.worker.service import serve_on as work_on
from shared.bus.memory import MemoryBus, MemoryServer
from shared.bus.port import Bus
from shared.errors import BusUnavailable
from shared.ids import START, WorkerId
from shared.protocol import names
from shared.protocol.codec import decode
from shared.protocol.messages import Held
from shared.runtime.settings import SchedulerSettings, WorkerSettings
from tests.end_to_end.token_client import TokenClient, Wanted, registered

MODEL = "m"
WITHIN_S = 20.0


def expected(prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(fake_next_token(ids))
    return tuple(ids[len(prompt) :])


class Trips:
    """An executor whose step raises once, when told to."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.size, self.vocabulary, self.forget = executor.size, executor.vocabulary, executor.forget
        self.expect = executor.expect
        self.armed = False

    def prepare(self, batch: Batch) -> Step:
        return partial(self._trip_or_run, self._executor.prepare(batch))

    def _trip_or_run(self, step: Step, before: Sequence[Outcome]) -> tuple[Outcome, ...]:
        if self.armed:
            self.armed = False
            raise RuntimeError("tripped")
        return step(before)


class SilentBus(MemoryBus):
    """A bus that does not answer for a while."""

    silent = False

    async def _reach(self) -> MemoryServer:
        if self.silent:
            raise BusUnavailable("no answer")
        return await super()._reach()


class Pool:
    """The services of one test, and the parts of them that a test meddles with."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.stopping = asyncio.Event()
        self.scheduler_bus = SilentBus(self.server)
        self.trips: Trips | None = None

    def load(self, settings: WorkerSettings, progress: Progress) -> Loaded:
        loaded = load_fake(settings, progress)
        self.trips = Trips(loaded.executor)
        return Loaded(self.trips, loaded.tokenizer, loaded.dtype)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Ask until it holds: a bus has no event for what is gone. The pool's timeout bounds it."""
    while True:
        if await holds():
            return
        await asyncio.sleep(0.01)


async def is_empty(bus: Bus, stream: str) -> bool:
    return await bus.length(stream) == 0


async def is_free(bus: Bus) -> bool:
    return await bus.get(names.leader(MODEL)) is None


@asynccontextmanager
async def pool(**flags: object) -> AsyncIterator[tuple[Pool, TokenClient]]:
    made = Pool()
    worker = WorkerSettings(served_model_name=MODEL, executor="fake", fake_step_ms=2, kv_tokens=4096)
    scheduler = SchedulerSettings(served_model_name=MODEL, **flags)  # type: ignore[arg-type]  # checked by pydantic
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(schedule_on(made.scheduler_bus, scheduler, made.stopping))
        tasks.create_task(work_on(MemoryBus(made.server), worker, made.stopping, load=made.load))
        async with registered(MemoryBus(made.server), MODEL) as client:
            yield made, client
        made.stopping.set()


@pytest.mark.parametrize("policy", ["sarathi", "orca", "static", "prefill-first", "chunked-only", "hybrid-only"])
async def test_every_policy_gives_everybody_the_very_tokens_of_a_run_alone(policy: str) -> None:
    wanted = [Wanted(tuple(range(65, 65 + length)), 10 + length % 7) for length in (1, 3, 17, 40, 2, 64, 5, 33)]
    async with pool(policy=policy, max_num_batched_tokens=48, max_num_seqs=4) as (_, client):
        submitted = await client.submit(*wanted)
        got = [await client.answer(name) for name in submitted]
    assert got == [expected(one.prompt, one.max_tokens) for one in wanted]


async def test_all_entries_of_the_waiting_line_and_all_results_are_settled_in_the_end() -> None:
    async with pool() as (made, client):
        submitted = await client.submit(*(Wanted((65, number), 5) for number in range(65, 75)))
        await client.first_token(submitted[0])
        await client.cancel(submitted[0])
        for name in submitted[1:]:
            await client.answer(name)
        bus = MemoryBus(made.server)
        (worker,) = map(WorkerId, await bus.parts(names.members("worker", MODEL)))
        for stream in (names.requests(MODEL), names.results(worker), names.plans(worker)):
            await until(partial(is_empty, bus, stream))


async def test_after_a_step_that_raises_the_loss_is_told_at_once_and_the_next_life_serves() -> None:
    async with pool() as (made, client):
        (lost,) = await client.submit(Wanted((65, 66), 400))
        await client.first_token(lost)
        assert made.trips is not None
        made.trips.armed = True
        held = await held_without(made, client, lost)
        assert held.read_to is not None, "who was given up is not waited for"
        (again,) = await client.submit(Wanted((67, 68), 6))
        assert await client.answer(again) == expected((67, 68), 6)


async def held_without(made: Pool, client: TokenClient, name: str) -> Held:
    """Return the first list that says that a request is held no more."""
    stream, cursor, was_held = names.tokens(client.id), START, False
    bus = MemoryBus(made.server)
    while True:
        for entry in await bus.read({stream: cursor}, block_s=1.0):
            cursor, message = entry.id, decode(entry.data)
            if isinstance(message, Held):
                holds = name in {one.request for one in message.held}
                if was_held and not holds:
                    return message
                was_held = was_held or holds


async def test_a_scheduler_that_was_cut_off_leads_again_and_goes_on_with_what_runs() -> None:
    async with pool() as (made, client):
        wanted = Wanted((65, 66), 900)
        (name,) = await client.submit(wanted)
        await client.first_token(name)
        made.scheduler_bus.silent = True
        await until(lambda: is_free(MemoryBus(made.server)))
        made.scheduler_bus.silent = False
        assert await client.answer(name) == expected(wanted.prompt, wanted.max_tokens)
