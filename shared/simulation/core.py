"""All that the simulator asks of the scheduling core, in one place."""

from collections.abc import Sequence

from shared.ids import RequestId, WorkerId
from shared.paging.block_hash import BlockHash
from shared.paging.pool import BlockPool
from shared.paging.reservation import KV_MANAGERS, Footprint, KvManager
from shared.scheduling.limits import Limits
from shared.scheduling.orders import ORDERS
from shared.scheduling.planner import Planner
from shared.scheduling.policies import POLICIES
from shared.scheduling.request import Request
from shared.scheduling.state import WorkerView
from shared.scheduling.timing import StepTimes, plan_at
from shared.simulation.records import Arrival, Setup

RESERVE_LONGEST = "reserve-longest"
"""Set aside ``max_model_len`` for everyone, as FasterTransformer does. In the simulator only: a yardstick."""
KV_NAMES = (*KV_MANAGERS, RESERVE_LONGEST)


class NamedBlocks:
    """A prompt of which it is known which blocks are whose: one name per full block, from the first on."""

    def __init__(self, names: Sequence[int], prompt_tokens: int, block_tokens: int) -> None:
        full = names[: prompt_tokens // block_tokens]
        self._hashes = [BlockHash(name.to_bytes(16, "big", signed=True)) for name in full]

    def hashes(self, _key: bytes, _block_tokens: int) -> Sequence[BlockHash]:
        """Return the names, which do not depend on the worker: all have the same blocks, and nobody forges a name."""
        return self._hashes


def planner_of(setup: Setup) -> Planner:
    """Return a planner without workers. Raises ValueError that names what is unknown."""
    if setup.policy not in POLICIES:
        raise ValueError(f"no policy {setup.policy!r}: one of {', '.join(POLICIES)}")
    if setup.queue not in ORDERS:
        raise ValueError(f"no queue order {setup.queue!r}: one of {', '.join(ORDERS)}")
    limits = Limits(
        setup.max_num_batched_tokens,
        setup.max_num_seqs,
        long_prefill_tokens=setup.long_prefill_tokens,
        tile_tokens=setup.tile_tokens,
        stages=setup.stages,
    )
    return Planner(POLICIES[setup.policy], limits, _kv_manager_of(setup), ORDERS[setup.queue]())


def _kv_manager_of(setup: Setup) -> KvManager:
    kv = setup.kv or ("reserve" if POLICIES[setup.policy].reserves else "paged")
    if kv == RESERVE_LONGEST:
        longest = setup.max_model_len

        def reserve_longest(_footprint: Footprint) -> int:
            return longest

        return KvManager(reserve_longest, is_on_demand=False)
    if kv not in KV_MANAGERS:
        raise ValueError(f"no KV manager {kv!r}: one of {', '.join(KV_NAMES)}")
    return KV_MANAGERS[kv]


def view_of(number: int, setup: Setup) -> WorkerView:
    """Return an empty worker."""
    pool = BlockPool(setup.kv_tokens // setup.block_tokens, setup.block_tokens)
    return WorkerView(WorkerId(f"w{number}"), pool, setup.max_model_len)


def request_id_of(index: int) -> RequestId:
    """Return the id of the request that arrives as this one, from 0."""
    return RequestId(f"r{index:07}")


def request_of(setup: Setup, index: int, arrival: Arrival, *, attempt: int, output_tokens: int) -> Request:
    """Return a request as it is submitted: attempt 1 without output, a later one with all that its client has."""
    return Request(
        request_id_of(index),
        attempt,
        (int(arrival.at_s * 1000), index),  # as an entry id of Redis: milliseconds, sequence
        arrival.prompt_tokens,
        arrival.max_tokens,
        output_tokens,
        priority=arrival.priority,
        tenant=arrival.tenant,
        prefix=NamedBlocks(arrival.prefix, arrival.prompt_tokens, setup.block_tokens) if arrival.prefix else None,
    )


def is_too_long(planner: Planner, arrival: Arrival) -> bool:
    """Return whether no worker could ever hold the request; False while there is none."""
    return 0 < planner.state.length_served < arrival.prompt_tokens + arrival.max_tokens


def waiting(planner: Planner) -> int:
    """Return how many requests wait."""
    return len(planner.state.line)


def due_at(view: WorkerView, setup: Setup, times: StepTimes, running_since_s: float) -> float | None:
    """Return when a worker's next plan should be made; None while as many are in flight as may be.

    A pipeline's stages stand idle unless a batch enters the first one as the last leaves it, so there is nothing to
    wait for: its plans are made at once, one per stage. One that only says who is released takes no stage.
    """
    if setup.stages > 1:
        batches = sum(bool(step.slices) for step in view.in_flight)
        return running_since_s if batches < setup.stages else None
    return plan_at(view, setup.plan_depth, times, running_since_s)
