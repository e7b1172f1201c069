"""Between the core's words and the messages."""

from shared.ids import EntryId, RequestId, entry_key
from shared.paging.block_hash import Prefix
from shared.protocol.messages import NewRequest, Resident, Slice, StepPlan, StepResult, SubmitRequest
from shared.scheduling.planner import Outcome
from shared.scheduling.request import Request
from shared.scheduling.step import Step


def request_of(submit: SubmitRequest, arrival: EntryId, prefix: Prefix | None = None) -> Request:
    """Return a submission as the planner sees it; without ``prefix`` nothing of it is ever shared."""
    return Request(
        submit.request,
        submit.attempt,
        entry_key(arrival),
        prompt_tokens=len(submit.prompt_ids),
        max_tokens=submit.max_tokens,
        output_tokens=len(submit.output_ids),
        priority=submit.priority,
        tenant=submit.tenant,
        prefix=prefix,
        shares_with=submit.shares_with or None,
        scores_prompt=submit.sampling.prompt_logprobs is not None,
    )


def request_of_resident(resident: Resident, prefix: Prefix | None = None) -> Request:
    """Return a request that a worker remembers, with its table, as the planner sees it."""
    request = request_of(resident.submit, resident.arrival, prefix)
    request.output_tokens = len(resident.output_ids)
    request.computed = resident.computed
    request.preemptions = resident.preemptions
    request.blocks = list(resident.table)
    request.has_drawn = resident.computed >= request.prompt_tokens
    return request


def plan_of(
    step: Step, epoch: int, number: int, submissions: dict[RequestId, tuple[SubmitRequest, EntryId]]
) -> StepPlan:
    """Return a step as the worker reads it; ``submissions`` has message and arrival of everyone who is new in it."""
    new = []
    for admission in step.admitted:
        if admission.is_new:
            submit, arrival = submissions[admission.request]
            new.append(NewRequest(submit, arrival, admission.start, admission.blocks))
    slices = tuple(Slice(s.request, s.start, s.count, s.new_blocks) for s in step.slices)
    return StepPlan(epoch, number, tuple(new), slices, step.preempted, step.released)


def outcomes_of(result: StepResult) -> list[Outcome]:
    """Return what the slices of a step came to, for the planner."""
    return [
        Outcome(
            row.request,
            row.attempt,
            ended=row.finish is not None,
            computed=not row.skipped and row.finish != "error",
            drew=bool(row.token_ids),
        )
        for row in result.rows
    ]
