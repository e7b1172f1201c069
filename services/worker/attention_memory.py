"""The memory of a KV pool: on huge pages, because blocks lie scattered and each would need a walk of its own."""

import contextlib
import math
import mmap

import torch


def empty_pool(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory that takes room only where it is written."""
    size = math.prod(shape) * dtype.itemsize
    if not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages: the same memory on small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
