"""C sources become a shared library: compiled where it runs, when it first runs, and kept by content.

What is kept is named by all that it came from: sources, flags, compiler, the processor's features. A kernel is never
needed: `NoKernel` says why there is none, and its caller has a slower way.
"""

import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.worker.cache_folder import CacheFolder, default_root
from services.worker.progress import Progress
from shared.errors import StartupError

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O2", "-march=native", "-shared", "-fPIC")
_COMPILE_S = 60.0
_ASK_S = 10.0
_MACHINES = frozenset({"x86_64", "amd64"})
_LIBRARY = "kernel.so"


class NoKernel(Exception):
    """There is no kernel for this machine; the text says why."""


@dataclass(frozen=True, slots=True)
class Built:
    """A library that can be loaded, and how it was had."""

    library: Path
    how: str


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler, and what it calls itself."""

    path: str
    version: str


@contextmanager
def built(
    sources: Sequence[Path], progress: Progress, *, root: Path | None = None, flags: Sequence[str] = ()
) -> Iterator[Built]:
    """Give the library of some sources, of which the first is compiled and the others are included by it.

    It may be gone afterwards: load it inside. Raises NoKernel: no compiler, a failed compilation, another processor.
    """
    if platform.machine().lower() not in _MACHINES:
        raise NoKernel(f"there is no kernel for {platform.machine()} processors")
    compiler = _compiler()
    command = (compiler.path, *_FLAGS, *flags, str(sources[0]), "-o")
    content = _content(sources, compiler, flags)
    with ExitStack() as stack:
        try:
            found = _kept_or_made(CacheFolder(root or default_root() / "kernels"), content, command, progress)
        except StartupError as error:  # a cache that cannot be used costs a compilation at each start
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            _compile(command, folder / _LIBRARY)
            found = Built(folder / _LIBRARY, f"compiled and not kept ({error})")
        yield found


def _kept_or_made(cache: CacheFolder, content: str, command: Sequence[str], progress: Progress) -> Built:
    kept = cache.find(content)
    if kept is None:
        with cache.alone(content, progress) as staging:
            kept = cache.find(content)  # another process may have come first
            if kept is None:
                made = staging / "kernel"
                made.mkdir()
                _compile(command, made / _LIBRARY)
                return Built(cache.keep(made, origin=content, content=content) / _LIBRARY, "compiled")
    return Built(kept / _LIBRARY, "found in the cache")


def _compile(command: Sequence[str], library: Path) -> None:
    try:
        done = subprocess.run([*command, str(library)], capture_output=True, text=True, check=False, timeout=_COMPILE_S)  # noqa: S603 - our own source, the system's compiler
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernel(f"{command[0]} cannot compile: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
        raise NoKernel(f"{command[0]} does not compile the kernel: {lines[0]}")


def _compiler() -> Compiler:
    for name in _COMPILERS:
        path = shutil.which(name)
        version = _version(path) if path else None
        if path and version:
            return Compiler(path, version)
    # measured with one stream on Zen 4: 44 to 64 ms a token without, 11 with
    raise NoKernel(f"no C compiler was found ({', '.join(_COMPILERS)}): install one to be served about 4 times as fast")


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
