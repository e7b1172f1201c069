"""A worker on a bus in memory, with a leader made by hand and an executor that breaks, hangs or refuses when told."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from services.worker.executor import Batch, Loaded, Outcome, Step
from services.worker.fake_executor import FakeExecutor
from services.worker.fake_tokenizer import fake_tokenizer_files
from services.worker.hung_step import HungStep
from services.worker.life import FLUSH_S
from services.worker.progress import Progress
from services.worker.service import serve_on
from shared.bus.memory import MemoryBus, MemoryServer
from shared.bus.port import Entry, Write
from shared.errors import BusUnavailable
from shared.ids import START, BlockId, EntryId, GatewayId, RequestId, WorkerId
from shared.protocol import names
from shared.protocol.codec import decode_as, encode
from shared.protocol.messages import (
    ClaimWorker,
    Message,
    NewRequest,
    Slice,
    StepPlan,
    SubmitRequest,
    WorkerState,
)
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
