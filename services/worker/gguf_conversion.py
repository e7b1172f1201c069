"""A .gguf file becomes a folder of plain weights that transformers reads in seconds."""

import contextlib
import io
import shutil
from pathlib import Path

from gguf import GGUFReader

from services.worker.progress import Progress
from shared.errors import ServingError, StartupError

_BYTES_PER_WEIGHT = 2


def converted_bytes(gguf: Path) -> int:
    """Return the room that the converted weights take. Raises StartupError if the file cannot be read as GGUF."""
    try:
        reader = GGUFReader(gguf)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise StartupError(f"{gguf.name} cannot be read as a GGUF file: {error}") from error
    return sum(int(tensor.n_elements) for tensor in reader.tensors) * _BYTES_PER_WEIGHT


def convert_gguf(gguf: Path, target: Path, progress: Progress) -> None:
    """Write model, tokenizer and chat template of a .gguf file into a folder, dequantised to bfloat16.

    Raises StartupError. Leaves a folder beside ``target``, which is expected to be removed with all that is there.

    Stored as bfloat16, in float32 runs too: GGUF models were published in it before they were quantised, its rounding
    (1 in 256) lies far below the quantisation's own (1 in 16 for Q4), and the float32 path then computes exactly on
    the very weights that the bfloat16 path and every reference read. A float32 folder would be twice as large and
    would make two models out of one.
    """
    # the reader draws a bar that nothing switches off; our own log holds the real standard error already
    with progress.beating("model_converting", file=gguf.name), contextlib.redirect_stderr(io.StringIO()):
        try:
            _convert(_alone(gguf, target.with_name("alone")), target, progress)
        except ServingError:
            raise
        except Exception as error:  # tokenizers and safetensors raise errors of their own, the former a bare Exception
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise StartupError(f"{gguf.name} cannot be converted: {why}") from error


def _alone(gguf: Path, folder: Path) -> Path:
    """Return the file in a folder of its own: transformers takes a tokenizer that lies beside it for the file's."""
    folder.mkdir()
    alone = folder / gguf.name
    try:
        alone.symlink_to(gguf.resolve())
    except OSError:  # not every file system and not every user may have links
        shutil.copyfile(gguf, alone)
    return alone


def _convert(gguf: Path, target: Path, progress: Progress) -> None:
    # here, not above: torch and transformers take seconds to import, and a model in the cache needs neither
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    from services.worker.quiet import quieten_transformers  # noqa: PLC0415

    quieten_transformers()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    progress.check()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    progress.check()
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
