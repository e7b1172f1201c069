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


def require_kernel(path: AttentionPath, dtype: torch.dtype, wish: Wish) -> None:
    """Raise NotLowered if no program can run here, whatever the model."""
    if not isinstance(path, KernelPath):
        raise NotLowered("there is no kernel")
    if path.library.program_init():
        raise NotLowered("this processor's matrix unit cannot be used")
    kind = _kind(dtype, wish)
    if kind not in KINDS:
        raise NotLowered(f"there is no kernel for numbers of type {kind}")


def _kind(dtype: torch.dtype, wish: Wish) -> str:
    kind = str(dtype).removeprefix("torch.")
    if wish.weights != "int8":
        return kind
    return "int8" if kind == "bfloat16" else f"int8 of {kind}"


def assembled(program: Lowered, path: AttentionPath, wish: Wish) -> Program:
    """Return a program for the kernel, its matrices packed, without pools yet. Raises NotLowered."""
    require_kernel(path, program.dtype, wish)
    assert isinstance(path, KernelPath), "it is required above"  # noqa: S101 - for the type checker
    library = path.library
    library.program_run.argtypes = (ctypes.c_void_p,)
    packer = Packer(library, _kind(program.dtype, wish))
    return Program(program, Assembler(packer), library.program_run, wish.vocabulary)


class Source:
    """A model, as what a program is made from."""

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._tensors = _tensors(model)
        self._content = content_of(model, self._tensors, max_model_len)

    def kept(self) -> Lowered | None:
        """Return the program of an earlier start."""
        return found(default_root(), self._content, self._tensors)

    def made(self) -> Lowered:
        """Lower the model. Raises NotLowered.

        May run beside the model's own steps: stand-ins for weights go into a twin. While torch traces that, it routes
        the calls of all modules through itself, those of the model that serves too, and lets them pass.
        """
        program = lowered(exported(twin_of(self._model), self._tensors), self._max_model_len)
        _require_worth(program)
        return program

    def keep(self, program: Lowered) -> None:
        """Keep a program for the next start. A cache that cannot be used costs its making at each."""
        try:
            keep(default_root(), self._content, program, self._tensors)
        except StartupError as error:
            log.warning("program_not_kept", error=str(error))


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
