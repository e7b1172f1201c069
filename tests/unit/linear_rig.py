"""The linear kernel on its own: compiled in each variant, and run on torch's threads."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from services.worker import kernel_build
from services.worker.linear_packing import Packed, Packer
from services.worker.progress import Progress

_WORKER = Path(kernel_build.__file__).parent
SOURCES = (
    Path(__file__).with_name("linear_rig.c"),
    *sorted(_WORKER.glob("linear*.h")),
    _WORKER / "attention_vectors.h",
)
VARIANTS = {
    "amx": (),
    "avx512": ("-DLINEAR_NO_AMX",),
    "avx2": ("-DLINEAR_NO_AMX", "-mno-avx512f"),
    "portable": ("-DLINEAR_NO_AMX", "-mno-avx512f", "-mno-avx2"),
}
NONE, ADD, GATED, ACTIVATED = range(4)
SILU, GELU_TANH, GELU, RELU = range(4)


class Call(ctypes.Structure):
    """``struct linear_call`` of the kernel."""

    _fields_ = (
        ("w", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        ("y_is_float", ctypes.c_int64),
        ("add", ctypes.c_void_p),
        ("add_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("epilogue", ctypes.c_int64),
        ("activation", ctypes.c_int64),
    )


def call_of(
    packed: Packed,
    x: torch.Tensor,
    y: torch.Tensor,
    how: tuple[int, int] = (NONE, SILU),
    add: torch.Tensor | None = None,
) -> Call:
    """Return a call for all rows of ``y``. The tensors must outlive it."""
    call = Call(ctypes.addressof(packed.linear), x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0))
    call.y_is_float, call.rows = y.dtype == torch.float32, len(y)
    call.epilogue, call.activation = how
    if add is not None:
        call.add, call.add_stride = add.data_ptr(), add.stride(0)
    return call


class LinearKernel:
    """The kernel in one variant."""

    def __init__(self, variant: str, root: Path | None = None) -> None:
        with kernel_build.built(SOURCES, Progress(), root=root, flags=VARIANTS[variant]) as made:
            library = ctypes.CDLL(str(made.library))
        threads = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        library.linear_outside_variant.restype = ctypes.c_char_p
        library.rig_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        self.variant: str = library.linear_outside_variant().decode()
        self._threads = (
            ctypes.cast(threads.GOMP_parallel, ctypes.c_void_p),
            ctypes.cast(threads.GOMP_barrier, ctypes.c_void_p),
        )
        self._run = library.rig_run
        self.packer = Packer(library)

    def run(self, calls: "Sequence[Call] | ctypes.Array[Call]") -> None:
        """Run calls one after the other."""
        array = calls if isinstance(calls, ctypes.Array) else (Call * len(calls))(*calls)
        refused = self._run(*self._threads, ctypes.addressof(array), len(array))
        if refused:
            raise RuntimeError(f"the kernel cannot run here: {refused}")
