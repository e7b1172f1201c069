"""What the memory held by requests is used for (PagedAttention §3: reserved and internal waste)."""

from dataclasses import dataclass

from shared.scheduling.state import WorkerView


@dataclass(frozen=True, slots=True)
class KvUse:
    """Positions of one worker that requests hold: ``filled`` with a token, ``reserved`` for one that may still come.

    ``internal`` ones never hold a token: the rest of a last block behind prompt + ``max_tokens``.
    """

    filled: int
    reserved: int
    internal: int


def kv_use(worker: WorkerView) -> KvUse:
    """Return what the held positions are used for. A block that is shared, and therefore full, counts once."""
    pool = worker.pool
    filled = reserved = 0
    for request in worker.running:
        held = len(request.blocks) * pool.block_tokens
        filled += request.computed
        reserved += max(0, min(held, request.footprint.most_tokens) - request.computed)
    filled -= pool.extra_holders * pool.block_tokens
    return KvUse(filled, reserved, pool.used * pool.block_tokens - filled - reserved)
