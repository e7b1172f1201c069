"""Weights of linear layers, packed for the kernel (`linear.h`) that multiplies by them."""

import ctypes
import enum
from dataclasses import dataclass

import torch

from services.worker.attention_memory import empty_pool

STEP = 32
"""Inputs of a layer are a multiple of this."""
INTERLEAVED = 16
"""Rows of gate and of up that follow each other."""
_ALIGNED = 64
_SLAB_BYTES = 64 * 1024 * 1024


class Kind(enum.IntEnum):
    """What packed weights are made of."""

    BF16 = 0
    INT8 = 1


class Linear(ctypes.Structure):
    """``struct linear`` of the kernel."""

    _fields_ = (
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed weights: the structure has the addresses of the tensors, which live as long as this does."""

    linear: Linear
    tensors: tuple[torch.Tensor, ...]


class _Memory:
    """Aligned pieces of large slabs: layers lie side by side on huge pages, and are read in the order they came in."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> torch.Tensor:
        if self._used + size > len(self._slab):
            self._slab = empty_pool((max(size, _SLAB_BYTES),), torch.uint8)
            self._used = 0
        taken = self._slab[self._used : self._used + size]
        self._used += -(-size // _ALIGNED) * _ALIGNED
        return taken


class Packer:
    """Packs layer after layer by the functions of a library that includes `linear_outside.h`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._bytes, self._scales = library.linear_outside_bytes, library.linear_outside_scales
        self._pack = library.linear_outside_pack
        for function in (self._bytes, self._scales):
            function.argtypes = (ctypes.c_int64,) * 3
            function.restype = ctypes.c_int64
        self._pack.argtypes = (ctypes.c_void_p, *(ctypes.c_int64,) * 3, ctypes.c_void_p, ctypes.c_void_p)
        self._pack.restype = None
        self._memory = _Memory()

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None, kind: Kind = Kind.BF16) -> Packed:
        """Return ``weight`` [outputs, inputs] packed. Raises ValueError if the inputs are no multiple of STEP."""
        outputs, inputs = weight.shape
        if inputs % STEP:
            raise ValueError(f"{inputs} inputs: not a multiple of {STEP}")
        source = weight.detach().to(torch.bfloat16).contiguous()
        packed = self._memory.take(self._bytes(inputs, outputs, kind))
        scales = self._memory.take(4 * self._scales(inputs, outputs, kind))
        has_scales = len(scales) > 0
        self._pack(
            source.data_ptr(), inputs, outputs, kind, packed.data_ptr(), scales.data_ptr() if has_scales else None
        )
        kept = None if bias is None else bias.detach().float().contiguous()
        linear = Linear(inputs, outputs, kind, packed.data_ptr())
        linear.scales = scales.data_ptr() if has_scales else None
        linear.bias = None if kept is None else kept.data_ptr()
        return Packed(linear, (packed, scales) if kept is None else (packed, scales, kept))


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the rows of a gate and of what it gates (weights or biases) as the kernel wants them, 16 by 16.

    Raises ValueError if their number is no multiple of 16.
    """
    if gate.shape != up.shape or len(gate) % INTERLEAVED:
        raise ValueError(f"a gate of {len(gate)} rows and {len(up)} gated ones: not a multiple of {INTERLEAVED} alike")
    pieces = [tensor.reshape(-1, INTERLEAVED, *tensor.shape[1:]) for tensor in (gate, up)]
    return torch.stack(pieces, dim=1).flatten(0, 2)
