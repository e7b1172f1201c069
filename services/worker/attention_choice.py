"""Which way attention is computed here: chosen once, said in one line."""

from pathlib import Path

import structlog

from services.worker.attention_kernel import load_kernel
from services.worker.attention_path import AttentionPath
from services.worker.attention_torch import TorchPath
from services.worker.kernel_build import NoKernel
from services.worker.progress import Progress
from shared.runtime.clock import Clock, monotonic

log = structlog.get_logger()


def chosen_path(progress: Progress, *, root: Path | None = None, clock: Clock = monotonic) -> AttentionPath:
    """Return the kernel where there is one, and torch's own attention where there is none."""
    begun_s = clock()
    try:
        kernel = load_kernel(progress, root=root)
    except NoKernel as error:
        log.warning("attention_path", path="torch", why=str(error))
        return TorchPath()
    took_s = round(clock() - begun_s, 2)
    log.info("attention_path", path="kernel", variant=kernel.path.variant, why=kernel.how, took_s=took_s)
    return kernel.path
