"""The structures of `program.c`, and a program's instructions as an array of them."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.worker.attention_kernel import Layer
from services.worker.attention_path import Pool
from services.worker.program_lowering import (
    Added,
    Attended,
    Instruction,
    Looked,
    Multiplied,
    Normed,
    Picked,
    Place,
    Rotated,
    What,
)
from services.worker.program_weights import Linear, Packer

_LOOKUP, _NORM, _LINEAR, _ROTATE, _ATTEND, _PICK, _ADD = range(7)
_LOGITS = -2
_BY = {"token": 0, "position": 1}
_EPILOGUE_NONE, _EPILOGUE_ADD, _EPILOGUE_GATED, _EPILOGUE_ACTIVATED = range(4)


class _Place(ctypes.Structure):
    _fields_ = (
        ("at", ctypes.c_int64),
        ("column", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("wanted", ctypes.c_int64),
    )


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_int64),
        ("in_1", _Place),
        ("in_2", _Place),
        ("in_3", _Place),
        ("out", _Place),
        ("what", ctypes.c_void_p),
    )


class _Lookup(ctypes.Structure):
    _fields_ = (("table", ctypes.c_void_p), ("width", ctypes.c_int64), ("by", ctypes.c_int64))


class _Norm(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("centred", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
    )


class _LinearHow(ctypes.Structure):
    _fields_ = (("weights", Linear), ("epilogue", ctypes.c_int64), ("activation", ctypes.c_int64))


class _Rotation(ctypes.Structure):
    _fields_ = (("heads", ctypes.c_int64), ("dim", ctypes.c_int64), ("half", ctypes.c_int64))


class _Width(ctypes.Structure):
    _fields_ = (("width", ctypes.c_int64),)


class ProgramStep(ctypes.Structure):
    """``struct program_step`` of the kernel."""

    _fields_ = (
        ("instructions", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("is_half", ctypes.c_int64),
        ("arena", ctypes.c_void_p),
        ("wanted_arena", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("wanted_capacity", ctypes.c_int64),
        ("step", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("wanted_count", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        ("logits_stride", ctypes.c_int64),
    )


PoolOf = Callable[[Attended], Pool]


@dataclass(frozen=True, slots=True)
class Run:
    """Instructions that follow each other without torch in between; ``kept`` is what they have addresses of."""

    instructions: ctypes.Array[_Instruction]
    layers: tuple[tuple[Attended, Layer], ...]
    kept: tuple[object, ...]

    def use(self, pool_of: PoolOf) -> None:
        """Attend over other pools from now on."""
        for what, layer in self.layers:
            pool = pool_of(what)
            layer.keys, layer.values = pool.keys.data_ptr(), pool.values.data_ptr()

    def since(self, first: int) -> "Run":
        """Return the instructions from one on: the same ones, at the same addresses."""
        rest = _Instruction * (len(self.instructions) - first)
        shared = rest.from_buffer(self.instructions, first * ctypes.sizeof(_Instruction))
        return Run(shared, self.layers, self.kept)


class Assembler:
    """Makes runs of instructions; matrices are packed on the way."""

    def __init__(self, packer: Packer) -> None:
        self._packer = packer

    def run(self, instructions: Sequence[Instruction]) -> Run:
        """Return the instructions for the kernel."""
        kept: list[object] = []
        layers: list[tuple[Attended, Layer]] = []
        array = (_Instruction * len(instructions))()
        for to, given in zip(array, instructions, strict=True):
            op, what = self._what(given, kept)
            kept.append(what)
            if isinstance(given.what, Attended) and isinstance(what, Layer):
                layers.append((given.what, what))
            places = [*map(_placed, given.inputs), *(_Place(-1, 0, 0, 0),) * 3][:3]
            to.op, to.in_1, to.in_2, to.in_3, to.out = op, *places, _placed(given.out)
            to.what = ctypes.addressof(what)
        return Run(array, tuple(layers), tuple(kept))

    def _what(self, given: Instruction, kept: list[object]) -> tuple[int, ctypes.Structure]:  # noqa: PLR0911 - one for each kind
        what: What = given.what
        match what:
            case Looked():
                kept.append(what.table)
                return _LOOKUP, _Lookup(what.table.data_ptr(), what.table.shape[1], _BY[what.by])
            case Normed():
                kept.append(what)
                addresses = (_address(what.weight), _address(what.bias))
                return _NORM, _Norm(*addresses, what.width, what.groups, what.centred, what.epsilon)
            case Multiplied():
                return _LINEAR, self._linear(what, adds=len(given.inputs) > 1, kept=kept)
            case Rotated():
                return _ROTATE, _Rotation(what.heads, what.dim, what.half)
            case Attended():
                shape = (what.heads, what.kv_heads, what.dim)
                return _ATTEND, Layer(*shape, 0, what.window, what.scale, what.softcap)
            case Picked():
                return _PICK, _Width(given.out.width)
            case Added():
                return _ADD, _Width(given.out.width)

    def _linear(self, what: Multiplied, *, adds: bool, kept: list[object]) -> ctypes.Structure:
        is_gated = what.activation is not None and len(what.weights) > 1
        packed = self._packer.pack(what.weights, what.biases, gated=is_gated)
        kept.append(packed)
        epilogue = _EPILOGUE_NONE
        if what.activation is not None:
            epilogue = _EPILOGUE_GATED if is_gated else _EPILOGUE_ACTIVATED
        elif adds:
            epilogue = _EPILOGUE_ADD
        return _LinearHow(packed.linear, epilogue, what.activation or 0)


def _placed(place: Place) -> _Place:
    value = place.value
    return _Place(_LOGITS if value.is_logits else value.at, place.column, value.width, value.wanted)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
