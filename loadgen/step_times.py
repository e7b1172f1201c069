"""Files with step-time models: ``loadgen simulate --model FILE`` reads them, ``loadgen calibrate`` writes one.

A file is one JSON object. Required: ``format`` (``"step-times/1"``), ``name``, ``source`` (where the numbers come from,
in a sentence) and ``tokens_ms`` (``[[tokens, ms], ...]``, tokens rising, ms never falling). Optional, with what they
mean in `shared.simulation.model`: ``decode_rows_ms``, ``decode_read_ms_per_token``, ``prefill_read_ms_per_token``,
``prefill_pair_ms``, ``tile_tokens``, ``stages``, ``kv_tokens``; and ``assumptions`` (sentences, for the reader). Any
other field is refused: a slip of the pen must not pass for a number that adds nothing. For example::

    {
     "format": "step-times/1",
     "name": "my-machine",
     "source": "loadgen calibrate on ..., 200 steps",
     "tokens_ms": [[1, 9.5], [64, 41.0], [512, 260.0]],
     "decode_read_ms_per_token": 0.0004,
     "prefill_pair_ms": 0.00003,
     "kv_tokens": 65536
    }
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec

from shared.simulation.model import StepTimeModel

FORMAT: Literal["step-times/1"] = "step-times/1"


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A file as it stands. Points are pairs (tokens or rows, milliseconds)."""

    format: Literal["step-times/1"]
    name: str
    source: str
    tokens_ms: tuple[tuple[int, float], ...]
    decode_rows_ms: tuple[tuple[int, float], ...] = ((0, 0.0),)
    decode_read_ms_per_token: float = 0.0
    prefill_read_ms_per_token: float = 0.0
    prefill_pair_ms: float = 0.0
    tile_tokens: int = 1
    stages: int = 1
    kv_tokens: int | None = None
    assumptions: tuple[str, ...] = ()

    def model(self) -> StepTimeModel:
        """Return what the simulator takes. Raises ValueError that begins with the name of the field that is wrong."""
        return StepTimeModel(
            tokens_ms=self.tokens_ms,
            decode_rows_ms=self.decode_rows_ms,
            decode_read_ms_per_token=self.decode_read_ms_per_token,
            prefill_read_ms_per_token=self.prefill_read_ms_per_token,
            prefill_pair_ms=self.prefill_pair_ms,
            tile_tokens=self.tile_tokens,
            stages=self.stages,
            kv_tokens=self.kv_tokens,
        )


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A step-time model and where its numbers come from."""

    name: str
    source: str
    model: StepTimeModel


def bundled_models() -> tuple[str, ...]:
    """Return the names of the models that come with the project."""
    files = resources.files("loadgen").joinpath("models").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def load_model(name_or_path: str | Path) -> NamedModel:
    """Read a model that comes with the project, by name, or any other, by path.

    Raises ValueError with one sentence that names the file and the field that is wrong.
    """
    text = str(name_or_path)
    try:
        data = _bytes_of(text)
    except OSError as error:
        names = ", ".join(bundled_models())
        raise ValueError(f"no model {text!r}: neither one of {names} nor a file that can be read") from error
    try:
        file = msgspec.json.decode(data, type=ModelFile)
        return NamedModel(file.name, file.source, file.model())
    except ValueError as error:  # msgspec's own errors are ValueErrors too, and say where
        raise ValueError(f"model {text}: {error}") from error


def write_model(file: ModelFile, path: Path) -> None:
    """Write a model to a file, replacing what is there. Raises ValueError for one that `load_model` would refuse."""
    file.model()
    path.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")


def _bytes_of(text: str) -> bytes:
    if text in bundled_models():
        return resources.files("loadgen").joinpath("models", f"{text}.json").read_bytes()
    return Path(text).read_bytes()
