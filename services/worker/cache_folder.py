"""Where converted models are kept: by content, whole or not at all, shared by all processes of a user.

::

    models/SHA-256 of the wheel or .gguf file/     config.json, *.safetensors, …, slipstream.json (sizes and sums)
    sources/ORIGIN                                 which content a package or a file was found to have
    staging/ORIGIN@…/                              under way; left behind only by a kill, removed by the next process
    locks/ORIGIN.lock
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import structlog
from filelock import FileLock, Timeout

from services.worker.progress import Progress
from shared.errors import StartupError

_MANIFEST = "slipstream.json"
_FORMAT = 1
_SUMMED_BYTES = 512 * 1024 * 1024
"""Files up to this size are checked by their sum at every start (a second or less), larger ones by their size."""
_LOCK_POLL_S = 1.0
_ENDS_ORIGIN = "@"
"""Stands in no origin: what begins with 0.1 and a dot may belong to 0.1.2, which another process is at work on."""

log = structlog.get_logger()


class _Entry(TypedDict):
    size: int
    sha256: str


def default_root() -> Path:
    """Return the cache folder: SLIPSTREAM_CACHE, or the user's own cache."""
    given = os.environ.get("SLIPSTREAM_CACHE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slipstream"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class CacheFolder:
    """Converted models. Every method raises StartupError when the disk does not play along."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find(self, content: str) -> Path | None:
        """Return the whole and unspoilt model of a content, if it is there; a spoilt one is put away."""
        folder = self._root / "models" / content
        if not folder.exists():
            return None
        fault = _fault(folder)
        if fault is None:
            return folder
        log.warning("model_cache_damaged", folder=str(folder), fault=fault)
        shutil.rmtree(folder, ignore_errors=True)
        return None

    def content_of(self, origin: str) -> str | None:
        """Return the content that an origin was found to have, if it was ever looked at."""
        with self._disk():
            try:
                return (self._root / "sources" / origin).read_text().strip() or None
            except FileNotFoundError:
                return None

    @contextmanager
    def alone(self, origin: str, progress: Progress) -> Iterator[Path]:
        """Hold an origin against other processes, and give a new folder for work under way, removed at the end."""
        lock = FileLock(self._root / "locks" / f"{origin}.lock")
        prefix = f"{origin}{_ENDS_ORIGIN}"
        with self._disk():
            for name in ("models", "sources", "staging", "locks"):
                (self._root / name).mkdir(parents=True, exist_ok=True)
            _acquire(lock, origin, progress)
            try:
                for left in (self._root / "staging").glob(f"{prefix}*"):
                    shutil.rmtree(left, ignore_errors=True)  # of a process that was killed: we hold its lock now
                with tempfile.TemporaryDirectory(prefix=prefix, dir=self._root / "staging") as staging:
                    yield Path(staging)
            finally:
                lock.release()

    def keep(self, made: Path, *, origin: str, content: str) -> Path:
        """Take a finished folder into the cache by one rename, and return where it is now."""
        target = self._root / "models" / content
        with self._disk():
            _seal(made)
        try:
            made.rename(target)
        except OSError as error:
            # another origin with the same content came first: theirs is as good, if it is whole
            found = self.find(content)
            if found is None:
                raise StartupError(f"the model cannot be stored in {target}: {error.strerror}") from error
        self.note(made.parent, origin=origin, content=content)
        return target

    def note(self, staging: Path, *, origin: str, content: str) -> None:
        """Remember which content an origin has."""
        fresh = staging / "source"
        with self._disk():
            fresh.write_text(content)
            fresh.replace(self._root / "sources" / origin)

    def require_space(self, needed_bytes: int, what: str) -> None:
        """Raise StartupError unless so much is free on the disk of the cache."""
        place = self._root
        while not place.exists():
            place = place.parent
        free_bytes = shutil.disk_usage(place).free
        if free_bytes < needed_bytes:
            raise StartupError(
                f"not enough disk space in {self._root} to {what}: "
                f"{needed_bytes / 1e6:,.0f} MB needed, {free_bytes / 1e6:,.0f} MB free"
            )

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """Turn what the disk refuses into one sentence: it is full, it is read only, a file is in the way."""
        try:
            yield
        except OSError as error:
            raise StartupError(f"the cache folder {self._root} cannot be used: {error.strerror or error}") from error


def _acquire(lock: FileLock, origin: str, progress: Progress) -> None:
    while True:
        progress.check()
        try:
            lock.acquire(timeout=_LOCK_POLL_S)
        except Timeout:
            progress.say("model_waiting", reason="another process is fetching or converting it", model=origin)
        else:
            return


def _seal(folder: Path) -> None:
    """Write down what a finished folder holds."""
    files: dict[str, _Entry] = {}
    for path in sorted(folder.iterdir()):
        size = path.stat().st_size
        files[path.name] = {"size": size, "sha256": sha256_of(path) if size <= _SUMMED_BYTES else ""}
        with path.open("rb") as file:
            os.fsync(file.fileno())  # a power cut after the rename must not leave empty files behind it
    (folder / _MANIFEST).write_text(json.dumps({"format": _FORMAT, "files": files}, indent=1))


def _fault(folder: Path) -> str | None:
    """Return what is wrong with a stored model, or None."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        files: dict[str, _Entry] = manifest["files"]
        if manifest["format"] != _FORMAT:
            return "of another format"
        for name, entry in files.items():
            path = folder / name
            if path.stat().st_size != entry["size"]:
                return f"{name} has another size"
            if entry["sha256"] and sha256_of(path) != entry["sha256"]:
                return f"{name} has other content"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"cannot be checked: {error}"
    return None
