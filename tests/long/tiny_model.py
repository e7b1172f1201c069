"""A model that is drawn at random and runs in no time: it says nothing, but by the same code as any other."""

import json
from pathlib import Path

import torch
import transformers

from services.worker.fake_tokenizer import EOS_ID, VOCABULARY, fake_tokenizer_files
from tests.end_to_end.with_tools import TEMPLATE
from tests.small_models import SMALL


def write_tiny_model(folder: Path, *, positions: int) -> None:
    """Write a folder with a model of two layers, the tokenizer of bytes, and a template that knows tools."""
    sizes = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": positions,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
    }
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **sizes}))
    model.save_pretrained(folder)
    files = fake_tokenizer_files()
    (folder / "tokenizer.json").write_bytes(files.tokenizer_json)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", **files.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
