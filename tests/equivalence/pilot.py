"""A leader made by hand: drives an executor through the worker's own ledger, plan by plan, without a bus."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.worker.executor import Executor
from services.worker.plan_draft import Model
from services.worker.residents import Accepted, Ledger
from shared.ids import BlockId, EntryId, GatewayId, RequestId, WorkerId
from shared.protocol.messages import NewRequest, Sampling, Slice, StepPlan, SubmitRequest

Ids = tuple[int, ...]


def random_ids(length: int, seed: int) -> Ids:
    """Return ids that the default model has, none of them special."""
    numbers = random.Random(length * 1000 + seed)
    return tuple(numbers.randrange(3, 49_152) for _ in range(length))


@dataclass
class Asked:
    """One request of a test."""

    prompt: Ids
    max_tokens: int = 16
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    joins_at: int = 0
    ignore_eos: bool = False


@dataclass
class _Course:
    known: int
    computed: int = 0
    ended: bool = False
    output: list[int] = field(default_factory=list)


class Pilot:
    """Plans decodes first, then prompts in chunks, and gives each request fresh blocks in an order of its own."""

    def __init__(self, executor: Executor, eos_ids: Sequence[int], *, chunk: int = 512) -> None:
        self._executor = executor
        self._ledger = Ledger(
            WorkerId("pilot"), executor.size, Model(frozenset(eos_ids), executor.vocabulary), b"pilot"
        )
        self._ledger.claim("pilot")
        self._chunk = chunk
        # last blocks first, every second one: tables are never contiguous
        blocks = range(executor.size.blocks - 1, -1, -1)
        self._free = [BlockId(block) for block in (*blocks[::2], *blocks[1::2])]
        self._step = 0

    def run(self, requests: Mapping[str, Asked]) -> dict[str, Ids]:
        """Return each request's tokens, all of them in one batch that requests join and leave."""
        courses = {name: _Course(known=len(asked.prompt)) for name, asked in requests.items()}
        for tick in range(10_000):
            if all(course.ended for course in courses.values()):
                break
            self._tick(tick, requests, courses)
        return {name: tuple(course.output) for name, course in courses.items()}

    def _tick(self, tick: int, requests: Mapping[str, Asked], courses: dict[str, _Course]) -> None:
        running = [name for name, course in courses.items() if not course.ended and requests[name].joins_at <= tick]
        running.sort(key=lambda name: courses[name].known - courses[name].computed > 1)
        self._step += 1
        new = tuple(self._new(name, requests[name]) for name in running if courses[name].computed == 0)
        slices = tuple(self._slice(name, courses[name]) for name in running)
        accepted = self._ledger.accept(StepPlan(1, self._step, new=new, slices=slices))
        assert isinstance(accepted, Accepted), accepted
        settled = self._ledger.settle(accepted, self._executor.prepare(accepted.batch)(()) if accepted.batch else ())
        for row in settled.rows:
            course = courses[row.request]
            course.output.extend(row.token_ids)
            course.known += len(row.token_ids)
            course.ended = row.finish is not None

    def _new(self, name: str, asked: Asked) -> NewRequest:
        submit = SubmitRequest(
            RequestId(name),
            0,
            GatewayId("g"),
            asked.prompt,
            asked.max_tokens,
            asked.sampling,
            ignore_eos=asked.ignore_eos,
        )
        return NewRequest(submit, EntryId("1-1"), 0, ())

    def _slice(self, name: str, course: _Course) -> Slice:
        size = self._executor.size.block_tokens
        count = min(course.known - course.computed, self._chunk)
        end = course.computed + count
        wanted = -(-end // size) - -(-course.computed // size)
        blocks = tuple(self._free.pop() for _ in range(wanted))
        slice_ = Slice(RequestId(name), course.computed, count, blocks)
        course.computed = end
        return slice_
