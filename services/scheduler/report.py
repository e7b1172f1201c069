"""What the leader tells gateways of the pool and of requests that will not run."""

from shared.protocol.messages import PoolReport, RequestRefused, SubmitRequest
from shared.scheduling.request import Phase
from shared.scheduling.state import State
from shared.scheduling.waste import kv_use

NO_WORKER_S = 60.0
"""How long a request waits while there is no worker at all."""


def report_of(state: State, length_served: int) -> PoolReport:
    """Return the pool's figures. Who has run his last step and is not yet heard of counts as running."""
    pools = [worker.pool for worker in state.workers.values()]
    use = [kv_use(worker) for worker in state.workers.values()]
    return PoolReport(
        workers=len(pools),
        length_served=length_served,
        running=sum(request.phase is not Phase.WAITING for request in state.requests.values()),
        waiting=len(state.line),
        blocks_used=sum(pool.used for pool in pools),
        blocks_total=sum(pool.blocks for pool in pools),
        preemptions=state.preemptions,
        blocks_cached=sum(pool.cached for pool in pools),
        kv_tokens_filled=sum(of_worker.filled for of_worker in use),
        kv_tokens_reserved=sum(of_worker.reserved for of_worker in use),
        prefix_queries=state.prefix_queries,
        prefix_hits=state.prefix_hits,
        kv_tokens_internal=sum(of_worker.internal for of_worker in use),
    )


def too_long(submit: SubmitRequest, length_served: int) -> RequestRefused:
    """Return the refusal of a request that no living worker could hold."""
    needs = len(submit.prompt_ids) + submit.max_tokens
    text = f"prompt and answer need {needs} tokens, at most {length_served} are served"
    return RequestRefused(submit.request, submit.attempt, "too_long", text)


def no_worker(submit: SubmitRequest) -> RequestRefused:
    """Return the refusal of a request that has waited for any worker at all."""
    text = f"there has been no worker for {NO_WORKER_S:.0f} s"
    return RequestRefused(submit.request, submit.attempt, "no_worker", text)
