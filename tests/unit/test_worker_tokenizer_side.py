"""What a gateway gets of a model: its tokenizer, its template, and every id that ends an answer."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from services.worker.fake_tokenizer import fake_tokenizer_files
from services.worker.service import content_hash_of
from services.worker.tokenizer_side import tokenizer_files
from shared.errors import StartupError
from shared.protocol.messages import Sampling

TURNS = "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] }}<|eot|>\n{% endfor %}"


def model_folder(folder: Path, *, template: str | None = None, **generation: object) -> Path:
    """A folder as a model's publisher would write it; <|end|> is 256, <|begin|> 257, <|eot|> 258."""
    tokenizer = Tokenizer.from_str(fake_tokenizer_files().tokenizer_json.decode())
    tokenizer.add_special_tokens([AddedToken("<|eot|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|begin|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 7}))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_the_tokenizer_travels_whole(tmp_path: Path) -> None:
    files = tokenizer_files(model_folder(tmp_path))
    tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
    assert tokenizer.encode("héllo<|eot|>").ids == [*"héllo".encode(), 258]
    assert files.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


def test_answers_end_at_the_ids_of_generation_config_tokenizer_and_template(tmp_path: Path) -> None:
    files = tokenizer_files(model_folder(tmp_path, template=TURNS, eos_token_id=[3, 4]))
    assert files.eos_ids == (3, 4, 256, 258)
    assert files.chat_template == TURNS


def test_without_a_generation_config_the_model_s_own_counts(tmp_path: Path) -> None:
    assert tokenizer_files(model_folder(tmp_path)).eos_ids == (7, 256)


def test_a_template_that_ends_turns_in_plain_text_adds_no_id(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
    assert tokenizer_files(model_folder(tmp_path, template=template)).eos_ids == (7, 256)


def test_a_template_that_refuses_our_trial_is_kept_for_real_chats(tmp_path: Path) -> None:
    template = "{{ raise_exception('only with tools') }}"
    files = tokenizer_files(model_folder(tmp_path, template=template))
    assert (files.chat_template, files.eos_ids) == (template, (7, 256))


def test_only_sampling_parameters_that_the_model_states_are_its_defaults(tmp_path: Path) -> None:
    assert tokenizer_files(model_folder(tmp_path, eos_token_id=3)).defaults == Sampling()
    stated = tokenizer_files(model_folder(tmp_path, temperature=0.6, top_p=0.9, top_k=40)).defaults
    assert stated == Sampling(temperature=0.6, top_p=0.9, top_k=40)


def test_the_same_folder_has_the_same_content_hash_and_another_template_another(tmp_path: Path) -> None:
    first = content_hash_of(tokenizer_files(model_folder(tmp_path)))
    assert first == content_hash_of(tokenizer_files(model_folder(tmp_path)))
    assert first != content_hash_of(tokenizer_files(model_folder(tmp_path, template=TURNS)))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StartupError, match="tokenizer"):
        tokenizer_files(folder)


def test_a_tokenizer_that_cannot_be_built_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = [["no", "such"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(StartupError, match="cannot read the model's tokenizer: "):
        tokenizer_files(folder)


def test_a_config_that_is_not_json_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(StartupError, match=r"generation_config\.json of the model is not JSON"):
        tokenizer_files(folder)
