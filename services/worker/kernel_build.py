"""C sources become a shared library: compiled where it runs, when it first runs, and kept by content.

What is kept is named by all that it came from: sources, flags, compiler, the processor's features. A kernel is never
needed: `NoKernel` says why there is none, and its caller has a slower way.
"""

import hashlib
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.worker.cache_folder import CacheFolder, default_root
from services.worker.progress import Progress
from shared.errors import StartupError

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O2", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
_COMPILE_S = 60.0
_ASK_S = 10.0
_MACHINES = frozenset({"x86_64", "amd64"})
_LIBRARY = "kernel.so"


class NoKernel(Exception):
    """There is no kernel for this machine; the text says why."""


@dataclass(frozen=True, slots=True)
class Built:
    """A library that can be loaded, and whether it had to be compiled for that."""

    library: Path
    was_kept: bool


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler, and what it calls itself."""

    path: str
    version: str


def build(sources: Sequence[Path], progress: Progress, *, root: Path | None = None, flags: Sequence[str] = ()) -> Built:
    """Return the library of some sources, of which the first is compiled and the others are included by it.

    Raises NoKernel: no compiler, a failed compilation, a cache folder that cannot be used, another kind of machine.
    """
    if platform.machine().lower() not in _MACHINES:
        raise NoKernel(f"there is no kernel for {platform.machine()} processors")
    compiler = _compiler()
    content = _content(sources, compiler, flags)
    cache = CacheFolder(root or default_root() / "kernels")
    try:
        return _kept(cache, content) or _made(cache, content, sources[0], (compiler, flags), progress)
    except StartupError as error:
        raise NoKernel(str(error)) from error


def _kept(cache: CacheFolder, content: str) -> Built | None:
    folder = cache.find(content)
    return Built(folder / _LIBRARY, was_kept=True) if folder else None


def _made(
    cache: CacheFolder, content: str, source: Path, how: tuple[Compiler, Sequence[str]], progress: Progress
) -> Built:
    with cache.alone(content, progress) as staging:
        kept = _kept(cache, content)  # another process may have come first
        if kept:
            return kept
        made = staging / "kernel"
        made.mkdir()
        _compile(source, made / _LIBRARY, *how)
        return Built(cache.keep(made, origin=content, content=content) / _LIBRARY, was_kept=False)


def _compile(source: Path, library: Path, compiler: Compiler, flags: Sequence[str]) -> None:
    command = [compiler.path, *_FLAGS, *flags, "-o", str(library), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_S)  # noqa: S603 - our own source, the system's compiler
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernel(f"{compiler.path} cannot compile: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
        raise NoKernel(f"{compiler.path} does not compile the kernel: {lines[0]}")


def _compiler() -> Compiler:
    for name in _COMPILERS:
        path = shutil.which(name)
        version = _version(path) if path else None
        if path and version:
            return Compiler(path, version)
    raise NoKernel(f"no C compiler was found ({', '.join(_COMPILERS)})")


def _version(path: str) -> str | None:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=_ASK_S)  # noqa: S603 - a program that `which` found
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _content(sources: Sequence[Path], compiler: Compiler, flags: Sequence[str]) -> str:
    """Return a name for what compiling would give."""
    sums = [hashlib.sha256(source.read_bytes()).hexdigest() for source in sources]
    parts = (*sums, *_FLAGS, *flags, compiler.version, _features())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _features() -> str:
    """Return what ``-march=native`` looks at: a cache folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "cpu family", "model", "flags")
    found = {line.partition(":")[0].strip(): line for line in reversed(lines)}
    return "\n".join(found.get(name, "") for name in wanted)
