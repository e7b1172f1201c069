"""The worker alone: whole steps of the default model, beside what reading its weights and keys would take at least.

Run from the root of the project: ``python -m tests.benchmarks.worker_step``. Ends within three minutes. On a shared
machine only the ratios of one run say something.
"""

import argparse
import random
from collections.abc import Callable

import torch

from services.worker.attention_choice import chosen_path
from services.worker.attention_torch import TorchPath
from services.worker.executor import Batch, Draw, Row
from services.worker.loading import load_folder
from services.worker.model_store import model_folder
from services.worker.progress import Progress
from services.worker.torch_executor import TorchExecutor
from shared.ids import BlockId, RequestId
from shared.protocol.messages import Sampling
from shared.runtime.settings import DEFAULT_MODEL, WorkerSettings
from tests.benchmarks.machine import Reading, describe, medians_s

BATCHES = (1, 16, 32, 64)
CONTEXTS = (200, 2000)
CHUNKS = (16, 64, 128, 256, 512, 1024, 2048)
INT8_SHARE = (1 + 4 / 32) / 2
"""Of bfloat16: a byte for each weight, and a float for each 32 of them."""
GREEDY = Sampling(temperature=0.0)


def batch_of(rows: int, start: int, fed: int, block_tokens: int) -> Batch:
    """Return rows that are fed so many tokens from a position on and draw one; blocks lie in no order."""
    per_row = -(-(start + fed) // block_tokens)
    blocks = [BlockId(block) for block in range(rows * per_row)]
    random.Random(1).shuffle(blocks)
    return tuple(
        Row(
            RequestId(str(at)),
            start,
            tuple((at + 7 * token) % 40_000 for token in range(fed)),
            tuple(blocks[at * per_row : (at + 1) * per_row]),
            Draw(GREEDY, start + fed),
        )
        for at in range(rows)
    )


class Worker:
    """A loaded model whose pool is filled: memory that was never written is not read from memory."""

    def __init__(self, path: str, settings: WorkerSettings) -> None:
        chosen = chosen_path(Progress()) if path == "kernel" else TorchPath()
        folder = model_folder(DEFAULT_MODEL, Progress())
        executor = load_folder(folder, settings, Progress(), path=chosen).executor
        assert isinstance(executor, TorchExecutor)
        self.executor = executor
        self.block_tokens = executor.size.block_tokens
        executor.execute(batch_of(1, 0, 1, self.block_tokens))
        with torch.inference_mode():
            for pool in executor._attention._pools.values():
                pool.keys.fill_(0.1)
                pool.values.fill_(0.1)
        stored_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))  # in bfloat16
        wide = 2 if settings.dtype == "float32" else 1
        self.weight_bytes = stored_bytes * (INT8_SHARE if settings.weights == "int8" else wide)
        self.bytes_per_position = executor._attention.bytes_per_position()

    def step(self, batch: Batch) -> Callable[[], object]:
        """Return what runs a batch."""
        return lambda: self.executor.execute(batch)


def decodes(worker: Worker, reading: Reading, batches: list[int], seconds: float) -> None:
    """Print how long decode steps take against the limit."""
    print(f"{'batch x context':>16} {'step':>10} {'limit':>9} {'step/limit':>11} {'tok/s':>8} {'memory':>10}")
    for context in CONTEXTS:
        for rows in batches:
            step = worker.step(batch_of(rows, context - 1, 1, worker.block_tokens))
            took = medians_s({"step": step, "reading": reading}, rounds=30, seconds=seconds)
            bytes_per_s = reading.bytes / took["reading"]
            limit_s = (worker.weight_bytes + rows * context * worker.bytes_per_position) / bytes_per_s
            print(
                f"{f'{rows} x {context}':>16} {took['step'] * 1e3:7.1f} ms {limit_s * 1e3:6.1f} ms"
                f" {took['step'] / limit_s:11.2f} {rows / took['step']:8.0f} {bytes_per_s / 1e9:5.1f} GB/s"
            )


def prefills(worker: Worker, seconds: float) -> None:
    """Print how fast prompts are taken in, by size of the chunk."""
    print(f"{'first chunk of':>16} {'step':>10} {'tok/s':>8}")
    for fed in CHUNKS:
        took = medians_s({"step": worker.step(batch_of(1, 0, fed, worker.block_tokens))}, rounds=20, seconds=seconds)
        print(f"{fed:>16} {took['step'] * 1e3:7.1f} ms {fed / took['step']:8.0f}")


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", choices=("kernel", "torch"), default="kernel")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--compile", choices=("now", "off"), default="now")
    parser.add_argument("--weights", choices=("model", "int8"), default="model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--seconds", type=float, default=6.0, help="for each line, beside its last round")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    kv_tokens = max(max(given.batches) * (max(CONTEXTS) + 16), 4096)
    asked = {"compile": given.compile, "weights": given.weights, "threads": given.threads}
    settings = WorkerSettings(dtype=given.dtype, kv_tokens=kv_tokens, **asked)
    worker = Worker(given.path, settings)
    weights, position = worker.weight_bytes / 1e6, worker.bytes_per_position / 1e3
    print(f"{describe()}; {DEFAULT_MODEL}, {given.dtype}, attention by {given.path}, {asked}")
    print(f"{weights:.0f} MB of weights, {position:.1f} KB for each position")
    decodes(worker, Reading(), given.batches, given.seconds)
    prefills(worker, given.seconds)


if __name__ == "__main__":
    main()
