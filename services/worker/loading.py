"""Loading a model with transformers' own code and our attention."""

import os
import platform
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from services.worker.attention_choice import chosen_path
from services.worker.attention_path import AttentionPath
from services.worker.compatibility import check_class, check_config, check_modules
from services.worker.executor import Later, Loaded
from services.worker.grammars import Grammars
from services.worker.kv_size import BLOCK_TOKENS, free_memory_bytes, kv_blocks
from services.worker.model_store import model_folder
from services.worker.paged_attention import PagedAttention
from services.worker.probe import Probe
from services.worker.program_adoption import Serving, adopt_kept, adopt_later, adopt_now
from services.worker.program_building import Wish
from services.worker.progress import Progress
from services.worker.quiet import quieten_transformers
from services.worker.tokenizer_side import tokenizer_files
from services.worker.torch_executor import TorchExecutor
from shared.errors import StartupError
from shared.protocol.messages import WorkerSize
from shared.runtime.settings import WorkerSettings

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_torch(settings: WorkerSettings, progress: Progress) -> Loaded:
    """Return the model that the settings name, ready to serve. Called on the thread that will run its steps.

    Raises StartupError: it cannot be had, cannot be served, or does not fit.
    """
    torch.set_num_threads(settings.threads or _cores())
    folder = model_folder(settings.model, progress)
    progress.check()
    return load_folder(folder, settings, progress)


def load_folder(
    folder: Path, settings: WorkerSettings, progress: Progress, *, path: AttentionPath | None = None
) -> Loaded:
    """Return the model that lies in a folder, ready to serve; without a path to attend on, the best there is."""
    quieten_transformers()
    config = _config(folder)
    model_class = servable_class(config)
    dtype = chosen_dtype(settings.dtype)
    model = _model(folder, model_class, dtype)
    progress.check()
    serving = fitted(model, settings, path or chosen_path(progress))
    progress.check()
    later = _compiled(serving, settings)
    files = tokenizer_files(folder)
    serving.executor.follow(Grammars(files, serving.executor.vocabulary, threads=torch.get_num_threads()))
    return Loaded(serving.executor, files, str(dtype).removeprefix("torch."), later)


def _compiled(serving: Serving, settings: WorkerSettings) -> Later | None:
    """Let a program take over as the settings say; return what is left to be done beside the first steps."""
    size = serving.executor.size
    wish = Wish(settings.weights, size.max_model_len, serving.executor.vocabulary)
    if settings.weights == "int8" or settings.compile == "now":
        adopt_now(serving, wish)
        return None
    if settings.compile == "off" or adopt_kept(serving, wish):
        return None
    return partial(adopt_later, serving, wish)


def servable_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the code of a configuration. Raises StartupError, by name, if it cannot be served."""
    check_config(config)
    mapping = AutoModelForCausalLM._model_mapping  # noqa: SLF001 - there is no public lookup
    found: object = mapping.get(type(config), None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise StartupError(f"models of type {config.model_type} cannot be served: they do not generate text")
    check_class(config, found)
    return found


def fitted(model: PreTrainedModel, settings: WorkerSettings, path: AttentionPath) -> Serving:
    """Return a model with its executor: probed, and with as large a KV pool as the settings and memory allow."""
    check_modules(model)
    model.train(mode=False)
    model.requires_grad_(requires_grad=False)
    vocabulary = _vocabulary(model)
    bytes_per_token = Probe(model, vocabulary, path).check()
    blocks = kv_blocks(
        settings.kv_tokens,
        bytes_per_token=bytes_per_token,
        free_bytes=free_memory_bytes(),
        sharers=settings.memory_share,
    )
    attention = PagedAttention(blocks=blocks, block_tokens=BLOCK_TOKENS, dtype=model.dtype, path=path)
    model.set_attn_implementation(attention.name)
    max_model_len = getattr(model.config, "max_position_embeddings", None) or blocks * BLOCK_TOKENS
    size = WorkerSize(blocks, BLOCK_TOKENS, max_model_len)
    return Serving(model, attention, path, TorchExecutor(model, attention, size=size, vocabulary=vocabulary))


def chosen_dtype(wish: str) -> torch.dtype:
    """Return the type to compute in; ``auto`` is bfloat16 only where the processor multiplies it natively."""
    if wish != "auto":
        return _DTYPES[wish]
    return torch.bfloat16 if _has_native_bfloat16() else torch.float32


def _has_native_bfloat16() -> bool:
    if platform.machine().lower() in {"x86_64", "amd64"}:
        # emulated bfloat16 (AVX2, plain AVX-512) is slower than float32
        return bool(torch.cpu._is_avx512_bf16_supported())  # noqa: SLF001 - the one place torch says it
    try:
        features = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return any("bf16" in line.split() for line in features.splitlines() if line.startswith("Features"))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _config(folder: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise StartupError(f"cannot read the model's config.json: {_first_line(error)}") from error
    return config


def _model(folder: Path, model_class: type[PreTrainedModel], dtype: torch.dtype) -> PreTrainedModel:
    try:
        model: PreTrainedModel = model_class.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise StartupError(f"cannot load the model: {_first_line(error)}") from error
    return model


def _vocabulary(model: PreTrainedModel) -> int:
    embedding: object = model.get_input_embeddings()
    if not isinstance(embedding, torch.nn.Embedding):
        raise StartupError(f"models of type {model.config.model_type} cannot be served: no plain token embedding")
    return embedding.num_embeddings


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
