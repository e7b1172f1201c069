"""Where the kernel comes from: compiled once, kept by content, rebuilt when spoilt, and done without."""

import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.worker import kernel_build
from services.worker.attention_choice import chosen_path
from services.worker.attention_kernel import KernelPath
from services.worker.attention_torch import TorchPath
from services.worker.kernel_build import NoKernel, built
from services.worker.progress import Progress

SOURCES = (Path(kernel_build.__file__).with_name("program.c"), Path(__file__).with_name("linear_rig.c"))
SOURCE = "int answer(void) { return 42; }\n"


class Bench:
    """A source, a cache, and a compiler that notes each of its compilations."""

    def __init__(self, folder: Path, *, compiler: str | None = None) -> None:
        self.root = folder / "cache"
        self.source = folder / "answer.c"
        self.source.write_text(SOURCE)
        self.notes = folder / "notes"
        self.bin = folder / "bin"
        self.bin.mkdir()
        real = compiler or shutil.which("cc")
        assert real, "these tests need a C compiler"
        note = f'case "$*" in *--version*) ;; *) echo compiled >> {self.notes} ;; esac'
        self._program("cc", f'{note}\nexec {real} "$@"')

    def _program(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    @property
    def compiled(self) -> int:
        return len(self.notes.read_text().splitlines()) if self.notes.exists() else 0

    def how(self, *flags: str) -> str:
        with built([self.source], Progress(), root=self.root, flags=flags) as library:
            assert library.library.stat().st_size > 0
            return library.how


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench(tmp_path)
    monkeypatch.setenv("PATH", f"{bench.bin}{os.pathsep}{os.environ['PATH']}")
    return bench


def test_the_second_start_does_not_compile(bench: Bench) -> None:
    assert [bench.how(), bench.how()] == ["compiled", "found in the cache"]
    assert bench.compiled == 1


def test_what_is_kept_is_named_by_source_and_flags(bench: Bench) -> None:
    bench.how()
    assert bench.how("-DOTHER") == "compiled"
    bench.source.write_text(SOURCE.replace("42", "43"))
    assert bench.how() == "compiled"
    bench.source.write_text(SOURCE)
    assert bench.how() == "found in the cache"


@pytest.mark.parametrize("left", [0, 100])
def test_a_spoilt_file_in_the_cache_is_built_again(bench: Bench, left: int) -> None:
    bench.how()
    (library,) = bench.root.rglob("*.so")
    library.write_bytes(library.read_bytes()[:left])
    with capture_logs() as logs:
        assert bench.how() == "compiled"
    assert [log["event"] for log in logs] == ["model_cache_damaged"]
    assert bench.how() == "found in the cache"


def test_two_processes_at_once_compile_once(bench: Bench) -> None:
    script = (
        "import sys; from pathlib import Path; from services.worker.kernel_build import built\n"
        "from services.worker.progress import Progress\n"
        f"with built([Path({str(bench.source)!r})], Progress(), root=Path({str(bench.root)!r})) as it: print(it.how)"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [one.communicate(timeout=50) for one in both]
    said = sorted(out.splitlines()[-1] if out else errors for out, errors in answers)
    assert said == ["compiled", "found in the cache"]
    assert bench.compiled == 1


def test_a_cache_that_cannot_be_used_costs_a_compilation_and_no_more(bench: Bench) -> None:
    bench.root.write_text("in the way")
    for _ in range(2):
        assert bench.how().startswith("compiled and not kept (the cache folder")
    assert bench.compiled == 2


def test_what_a_compiler_objects_to_is_said(bench: Bench) -> None:
    bench.source.write_text("int answer(void) { return fortytwo; }\n")
    with pytest.raises(NoKernel, match=r"cc does not compile the kernel: .*fortytwo"):
        bench.how()
    assert not list(bench.root.rglob("*.so"))


def chosen(root: Path) -> tuple[object, list[dict[str, object]]]:
    with capture_logs() as logs:
        path = chosen_path(Progress(), root=root)
    return path, [dict(log) for log in logs]


def test_one_line_says_that_the_kernel_is_in_use(bench: Bench) -> None:
    for why in ("compiled", "found in the cache"):
        path, logs = chosen(bench.root)
        assert isinstance(path, KernelPath)
        (log,) = logs
        assert (log["event"], log["path"], log["why"]) == ("attention_path", "kernel", why)
        assert log["variant"] in {"amx", "avx512_bf16", "avx512", "avx2", "portable"}


def test_without_a_compiler_one_line_says_that_torch_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    path, logs = chosen(tmp_path)
    assert isinstance(path, TorchPath)
    why = "no C compiler was found (cc, gcc, clang): install one to be served about 4 times as fast"
    assert logs == [{"event": "attention_path", "log_level": "warning", "path": "torch", "why": why}]


def test_a_compiler_that_fails_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Bench(tmp_path, compiler="false")
    (failing.bin / "cc").write_text(
        '#!/bin/sh\ncase "$*" in --version) echo cc 1 ;; *) echo "error: no" >&2; exit 1 ;; esac\n'
    )
    monkeypatch.setenv("PATH", str(failing.bin))
    path, (log,) = chosen(tmp_path / "cache")
    assert isinstance(path, TorchPath)
    assert str(log["why"]).endswith("cc does not compile the kernel: error: no")


def test_a_library_that_cannot_be_loaded_is_done_without(bench: Bench) -> None:
    bench.how()
    (library,) = bench.root.rglob("*.so")
    with pytest.raises(NoKernel, match=r"cannot be loaded: .*attention_call"):
        KernelPath(library)


@pytest.mark.parametrize(
    "processor", ["x86-64", "haswell", "skylake-avx512", "cascadelake", "cooperlake", "sapphirerapids"]
)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_strict_compiler_has_nothing_to_say(source: Path, processor: str) -> None:
    compiler = shutil.which("gcc")
    assert compiler, "these tests need gcc"
    flags = (f"-march={processor}", "-std=gnu11", "-fsyntax-only", "-Wall", "-Wextra", "-Werror")
    done = subprocess.run([compiler, *flags, str(source)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_processor_has_no_kernel(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    path, (log,) = chosen(bench.root)
    assert isinstance(path, TorchPath)
    assert log["why"] == "there is no kernel for aarch64 processors"
