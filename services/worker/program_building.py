"""A program for a loaded model: exported aside from a twin without weights, checked against the model, then used."""

import ctypes
from dataclasses import dataclass

import structlog
import torch
from transformers import PreTrainedModel

from services.worker.attention_kernel import KernelPath
from services.worker.attention_path import AttentionPath
from services.worker.cache_folder import default_root
from services.worker.program import Program
from services.worker.program_cache import content_of, found, keep
from services.worker.program_graph import NotLowered, exported
from services.worker.program_kernel import Assembler
from services.worker.program_lowering import Attended, Lowered, Multiplied, lowered
from services.worker.program_weights import KINDS, Packer
from shared.errors import StartupError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Wish:
    """What a program is made for."""

    weights: str
    """``model``: as the model has them, or ``int8``."""
    max_model_len: int
    vocabulary: int


def assembled(program: Lowered, path: AttentionPath, wish: Wish) -> Program:
    """Return a program for the kernel, its matrices packed, without pools yet. Raises NotLowered."""
    if not isinstance(path, KernelPath):
        raise NotLowered("there is no kernel")
    library = path.library
    library.program_run.argtypes = (ctypes.c_void_p,)
    if library.program_init():
        raise NotLowered("this processor's matrix unit cannot be used")
    kind = str(program.dtype).removeprefix("torch.")
    if wish.weights == "int8":
        kind = "int8" if kind == "bfloat16" else "int8 of " + kind
    if kind not in KINDS:
        raise NotLowered(f"there is no kernel for numbers of type {kind}")
    return Program(program, Assembler(Packer(library, kind)), library.program_run, wish.vocabulary)


def kept(model: PreTrainedModel, wish: Wish) -> Lowered | None:
    """Return the program of an earlier start: building the rest takes a second."""
    tensors = _tensors(model)
    return found(default_root(), content_of(model, tensors, wish.max_model_len), tensors)


def made(model: PreTrainedModel, wish: Wish) -> Lowered:
    """Lower a model, and keep its program for the next start. Raises NotLowered.

    May run beside the model's own steps: it reads weights and nothing else.
    """
    tensors = _tensors(model)
    program = lowered(exported(twin_of(model), tensors), wish.max_model_len)
    _require_worth(program)
    try:
        keep(default_root(), content_of(model, tensors, wish.max_model_len), program, tensors)
    except StartupError as error:  # a cache that cannot be used costs this at each start
        log.warning("program_not_kept", error=str(error))
    return program


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return weights and buffers by all their names."""
    named = (*model.named_parameters(remove_duplicate=False), *_buffers(model).items())
    return {name: tensor.detach() for name, tensor in named}


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


def _require_worth(program: Lowered) -> None:
    """Raise NotLowered if hardly anything was recognised: then torch's own code is as fast."""
    found = sum(isinstance(getattr(step, "what", None), Multiplied | Attended) for step in program.steps)
    if not found:
        raise NotLowered("nothing of its graph is known")
