"""Both ways to compute attention, for tests that must hold on either."""

import os
from functools import lru_cache

import pytest

from services.worker.attention_kernel import load_kernel
from services.worker.attention_path import AttentionPath
from services.worker.attention_torch import TorchPath
from services.worker.kernel_build import NoKernel
from services.worker.progress import Progress

PATHS = ("kernel", "torch")


def path_of(name: str) -> AttentionPath:
    """Return a path by its name. Skips the test where there is no kernel; where CI runs, that is a failure."""
    return _kernel() if name == "kernel" else TorchPath()


@lru_cache(maxsize=1)
def _kernel() -> AttentionPath:
    try:
        return load_kernel(Progress()).path
    except NoKernel as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no kernel: {error}")
