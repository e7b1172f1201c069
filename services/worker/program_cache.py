"""Programs kept from one start to the next: exporting a model takes seconds, reading its program does not.

A program is kept by all that it came from: the model's configuration, its number types, the versions of torch and
transformers, and the code that lowered it. Weights are not kept, only their names. What torch computes part of is not
kept at all.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from services.worker.cache_folder import CacheFolder
from services.worker.program_lowering import (
    Added,
    Attended,
    Instruction,
    Looked,
    Lowered,
    Multiplied,
    Normed,
    Picked,
    Place,
    Rotated,
    Value,
    What,
)
from services.worker.progress import Progress
from shared.errors import StartupError

_KINDS: dict[str, type[What]] = {
    kind.__name__: kind for kind in (Looked, Normed, Multiplied, Rotated, Attended, Picked, Added)
}
_CODE = ("graph", "groups", "patterns", "lowering", "cache")
_WORD_BYTES = 8
_STEPS, _TENSORS = "program.json", "tensors.safetensors"

Tensors = Mapping[str, torch.Tensor]


def content_of(model: PreTrainedModel, tensors: Tensors, max_model_len: int) -> str:
    """Return a name for what lowering a model would give."""
    here = Path(__file__).parent
    # what a model was converted from, and which attention it is set to now, changes nothing
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    marks = {name: _mark(tensor) for name, tensor in sorted(tensors.items())}
    parts = (
        json.dumps((type(model).__name__, config, marks, max_model_len), sort_keys=True, default=str),
        torch.__version__,
        transformers.__version__,
        *((here / f"program_{name}.py").read_text() for name in _CODE),
        (here / "paged_attention.py").read_text(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _mark(tensor: torch.Tensor) -> tuple[str, list[int], str]:
    """Return what tells a tensor from another model's: tables made of weights are kept too.

    Vectors count whole, matrices by their sum, for speed: what is found is checked against the model all the same.
    """
    numbers = tensor.contiguous().reshape(-1).view(torch.uint8)
    if tensor.dim() > 1 and len(numbers) % _WORD_BYTES == 0:
        numbers = numbers.view(torch.int64).sum()  # wraps around
    summed = hashlib.sha256(numbers.numpy().tobytes()).hexdigest()
    return str(tensor.dtype), list(tensor.shape), summed


def found(root: Path, content: str, tensors: Tensors) -> Lowered | None:
    """Return the program that was kept under this name, with these weights."""
    folder = CacheFolder(root / "programs").find(content)
    if folder is None:
        return None
    try:
        told = json.loads((folder / _STEPS).read_text())
        return _read(told, {**load_file(folder / _TENSORS), **tensors})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError):
        return None  # the files are whole, but not what this code writes: it is lowered anew


def keep(root: Path, content: str, program: Lowered, tensors: Tensors) -> None:
    """Keep a program, unless torch computes part of it. Raises StartupError if the disk does not play along."""
    instructions = [step for step in program.steps if isinstance(step, Instruction)]
    if len(instructions) < len(program.steps):
        return
    cache = CacheFolder(root / "programs")
    names = {(tensor.data_ptr(), tensor.shape): name for name, tensor in tensors.items()}
    told, kept = _told(instructions, names)
    told["dtype"] = str(program.dtype).removeprefix("torch.")
    with cache.alone(content, Progress()) as staging:
        made = staging / "program"
        made.mkdir()
        (made / _STEPS).write_text(json.dumps(told))
        try:
            save_file(kept, made / _TENSORS)
        except SafetensorError as error:  # what it says when the disk is full
            raise StartupError(f"the program cannot be stored in {made}: {error}") from error
        cache.keep(made, origin=content, content=content)


def _told(
    instructions: Sequence[Instruction], names: Mapping[Any, str]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    values: dict[Value, int] = {}
    kept: dict[str, torch.Tensor] = {}

    def place(given: Place) -> list[int]:
        return [values.setdefault(given.value, len(values)), given.column, given.width]

    def plain(given: object) -> object:
        if isinstance(given, torch.Tensor):
            name = names.get((given.data_ptr(), given.shape))
            if name is None:
                name = f"kept.{len(kept)}"
                kept[name] = given.clone()
            return {"tensor": name}
        return [plain(one) for one in given] if isinstance(given, tuple) else given

    steps = [
        {
            "kind": type(one.what).__name__,
            "what": {field.name: plain(getattr(one.what, field.name)) for field in fields(one.what)},
            "inputs": [place(given) for given in one.inputs],
            "out": place(one.out),
        }
        for one in instructions
    ]
    return {"steps": steps, "values": [[value.width, value.wanted, value.is_logits] for value in values]}, kept


def _read(told: Mapping[str, Any], tensors: Tensors) -> Lowered:
    values = [Value(width, wanted, is_logits) for width, wanted, is_logits in told["values"]]

    def place(given: Sequence[int]) -> Place:
        return Place(values[given[0]], given[1], given[2])

    def real(given: Any) -> Any:
        if isinstance(given, dict):
            return tensors[given["tensor"]]
        return tuple(real(one) for one in given) if isinstance(given, list) else given

    program = Lowered(None, getattr(torch, told["dtype"]))
    for one in told["steps"]:
        what = _KINDS[one["kind"]](**{name: real(value) for name, value in one["what"].items()})
        program.steps.append(Instruction(what, tuple(place(given) for given in one["inputs"]), place(one["out"])))
    return program
