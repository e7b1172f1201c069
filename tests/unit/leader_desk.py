"""A leader at a desk: what tests hand it, and what it says."""

from dataclasses import dataclass, field
from typing import TypeVar

from services.scheduler.leader import Leader
from services.scheduler.line import Line
from services.scheduler.outbox import Outbox
from shared.ids import EntryId, GatewayId, RequestId, WorkerId
from shared.paging.reservation import KV_MANAGERS
from shared.protocol import names
from shared.protocol.codec import decode
from shared.protocol.messages import (
    CancelRequest,
    ClaimWorker,
    Finish,
    Held,
    Message,
    NamedBlock,
    Resident,
    ResultRow,
    StepPlan,
    StepResult,
    SubmitRequest,
    WorkerSize,
    WorkerState,
)
from shared.scheduling.limits import Limits
from shared.scheduling.planner import Planner
from shared.scheduling.policies import POLICIES

M = TypeVar("M")
W, W2, G = WorkerId("w"), WorkerId("w2"), GatewayId("g")
KEY = b"the worker's own"
SIZE = WorkerSize(blocks=8, block_tokens=4, max_model_len=1000)


def submission(name: str = "r", *, attempt: int = 1, prompt: int = 3, max_tokens: int = 4) -> SubmitRequest:
    return SubmitRequest(RequestId(name), attempt, G, tuple(range(prompt)), max_tokens)


@dataclass
class Desk:
    """A leader, its clock, and what it has said since one last looked."""

    leader: Leader
    now_s: float = 100.0
    settled: list[str] = field(default_factory=list)
    entries: int = 0
    waited_s: float | None = None
    """What workers say of how long a plan lay there."""

    def said(self, stream: str, kind: type[M]) -> list[M]:
        write = self.leader.outbox.take()
        if write is None:
            return []
        self.settled += write.settled
        messages: list[Message] = [decode(one.data) for one in write.writes if one.stream == stream]
        return [message for message in messages if isinstance(message, kind)]

    def claim(
        self,
        worker: WorkerId = W,
        *,
        residents: tuple[Resident, ...] = (),
        named: tuple[NamedBlock, ...] = (),
        epoch: int = 1,
    ) -> None:
        self.leader.claim(worker, self.now_s)
        (claim,) = self.said(names.plans(worker), ClaimWorker)
        self.leader.hear(worker, WorkerState(worker, epoch, claim.nonce, SIZE, residents, KEY, named), self.now_s)

    def submit(self, message: SubmitRequest) -> EntryId:
        self.entries += 1
        entry = EntryId(f"{self.entries}-0")
        self.leader.read_submission(entry, message)
        return entry

    def cancel(self, name: str, attempt: int = 1) -> EntryId:
        self.entries += 1
        entry = EntryId(f"{self.entries}-0")
        self.leader.read_cancellation(entry, CancelRequest(RequestId(name), attempt))
        return entry

    def plan(self, worker: WorkerId = W) -> StepPlan | None:
        self.leader.make_plans(self.now_s)
        plans = self.said(names.plans(worker), StepPlan)
        assert len(plans) <= 1
        return plans[0] if plans else None

    def must_plan(self, worker: WorkerId = W) -> StepPlan:
        plan = self.plan(worker)
        assert plan is not None
        return plan

    def answer(self, plan: StepPlan, finish: Finish | None = None, worker: WorkerId = W, attempt: int = 1) -> None:
        rows = tuple(ResultRow(slice_.request, attempt, (7,), finish) for slice_ in plan.slices)
        self.leader.hear(worker, StepResult(plan.epoch, plan.step, 0.01, rows, self.waited_s), self.now_s)

    def held(self, read_to: str | None = "99-0") -> Held:
        self.leader.say_held({G}, EntryId(read_to) if read_to else None)
        (held,) = self.said(names.tokens(G), Held)
        return held


def make_desk(*, depth: int = 1, max_model_len: int | None = None, shares_prefixes: bool = True) -> Desk:
    """Return a leader with one policy, claimed nobody yet."""
    nonces = iter(f"n{number}" for number in range(1000))
    planner = Planner(POLICIES["sarathi"], Limits(64, 8), KV_MANAGERS["paged"])
    outbox = Outbox("requests")
    line = Line(planner, outbox, max_model_len, shares_prefixes)
    return Desk(Leader(planner, line, outbox, depth, lambda: next(nonces)))
