"""The memory of packed weights: side by side on huge pages, because a step reads all of it in the order it came in."""

import torch

from services.worker.attention_memory import empty_pool

_ALIGNED_BYTES = 64
_SLAB_BYTES = 64 * 1024 * 1024
"""Takes room only where it is written."""


class WeightMemory:
    """Aligned pieces of large slabs; a slab lives as long as one of its pieces."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> torch.Tensor:
        """Return so many bytes that begin a cache line."""
        if self._used + size > len(self._slab):
            self._slab = empty_pool((max(size, _SLAB_BYTES),), torch.uint8)
            self._used = 0
        taken = self._slab[self._used : self._used + size]
        self._used += -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return taken
