"""Matrices as the kernel multiplies with them: in the order of its reading, side by side where it joins them."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.worker.linear_memory import WeightMemory

KINDS = {"bfloat16": 0, "int8": 1, "float32": 2}
_TILE_OUTPUTS = 16


class Linear(ctypes.Structure):
    """``struct linear`` of the kernel."""

    _fields_ = (
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix for the kernel, and the memory that it lies in."""

    linear: Linear
    kept: tuple[torch.Tensor, ...]


class Packer:
    """Packs matrices, as ``kind`` says: bfloat16 or float32 as they are, or int8 (of bfloat16) with scales."""

    def __init__(self, kernel: Any, kind: str) -> None:
        self._kind = KINDS[kind]
        self._memory = WeightMemory()
        self._bytes, self._pack = kernel.program_packed_bytes, kernel.program_pack
        self._bytes.argtypes, self._bytes.restype = (ctypes.c_int64,) * 3, ctypes.c_int64
        self._pack.argtypes = (ctypes.c_void_p, *(ctypes.c_int64,) * 3, ctypes.c_void_p)
        self._pack.restype = None

    def pack(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], *, gated: bool) -> Packed:
        """Return matrices ``[out, in]`` side by side; gated, 16 outputs of the one and 16 of the other in turn."""
        joined = _joined(weights, gated=gated)
        outputs, inputs = joined.shape
        sizes = (inputs, outputs, self._kind)
        memory = self._memory.take(self._bytes(*sizes))
        self._pack(joined.data_ptr(), *sizes, memory.data_ptr())
        bias = _joined_biases(weights, biases, gated=gated)
        address = None if bias is None else bias.data_ptr()
        linear = Linear(inputs, outputs, self._kind, memory.data_ptr(), address)
        return Packed(linear, (memory,) if bias is None else (memory, bias))


def _joined(parts: Sequence[torch.Tensor], *, gated: bool) -> torch.Tensor:
    if not gated:
        return (
            torch.cat([part.detach() for part in parts]).contiguous()
            if len(parts) > 1
            else parts[0].detach().contiguous()
        )
    gate, up = (part.detach().reshape(-1, _TILE_OUTPUTS, *part.shape[1:]) for part in parts)
    joined = torch.stack((gate, up), dim=1)
    return joined.reshape(-1, *joined.shape[3:]).contiguous()


def _joined_biases(
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], *, gated: bool
) -> torch.Tensor | None:
    if all(bias is None for bias in biases):
        return None
    whole = [
        torch.zeros(weight.shape[0]) if bias is None else bias.detach().float()
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return _joined(whole, gated=gated)
