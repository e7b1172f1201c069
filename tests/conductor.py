"""A leader and a worker without a bus: the real planner with its pool, the real ledger, and any executor.

Plans, their execution and the reading of results are calls of their own, so that a test says how far each is ahead.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.scheduler.wire import outcomes_of, plan_of, request_of, request_of_resident
from services.worker.executor import Batch, Executor, Outcome
from services.worker.foresight import came_true, drawing_of, places_of
from services.worker.plan_draft import Model
from services.worker.residents import Accepted, Ledger
from shared.ids import EntryId, GatewayId, RequestId, WorkerId
from shared.paging.block_hash import TokenPrefix
from shared.paging.pool import BlockPool
from shared.paging.reservation import KV_MANAGERS
from shared.protocol.messages import (
    Logprobs,
    Sampling,
    StepPlan,
    StepResult,
    SubmitRequest,
    TokenBatch,
    WorkerSize,
    WorkerState,
)
from shared.scheduling.limits import Limits
from shared.scheduling.planner import Planner
from shared.scheduling.policies import POLICIES
from shared.scheduling.state import WorkerView

WORKER = WorkerId("worker")
GREEDY = Sampling(temperature=0.0)
Ids = tuple[int, ...]


@dataclass
class Answer:
    """What the gateway has of one request."""

    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    finish: str | None = None
    of_prompt: list[Logprobs] = field(default_factory=list)
    """What was told of the tokens of its prompt, from its second on: each once, however often it came."""
    told_again: int = 0


class Conductor:
    """One worker under one leader, which a new one may replace at any moment."""

    def __init__(
        self,
        executor: Executor,
        eos_ids: Iterable[int],
        limits: Limits,
        *,
        policy: str = "sarathi",
        depth: int = 1,
        blocks: int | None = None,
    ) -> None:
        self._executor = executor
        self._limits, self._policy, self._depth = limits, policy, depth
        model = Model(frozenset(eos_ids), executor.vocabulary)
        there_are = executor.size
        size = WorkerSize(blocks or there_are.blocks, there_are.block_tokens, there_are.max_model_len)
        self.ledger = Ledger(WORKER, size, model, b"key of the conductor's worker")
        self.answers: dict[str, Answer] = {}
        self.starts: list[tuple[str, int]] = []
        """Who was admitted, again or for the first time, and how many positions it found computed."""
        self.preempted: list[str] = []
        self._submissions: dict[RequestId, tuple[SubmitRequest, EntryId]] = {}
        self._prefixes: dict[RequestId, TokenPrefix] = {}
        self.foreseen = 0
        """Steps that were laid out while the one before them ran."""
        self._claims = 0
        self.claim()

    # -- the leader ---------------------------------------------------------------------------------------------

    def claim(self) -> WorkerState:
        """Let a new leader take over: it knows what the worker tells it, and who waited."""
        waited = [request for request in self._submissions if self._claims and self._still_waits(request)]
        self._claims += 1
        state = self.ledger.claim(f"nonce {self._claims}")
        self._epoch, self._published = state.epoch, 0
        self._plans: deque[StepPlan] = deque()
        self._results: deque[StepResult] = deque()
        self._foreseen: tuple[Batch, tuple[Outcome, ...]] | None = None
        pool = BlockPool(state.size.blocks, state.size.block_tokens, state.hash_key)
        for named in state.named:
            pool.name(named.block, pool.stamp(named.block), named.content)  # type: ignore[arg-type] # bytes on the wire
        self.view = WorkerView(WORKER, pool, state.size.max_model_len)
        self.planner = Planner(POLICIES[self._policy], self._limits, KV_MANAGERS["paged"])
        self.planner.add_worker(self.view)
        for resident in state.residents:
            if resident.finish is not None:
                self.view.to_release.append(resident.submit.request)
                continue
            ids = (*resident.submit.prompt_ids, *resident.output_ids)
            prefix = self._prefixes[resident.submit.request] = TokenPrefix(ids, resident.submit.cache_salt)
            self.planner.adopt(self.view, request_of_resident(resident, prefix))
        resident_ids = {resident.submit.request for resident in state.residents}
        for request in waited:
            if request not in resident_ids:
                self._submit(request)
        return state

    def _still_waits(self, request: RequestId) -> bool:
        known = self.planner.state.requests.get(request)
        return known is not None and self.answers[request].finish is None

    def submit(
        self, name: str, prompt: Ids, max_tokens: int = 16, *, sampling: Sampling = GREEDY, salt: str = ""
    ) -> None:
        """Let a request wait."""
        request = RequestId(name)
        submit = SubmitRequest(request, 0, GatewayId("g"), prompt, max_tokens, sampling, cache_salt=salt)
        self._submissions[request] = (submit, EntryId(f"{len(self._submissions) + 1}-0"))
        self.answers[name] = Answer()
        self._submit(request)

    def _submit(self, request: RequestId) -> None:
        submit, arrival = self._submissions[request]
        prefix = self._prefixes[request] = TokenPrefix(submit.prompt_ids, submit.cache_salt)
        self.planner.submit(request_of(submit, arrival, prefix))

    def cancel(self, name: str) -> None:
        """End a request wherever it is."""
        self.planner.end(RequestId(name))

    def publish(self) -> bool:
        """Make one plan more, unless as many are in flight as may be, or there is nothing to do."""
        if len(self.view.in_flight) >= self._depth:
            return False
        step = self.planner.next_step(WORKER)
        if step.is_empty:
            return False
        self._published += 1
        self.starts += [(admission.request, admission.start) for admission in step.admitted]
        self.preempted += step.preempted
        self._plans.append(plan_of(step, self._epoch, self._published, self._submissions))
        return True

    def hear(self) -> bool:
        """Read the oldest result."""
        if not self._results:
            return False
        result = self._results.popleft()
        for row in result.rows:
            if row.request in self.planner.state.requests:
                self._prefixes[row.request].append(row.token_ids)
        self.planner.settle(WORKER, outcomes_of(result))
        return True

    # -- the worker ---------------------------------------------------------------------------------------------

    def execute(self) -> bool:
        """Execute the oldest plan; the gateway hears of it at once."""
        if not self._plans:
            return False
        accepted = self.ledger.accept(self._plans.popleft())
        assert isinstance(accepted, Accepted), accepted
        settled = self.ledger.settle(accepted, self._drawn(accepted.batch))
        self._results.append(StepResult(accepted.epoch, accepted.step, 0.0, tuple(settled.rows)))
        for batch in self.ledger.token_batches(settled).values():
            self._tell(batch)
        return True

    def _drawn(self, accepted: Batch) -> tuple[Outcome, ...]:
        """Run what was foreseen while the step before ran, if that could be; then foresee the next plan likewise."""
        batch, before = self._foreseen or (accepted, ())
        assert came_true(batch, before, accepted)
        outcomes = self._executor.prepare(batch)(before) if batch else ()
        places = places_of(batch)
        foreseen = self.ledger.foresee(self._plans[0], drawing_of(batch)) if self._plans else None
        self._foreseen = (foreseen, outcomes) if foreseen else None
        self.foreseen += foreseen is not None
        return tuple(outcomes[places[row.request]] for row in accepted if row.has_outcome)

    def _tell(self, batch: TokenBatch) -> None:
        for row in batch.rows:
            answer = self.answers[row.request]
            assert row.first_index == len(answer.token_ids)
            have = len(answer.of_prompt)
            assert row.prompt_first <= have + 1, "what is told of a prompt has a gap"
            new = row.prompt_logprobs[have + 1 - row.prompt_first :]
            answer.of_prompt.extend(new)
            answer.told_again += len(row.prompt_logprobs) - len(new)
            if answer.cached_tokens is None:
                answer.cached_tokens = row.cached_tokens
            answer.token_ids.extend(row.token_ids)
            answer.finish = row.finish

    # -- both ---------------------------------------------------------------------------------------------------

    def iterate(self) -> bool:
        """Publish as far ahead as may be, execute one plan, read its result; False if there was nothing to do."""
        while self.publish():
            pass
        did = self.execute()
        return self.hear() or did

    def run_dry(self, at_most: int = 10_000) -> None:
        """Go on until nobody waits or runs."""
        for _ in range(at_most):
            if not self.iterate() and not self.planner.state.requests:
                return
        raise AssertionError("requests never end")

    def text(self, name: str) -> Ids:
        """Return the tokens of an answer."""
        return tuple(self.answers[name].token_ids)
