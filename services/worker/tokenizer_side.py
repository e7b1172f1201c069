"""The tokenizer side of a model: all that gateways need, so that they never import torch."""

import json
from pathlib import Path
from typing import Any

import jinja2
import structlog
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shared.errors import StartupError
from shared.protocol.messages import Sampling, TokenizerFiles

log = structlog.get_logger()

_PROBE = "slipstream"


def tokenizer_files(folder: Path) -> TokenizerFiles:
    """Return what a folder says of tokens. Raises StartupError if it has no tokenizer that can be shared as JSON."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises it bare, for vocabularies that it cannot build
        raise StartupError(f"cannot read the model's tokenizer: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise StartupError(f"the model's tokenizer ({type(tokenizer).__name__}) has no tokenizer.json form")
    generation = _read_json(folder / "generation_config.json")
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    special = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items()) if token}
    return TokenizerFiles(
        # as transformers runs it: its additions to the file (such as a BOS token) included
        tokenizer_json=tokenizer.backend_tokenizer.to_str().encode(),
        chat_template=template,
        eos_ids=_eos_ids(tokenizer, generation, _read_json(folder / "config.json")),
        special_tokens=special,
        defaults=_sampling(generation),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read: object = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise StartupError(f"{path.name} of the model is not JSON: {error}") from error
    return read if isinstance(read, dict) else {}


def _eos_ids(tokenizer: PreTrainedTokenizerFast, generation: dict[str, Any], config: dict[str, Any]) -> tuple[int, ...]:
    """Return every id that ends an answer: those the model names, its tokenizer's, its chat template's."""
    named = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = set(named if isinstance(named, list) else [named])
    ids |= {tokenizer.eos_token_id, _end_of_turn(tokenizer)}
    return tuple(sorted(token for token in ids if isinstance(token, int)))


def _end_of_turn(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Return the special token that the chat template writes right after an answer, if it writes one."""
    if not isinstance(tokenizer.chat_template, str):
        return None
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        log.warning("chat_template_not_tried", error=str(error))
        return None
    rest = str(text).rpartition(_PROBE)[2]
    after = tokenizer.encode(rest.lstrip(), add_special_tokens=False)
    added = tokenizer.added_tokens_decoder.get(after[0]) if after else None
    return after[0] if added is not None and added.special else None


def _sampling(generation: dict[str, Any]) -> Sampling:
    """Return the model's own sampling parameters; only those that its file states."""
    known = Sampling()
    temperature = generation.get("temperature")
    top_p = generation.get("top_p")
    top_k = generation.get("top_k")
    min_p = generation.get("min_p")
    repetition_penalty = generation.get("repetition_penalty")
    return Sampling(
        temperature=known.temperature if temperature is None else float(temperature),
        top_p=known.top_p if top_p is None else float(top_p),
        top_k=known.top_k if top_k is None else int(top_k),
        min_p=known.min_p if min_p is None else float(min_p),
        repetition_penalty=known.repetition_penalty if repetition_penalty is None else float(repetition_penalty),
    )
