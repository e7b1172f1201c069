"""The worker's ledger: what it remembers of its requests, and which plans it may execute (DESIGN §2 and §4).

Pure: no clock, no I/O, no tensor. A plan is taken whole or not at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.blocks import Blocks, Contradiction
from services.worker.executor import Batch, DrawFailed, Drawn, Outcome, Scored
from services.worker.foresight import Drawing, Foresight
from services.worker.plan_draft import Draft, Fed, Held, Model
from shared.ids import GatewayId, RequestId, WorkerId
from shared.protocol.messages import (
    Finish,
    Logprobs,
    PlanRefused,
    Resident,
    ResultRow,
    StepPlan,
    TokenBatch,
    TokenRow,
    WorkerSize,
    WorkerState,
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The plan has been entered; ``batch`` is to be executed and its outcomes are to be settled next."""

    epoch: int
    step: int
    batch: Batch
    fed: tuple[Fed, ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    """The plan had been executed before, or belongs to an earlier leader: nothing was done."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The plan was not entered, and none will be until the worker is claimed again."""

    answer: PlanRefused
    why: str


@dataclass(frozen=True, slots=True)
class Settled:
    """What a step came to, for the leader and for each gateway concerned."""

    rows: list[ResultRow]
    """One for each slice of the plan, in its order."""
    tokens: dict[GatewayId, list[TokenRow]]
    failed: dict[RequestId, str]
    """Requests that ended with an error, and why."""


class Ledger:
    """Every request from the plan that brings it until a plan releases it, and the worker's own epoch.

    ``hash_key`` names the contents of blocks: another for each ledger, for a new one knows nothing of the pool.
    """

    def __init__(self, worker: WorkerId, size: WorkerSize, model: Model, hash_key: bytes) -> None:
        self._worker = worker
        self._size = size
        self._model = model
        self._blocks = Blocks(hash_key, size)
        self._held: dict[RequestId, Held] = {}
        self._epoch = 0
        self._step = 0
        self._refusing = True
        self._claimed_by = ""  # nobody yet

    def claim(self, nonce: str) -> WorkerState:
        """Take a leader's claim: raise the epoch, expect step 1, and tell everything that is remembered.

        A claim that comes twice is answered twice and changes nothing: the leader plans in the epoch it heard of first.
        """
        if nonce != self._claimed_by:
            self._claimed_by = nonce
            self._epoch += 1
            self._step = 0
            self._refusing = False
        residents = tuple(_resident(held) for held in self._held.values())
        told = self._blocks
        return WorkerState(self._worker, self._epoch, nonce, self._size, residents, told.hash_key, told.named())

    def accept(self, plan: StepPlan) -> Accepted | Repeated | Refused:
        """Enter a plan if it is the next one of the present epoch and agrees with what is remembered."""
        if self._is_past(plan):
            return Repeated(plan.epoch, plan.step)
        if self._refusing or plan.epoch != self._epoch or plan.step != self._step + 1:
            return self._refuse(plan, "not the next plan of a claimed epoch")
        draft = Draft(self._held, self._blocks, self._size, self._model)
        try:
            draft.apply(plan)
        except Contradiction as contradiction:
            return self._refuse(plan, str(contradiction))
        self._held = draft.enter()
        self._step = plan.step
        return Accepted(plan.epoch, plan.step, draft.batch(), draft.fed())

    def foresee(self, plan: StepPlan, drawing: Drawing) -> Batch | None:
        """Return the batch of the next plan while the step before it draws; None if it must wait for its turn.

        Nothing is entered: `accept` takes the plan, or not, when that step has been settled.
        """
        if self._refusing or plan.epoch != self._epoch or plan.step != self._step + 1:
            return None
        foresight = Foresight(self._held, self._blocks, self._size, self._model, drawing)
        try:
            foresight.apply(plan)
        except Contradiction:
            return None
        return foresight.batch()

    def settle(self, accepted: Accepted, outcomes: Sequence[Outcome]) -> Settled:
        """Enter what a step drew: an end-of-turn token or the length cap ends a request in that very step.

        The blocks that it filled up have a name from now on: before their request ends, for that drops its table.
        """
        drawn = iter(outcomes)
        settled = Settled([], {}, {})
        for fed in accepted.fed:
            held = self._held[fed.request]
            if fed.filled:
                self._name(held, fed)
            match fed.state:
                case "ended":
                    settled.rows.append(ResultRow(fed.request, held.submit.attempt, skipped=True))
                case "fed" if fed.scores_from is None:
                    settled.rows.append(ResultRow(fed.request, held.submit.attempt))
                case "fed" | "draws":
                    self._enter(held, next(drawn), settled, fed.scores_from)
                case "unusable":
                    self._enter(held, DrawFailed("token ids that the model does not have"), settled)
        return settled

    def token_batches(self, settled: Settled) -> dict[GatewayId, TokenBatch]:
        """Return what each gateway concerned is told of a step."""
        return {gateway: TokenBatch(self._worker, tuple(rows)) for gateway, rows in settled.tokens.items()}

    def _name(self, held: Held, fed: Fed) -> None:
        end = fed.first_filled + len(fed.filled)
        names = held.names(fed.first_filled, end, self._size.block_tokens)
        self._blocks.names.update(zip(fed.filled, names, strict=True))

    def _enter(self, held: Held, outcome: Outcome, settled: Settled, scores_from: int | None = None) -> None:
        """Enter one outcome: the token belongs to the request, its gateway and the leader hear of it."""
        request, attempt = held.submit.request, held.submit.attempt
        new: tuple[int, ...] = ()
        logprobs: tuple[Logprobs, ...] = ()
        finish: Finish | None = None
        of_prompt, drawn = (outcome.logprobs, outcome.drawn) if isinstance(outcome, Scored) else ((), outcome)
        match drawn:
            case DrawFailed():
                settled.failed[request], finish = drawn.why, "error"
            case Drawn():
                new, logprobs, finish = (drawn.token_id,), (drawn.logprobs,), self._finish(held, drawn.token_id)
            case int():
                new, finish = (drawn,), self._finish(held, drawn)
        told = (logprobs, scores_from or 1, of_prompt)
        row = TokenRow(request, attempt, len(held.output_ids), new, finish, held.cached_tokens, *told)
        held.output_ids.extend(new)
        if finish is not None:
            self._blocks.leave(held.end(finish))
        settled.rows.append(ResultRow(request, attempt, new, finish))
        settled.tokens.setdefault(held.submit.gateway, []).append(row)

    def _finish(self, held: Held, token_id: int) -> Finish | None:
        if token_id in self._model.eos_ids and not held.submit.ignore_eos:
            return "stop"
        if token_id in held.submit.sampling.stop_token_ids:
            return "stop"
        is_full = held.known + 1 >= self._size.max_model_len
        if is_full or len(held.output_ids) + 1 >= held.submit.max_tokens:
            return "length"
        return None

    def _is_past(self, plan: StepPlan) -> bool:
        return plan.epoch < self._epoch or (plan.epoch == self._epoch and plan.step <= self._step)

    def _refuse(self, plan: StepPlan, why: str) -> Refused:
        self._refusing = True
        return Refused(PlanRefused(self._epoch, expected=self._step + 1, got=plan.step), why)


def _resident(held: Held) -> Resident:
    return Resident(
        held.submit,
        held.arrival,
        tuple(held.output_ids),
        held.computed,
        tuple(held.table),
        held.finish,
        held.preemptions,
    )
