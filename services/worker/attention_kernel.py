"""Attention over block tables by our own kernel (`attention_kernel.c`): reads blocks where they lie.

The kernel runs on torch's own OpenMP threads: it is handed the functions of the very runtime that torch is linked
with, so there is one pool of threads, of the size that torch was given.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from services.worker.attention_path import Asked, New, Pool, StepView, Unsupported
from services.worker.kernel_build import NoKernel, built
from services.worker.progress import Progress

_HERE = Path(__file__).parent
_SOURCES = (_HERE / "program.c", _HERE / "attention_kernel.c", *sorted(_HERE.glob("*.h")))
"""One library: attention alone, and whole steps (`program.py`)."""
_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_WORD_BYTES = 4
"""Keys are read in words of this size."""


class _Step(ctypes.Structure):
    """``struct step`` of the kernel."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("block_tokens", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("firsts", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("table_firsts", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
    )


class Layer(ctypes.Structure):
    """``struct layer`` of the kernel."""

    _fields_ = (
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_head", ctypes.c_int64),
        ("q_token", ctypes.c_int64),
        ("k_head", ctypes.c_int64),
        ("k_token", ctypes.c_int64),
        ("v_head", ctypes.c_int64),
        ("v_token", ctypes.c_int64),
    )


class KernelPath:
    """The kernel, loaded."""

    def __init__(self, library: Path) -> None:
        """Load the library. Raises NoKernel if it cannot be loaded, or torch has no threads to lend."""
        try:
            self.library = kernel = ctypes.CDLL(str(library))
            threads = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
            team = threads.GOMP_parallel, threads.GOMP_barrier, threads.omp_get_num_threads
            self._call = kernel.attention_call
            kernel.attention_variant.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise NoKernel(f"the kernel cannot be loaded: {error}") from error
        kernel.attention_use(*team)
        self.variant: str = kernel.attention_variant().decode()
        self._call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)

    def begin(self, view: StepView) -> "KernelStep":
        """Return what all layers of a step share."""
        return KernelStep(self._call, view)


class KernelStep:
    """One step's arrays where the kernel finds them."""

    def __init__(self, call: "ctypes._NamedFuncPointer", view: StepView) -> None:
        self._call = call
        self._arrays = [
            np.ascontiguousarray(array)
            for array in (view.slots, view.firsts, view.starts, view.ends, view.table_firsts, view.tables)
        ]  # kept: the structure has their addresses
        self._step = _Step(len(view.firsts), len(view.slots), view.block_tokens, *map(_address, self._arrays))

    @property
    def address(self) -> int:
        """Where ``struct step`` lies, as long as this object lives."""
        return ctypes.addressof(self._step)

    def attend(self, pool: Pool, new: New, asked: Asked) -> torch.Tensor:
        """Attend in one layer."""
        kv_heads, _, dim = pool.keys.shape[1:]
        dtype = pool.keys.dtype
        if dtype not in _TYPES or dim * dtype.itemsize % _WORD_BYTES:
            raise Unsupported(f"keys of {dim} numbers of type {dtype}")
        q, k, v = (_dense(given, dtype) for given in (new.queries, new.keys, new.values))
        out = torch.empty((q.shape[1], q.shape[0], dim), dtype=dtype)
        strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
        addresses = (tensor.data_ptr() for tensor in (pool.keys, pool.values, q, k, v, out))
        shape = (q.shape[0], kv_heads, dim, _TYPES[dtype], asked.window or 0)
        layer = Layer(*shape, asked.scale, asked.softcap or 0.0, *addresses, *strides)
        if self._call(ctypes.addressof(self._step), ctypes.addressof(layer)):
            raise MemoryError("no memory for attention")
        return out.to(new.queries.dtype)


def _dense(given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    given = given.to(dtype)
    return given if given.stride(2) == 1 else given.contiguous()


def _address(array: npt.NDArray[np.generic]) -> int:
    return array.ctypes.data


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel ready for use, and how it was had."""

    path: KernelPath
    how: str


def load_kernel(progress: Progress, *, root: Path | None = None, flags: Sequence[str] = ()) -> Kernel:
    """Return the kernel, compiled if need be. Raises NoKernel."""
    with built(_SOURCES, progress, root=root, flags=flags) as kernel:
        return Kernel(KernelPath(kernel.library), kernel.how)
