"""Words for plans made by hand, and for a worker's ledger of small blocks that takes them."""

from services.worker.executor import Outcome
from services.worker.plan_draft import Model
from services.worker.residents import Accepted, Ledger
from shared.ids import BlockId, EntryId, GatewayId, RequestId, WorkerId
from shared.protocol.messages import (
    NewRequest,
    ResultRow,
    Slice,
    StepPlan,
    SubmitRequest,
    TokenBatch,
    WorkerSize,
)

EOS = 99
WORKER = WorkerId("worker-x.1")
BLOCK = 4
KEY = b"a key of this worker alone"


def ledger(*, blocks: int = 8, max_model_len: int = 64) -> Ledger:
    return Ledger(WORKER, WorkerSize(blocks, BLOCK, max_model_len), Model(frozenset({EOS}), vocabulary=100), KEY)


def claimed(**size: int) -> Ledger:
    made = ledger(**size)
    made.claim("nonce")
    return made


def submit(name: str = "r", prompt: tuple[int, ...] = (1, 2, 3), **fields: object) -> SubmitRequest:
    given = {"attempt": 0, "gateway": GatewayId("g"), "max_tokens": 10, **fields}
    return SubmitRequest(RequestId(name), prompt_ids=prompt, **given)  # type: ignore[arg-type] # fields by name


def new(request: SubmitRequest, *blocks: int, start: int = 0) -> NewRequest:
    return NewRequest(request, EntryId("1-1"), start, tuple(BlockId(block) for block in blocks))


def piece(name: str, start: int, count: int, *blocks: int) -> Slice:
    return Slice(RequestId(name), start, count, tuple(BlockId(block) for block in blocks))


def run(on: Ledger, plan: StepPlan, *outcomes: Outcome) -> tuple[Accepted, tuple[ResultRow, ...], list[TokenBatch]]:
    accepted = on.accept(plan)
    assert isinstance(accepted, Accepted), accepted
    settled = on.settle(accepted, outcomes)
    return accepted, tuple(settled.rows), list(on.token_batches(settled).values())
