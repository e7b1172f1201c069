"""Attention alone, all layers of the default model: how fast the pool is read, beside the machine's own reading speed.

Run from the root of the project: ``python -m tests.benchmarks.attention``. Ends within two minutes. On a shared machine
only the ratios of one run say something.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import torch

from services.worker.attention_kernel import load_kernel
from services.worker.attention_memory import empty_pool
from services.worker.attention_path import Asked, AttentionPath, New, Pool, StepView
from services.worker.attention_torch import TorchPath
from services.worker.executor import Row
from services.worker.progress import Progress
from shared.ids import BlockId, RequestId
from tests.benchmarks.machine import Reading, describe, medians_s

LAYERS, HEADS, KV_HEADS, DIM, BLOCK_TOKENS = 30, 9, 3, 64, 16
DECODES = [(batch, context, 1) for batch in (1, 16, 64) for context in (200, 2000)]
PREFILLS = [(1, 512, 512), (1, 2048, 2048), (1, 2048, 128)]
SECONDS_EACH = 6.0
POOL_BLOCKS = 2048
"""At least so many: blocks lie as far apart as in a pool that serves."""


def view_of(batch: int, context: int, fed: int) -> StepView:
    """Return a step whose rows are fed the last tokens of their context; blocks lie in no order."""
    per_row = -(-context // BLOCK_TOKENS)
    blocks = [BlockId(block) for block in range(max(batch * per_row, POOL_BLOCKS))]
    random.Random(1).shuffle(blocks)
    return StepView.of(
        tuple(
            Row(RequestId(str(at)), context - fed, (0,) * fed, tuple(blocks[at * per_row : (at + 1) * per_row]), None)
            for at in range(batch)
        ),
        BLOCK_TOKENS,
    )


class Case:
    """All layers' attention of one step."""

    def __init__(self, batch: int, context: int, fed: int, dtype: torch.dtype) -> None:
        self.view = view_of(batch, context, fed)
        shape = (max(batch * -(-context // BLOCK_TOKENS), POOL_BLOCKS), KV_HEADS, BLOCK_TOKENS, DIM)
        filling = torch.randn(shape)
        self._pools = [Pool(*(empty_pool(shape, dtype).copy_(filling) for _ in range(2))) for _ in range(LAYERS)]
        new = torch.randn(HEADS, batch * fed, DIM, dtype=dtype)
        self._new = New(new, new[:KV_HEADS], new[:KV_HEADS])
        self.kv_bytes = LAYERS * batch * context * 2 * KV_HEADS * DIM * dtype.itemsize
        seen = fed * context - fed * (fed - 1) // 2
        self.flop = LAYERS * batch * HEADS * seen * DIM * 4

    def on(self, path: AttentionPath) -> Callable[[], None]:
        """Return what runs the step on a path."""

        def run() -> None:
            with torch.inference_mode():
                step = path.begin(self.view)
                for pool in self._pools:
                    step.attend(pool, self._new, Asked(DIM**-0.5))

        return run


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--flags", default="", help="compiler flags, e.g. -mno-avx512f")
    parser.add_argument("--cache", type=Path, default=None, help="where the kernel is kept")
    parser.add_argument("--kernel-only", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    kernel = load_kernel(Progress(), root=given.cache, flags=given.flags.split()).path
    print(f"{describe()}; kernel {kernel.variant}, {given.dtype}, {LAYERS} layers, {HEADS}/{KV_HEADS} heads of {DIM}")
    print(
        f"{'batch x context (fed)':>24} {'kernel':>10} {'torch':>10} {'kernel reads':>13} {'memory':>13} {'share':>6}"
    )
    reading = Reading()
    for batch, context, fed in DECODES + PREFILLS:
        case = Case(batch, context, fed, getattr(torch, given.dtype))
        cases: dict[str, Callable[[], object]] = {"kernel": case.on(kernel), "reading": reading}
        if not given.kernel_only:
            cases["torch"] = case.on(TorchPath())
        took = medians_s(cases, rounds=50, seconds=SECONDS_EACH)
        memory = reading.bytes / took["reading"] / 1e9
        reads = case.kv_bytes / took["kernel"] / 1e9
        name = f"{batch} x {context} ({fed})"
        other = f"{took['torch'] * 1e3:7.1f} ms" if "torch" in took else "-"
        what = f"{reads:8.1f} GB/s" if fed == 1 else f"{case.flop / took['kernel'] / 1e9:6.0f} GFLOP/s"
        share = f"{reads / memory:6.2f}" if fed == 1 else ""
        print(f"{name:>24} {took['kernel'] * 1e3:7.2f} ms {other:>10} {what:>13} {memory:8.1f} GB/s {share:>6}")


if __name__ == "__main__":
    main()
