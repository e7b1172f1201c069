"""The linear kernel on its own: compiled in each variant, and run on torch's threads."""

import ctypes
import enum
from collections.abc import Sequence
from pathlib import Path

import torch

from services.worker import kernel_build
from services.worker.linear_memory import WeightMemory
from services.worker.program_weights import Linear, Packed
from services.worker.progress import Progress

_WORKER = Path(kernel_build.__file__).parent
SOURCES = (
    Path(__file__).with_name("linear_rig.c"),
    *sorted(_WORKER.glob("linear*.h")),
    *(_WORKER / name for name in ("attention_vectors.h", "dots.h", "tiles.h")),
)
EMULATED_AMX = ("-include", str(Path(__file__).with_name("amx_emulated.h")))
VARIANTS = {
    "amx": (),
    "amx_emulated": EMULATED_AMX,
    "avx512_bf16": ("-DNO_AMX", "-DANYONES_DOTS"),
    "avx512_slow_dots": ("-DNO_AMX", "-DNO_DOTS"),
    "avx512_vnni": ("-DNO_AMX", "-mno-avx512bf16"),
    "avx512": ("-DNO_AMX", "-mno-avx512bf16", "-mno-avx512vnni"),
    "avx2": ("-DNO_AMX", "-mno-avx512f"),
    "portable": ("-DNO_AMX", "-mno-avx512f", "-mno-avx2"),
}
NONE, ADD, GATED, ACTIVATED = range(4)
SILU, GELU_TANH, GELU, RELU = range(4)


class Kind(enum.IntEnum):
    """What packed weights are made of."""

    BF16 = 0
    INT8 = 1


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
        ("bytes", ctypes.c_void_p),
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
        library.rig_variant.restype = ctypes.c_char_p
        library.rig_bytes.argtypes, library.rig_bytes.restype = (ctypes.c_int64,) * 3, ctypes.c_int64
        library.rig_pack.argtypes = (ctypes.c_void_p, *(ctypes.c_int64,) * 3, ctypes.c_void_p)
        library.rig_run.argtypes = (*(ctypes.c_void_p,) * 4, ctypes.c_int64)
        self.variant: str = library.rig_variant().decode()
        self.multiplies_bytes = bool(library.rig_multiplies_bytes())
        self._threads = (
            ctypes.cast(threads.GOMP_parallel, ctypes.c_void_p),
            ctypes.cast(threads.GOMP_barrier, ctypes.c_void_p),
            ctypes.cast(threads.omp_get_num_threads, ctypes.c_void_p),
        )
        self._library = library
        self._memory = WeightMemory()

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None, kind: Kind = Kind.BF16) -> Packed:
        """Return ``weight`` [outputs, inputs] packed."""
        outputs, inputs = weight.shape
        source = weight.to(torch.bfloat16).contiguous()
        packed = self._memory.take(self._library.rig_bytes(inputs, outputs, kind))
        self._library.rig_pack(source.data_ptr(), inputs, outputs, kind, packed.data_ptr())
        linear = Linear(inputs, outputs, kind, packed.data_ptr())
        if bias is None:
            return Packed(linear, (packed,))
        linear.bias = bias.data_ptr()
        return Packed(linear, (packed, bias))

    def run(self, calls: "Sequence[Call] | ctypes.Array[Call]") -> None:
        """Run calls one after the other."""
        array = calls if isinstance(calls, ctypes.Array) else (Call * len(calls))(*calls)
        refused = self._library.rig_run(*self._threads, ctypes.addressof(array), len(array))
        if refused:
            raise RuntimeError(f"the kernel cannot run here: {refused}")


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the rows of a gate and of what it gates (weights or biases) as the kernel wants them, 16 by 16."""
    pieces = [tensor.reshape(-1, 16, *tensor.shape[1:]) for tensor in (gate, up)]
    return torch.stack(pieces, dim=1).flatten(0, 2)
