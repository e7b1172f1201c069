"""A program for a loaded model: exported aside from a twin without weights, checked against the model, then used."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from services.worker.attention_kernel import KernelPath
from services.worker.program import Program
from services.worker.program_graph import NotLowered, exported
from services.worker.program_kernel import Assembler
from services.worker.program_lowering import Attended, Lowered, Multiplied, lowered
from services.worker.program_weights import KINDS, Packer


@dataclass(frozen=True, slots=True)
class Wish:
    """What a program is made for."""

    weights: str
    """``model``: as the model has them, or ``int8``."""
    max_model_len: int
    vocabulary: int


def build(model: PreTrainedModel, kernel: KernelPath, wish: Wish) -> Program:
    """Return a program that computes what the model computes, without pools yet. Raises NotLowered.

    May run beside the model's own steps: it reads weights and nothing else.
    """
    kind = str(model.dtype).removeprefix("torch.")
    if wish.weights == "int8":
        kind = "int8" if kind == "bfloat16" else "int8 of " + kind
    if kind not in KINDS:
        raise NotLowered(f"there is no kernel for numbers of type {kind}")
    library = _library(kernel)
    graph = exported(twin_of(model), {**dict(model.named_parameters(remove_duplicate=False)), **_buffers(model)})
    program = lowered(graph, wish.max_model_len)
    _require_worth(program)
    return Program(program, Assembler(Packer(library, kind)), library.program_run, wish.vocabulary)


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the same code and configuration, whose weights are memory that nobody has touched.

    Exporting a model puts stand-ins into the place of its weights for a while: not into the one that serves.
    """
    with torch.device("meta"):
        twin: PreTrainedModel = type(model)(model.config)
    types = {name: one.dtype for name, one in (*model.named_parameters(), *_buffers(model).items())}
    for name, one in (*twin.named_parameters(), *_buffers(twin).items()):
        one.data = one.data.to(types[name])
    twin.to_empty(device="cpu")
    twin.tie_weights()
    twin.train(mode=False)
    twin.requires_grad_(requires_grad=False)
    return twin


def _buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers(remove_duplicate=False))


def _library(kernel: KernelPath) -> Any:
    library = kernel.library
    library.program_run.argtypes = (ctypes.c_void_p,)
    if library.program_init():
        raise NotLowered("this processor's matrix unit cannot be used")
    return library


def _require_worth(program: Lowered) -> None:
    """Raise NotLowered if hardly anything was recognised: then torch's own code is as fast."""
    found = sum(isinstance(getattr(step, "what", None), Multiplied | Attended) for step in program.steps)
    if not found:
        raise NotLowered("nothing of its graph is known")
