"""All linear layers of the default model, one after the other: how near they come to only reading their weights.

Run from the root of the project: ``python -m tests.benchmarks.linear``. Ends within a minute. Weights are random; each
layer has its own, so that they come from memory. On a shared machine only the ratios of one run say something.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from services.worker.program_weights import Packed
from tests.benchmarks.machine import Reading, describe
from tests.unit.linear_rig import ADD, GATED, NONE, SILU, VARIANTS, Call, Kind, LinearKernel, call_of

LAYERS, HIDDEN, INNER, QKV, VOCABULARY = 30, 576, 1536, 960, 49152
SHAPES = ((QKV, HIDDEN, NONE), (HIDDEN, HIDDEN, ADD), (2 * INNER, HIDDEN, GATED), (HIDDEN, INNER, ADD))
MOST_ROWS = 2048
AT_ONCE = 8
"""Layers that are timed together: a whole step seldom runs undisturbed on a shared machine."""

Pieces = list[Callable[[], object]]


class Model:
    """The layers packed, and what they work on."""

    def __init__(self, kernel: LinearKernel, kind: Kind) -> None:
        self._kernel = kernel
        self._layers = [
            (kernel.pack(torch.randn(out, width, dtype=torch.bfloat16), kind=kind), how)
            for _ in range(LAYERS)
            for out, width, how in SHAPES
        ]
        self._head = kernel.pack(torch.randn(VOCABULARY, HIDDEN, dtype=torch.bfloat16), kind=kind)
        self.bytes = sum(len(tensor) for packed, _ in [*self._layers, (self._head, NONE)] for tensor in packed.kept)
        self._hidden, self._wide = (torch.zeros(MOST_ROWS, width).bfloat16() for width in (HIDDEN, 2 * INNER))
        self._logits = torch.empty(64, VOCABULARY)

    def _call(self, packed: Packed, how: int, rows: int) -> Call:
        x = self._wide if packed.linear.inputs == INNER else self._hidden
        y = self._hidden if how == ADD else self._wide
        x = x[:, : packed.linear.inputs]
        width = packed.linear.outputs // (2 if how == GATED else 1)
        return call_of(packed, x, y[:rows, :width], (how, SILU), y if how == ADD else None)

    def step(self, rows: int, sampled: int) -> Pieces:
        """Return what runs all layers on so many rows, and the head on so many."""
        calls = [self._call(packed, how, rows) for packed, how in self._layers]
        if sampled:
            calls.append(call_of(self._head, self._hidden, self._logits[:sampled]))
        arrays = [(Call * len(few))(*few) for few in (calls[at : at + AT_ONCE] for at in range(0, len(calls), AT_ONCE))]
        return [partial(self._kernel.run, array) for array in arrays]

    def flop(self, rows: int, sampled: int) -> int:
        """Return the multiplications and additions of such a step."""
        sizes: int = sum(packed.linear.inputs * packed.linear.outputs for packed, _ in self._layers)
        return 2 * (sizes * rows + HIDDEN * VOCABULARY * sampled)


def least_s(cases: dict[str, Pieces], seconds: float) -> dict[str, float]:
    """Return the sum of the shortest times of each case's pieces, all taken in turn for so long."""
    least = {name: [float("inf")] * len(pieces) for name, pieces in cases.items()}
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for name, pieces in cases.items():
            for at, run in enumerate(pieces):
                before = time.perf_counter()
                run()
                least[name][at] = min(least[name][at], time.perf_counter() - before)
    return {name: sum(times) for name, times in least.items()}


class Square:
    """torch's own product of big matrices: what the machine can multiply."""

    def __init__(self, size: int = 2048) -> None:
        self._a, self._b = (torch.randn(size, size, dtype=torch.bfloat16) for _ in range(2))
        self.flop = 2 * size**3

    def __call__(self) -> None:
        """Multiply once."""
        with torch.inference_mode():
            torch.nn.functional.linear(self._a, self._b)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=list(VARIANTS), default="amx")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 32, 64, 128, 512])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--cache", type=Path, default=None, help="where the kernel is kept")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    kernel = LinearKernel(given.variant, given.cache)
    model, reading, square = Model(kernel, Kind.INT8 if given.int8 else Kind.BF16), Reading(), Square()
    sampled = {rows: rows if rows <= 64 else 0 for rows in given.rows}
    cases: dict[str, Pieces] = {str(rows): model.step(rows, sampled[rows]) for rows in given.rows}
    least = least_s({"read": [reading], "square": [square], **cases}, given.seconds)
    print(describe(), "kernel:", kernel.variant)
    print(f"memory {reading.bytes / least['read'] / 1e9:.1f} GB/s, weights {model.bytes / 1e6:.0f} MB")
    print(f"torch's own product of big matrices: {square.flop / least['square'] / 1e9:.0f} GFLOP/s")
    for rows in given.rows:
        taken = least[str(rows)]
        rates = f"{model.bytes / taken / 1e9:6.1f} GB/s" if sampled[rows] else "  without head"
        multiplied = model.flop(rows, sampled[rows]) / taken / 1e9
        print(f"{rows:5d} rows: {taken * 1e3:7.2f} ms  {rates}  {multiplied:6.0f} GFLOP/s")


if __name__ == "__main__":
    main()
