"""The size of the KV pool: a share of what is really free."""

from pathlib import Path

import psutil
import pytest

from services.worker.kv_size import free_memory_bytes, kv_blocks
from shared.errors import StartupError

MB = 1_000_000


def blocks(wish: int | None = None, *, free: int = 20_000 * MB, sharers: int = 1) -> int:
    return kv_blocks(wish, bytes_per_token=23_040, free_bytes=free, sharers=sharers)


def test_at_most_64_times_2048_positions_unless_asked_for() -> None:
    assert blocks() == 64 * 2048 // 16
    assert blocks(200_000) == 12_500


def test_a_third_of_free_memory_is_shared_by_the_workers() -> None:
    assert blocks(free=1000 * MB) == 300 * MB // 23_040 // 16
    assert blocks(free=1000 * MB, sharers=4) == 75 * MB // 23_040 // 16


def test_more_than_there_is_cannot_be_asked_for() -> None:
    with pytest.raises(StartupError, match=r"--kv-tokens 100,000 needs 2\.3 GB of memory, but only 1\.0 GB are free"):
        blocks(100_000, free=1000 * MB)


def test_what_is_asked_for_must_fit_into_each_worker_s_share() -> None:
    assert blocks(40_000, free=2000 * MB, sharers=2) == 2500
    with pytest.raises(StartupError, match=r"1\.2 GB of memory, but only 1\.0 GB are free for each of 2 workers"):
        blocks(50_000, free=2000 * MB, sharers=2)


def test_not_even_one_block() -> None:
    with pytest.raises(StartupError, match="too small"):
        blocks(free=1 * MB)
    with pytest.raises(StartupError, match="at least 16"):
        blocks(15)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_tightest_limit_of_all_cgroups_counts_and_cached_files_do_not(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(root / "a", memory__max="1000000", memory__current="400000", memory__stat="inactive_file 150000\n")
    write(root / "a" / "b", memory__max="max", memory__current="400000")
    membership = tmp_path / "membership"
    membership.write_text("0::/a/b\n")
    assert free_memory_bytes(root, membership) == 750_000


def test_the_older_kind_of_cgroup_is_understood(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(root / "memory" / "job", memory__limit_in_bytes="500000", memory__usage_in_bytes="600000")
    membership = tmp_path / "membership"
    membership.write_text("5:cpu:/job\n4:memory:/job\n0::/\n")
    assert free_memory_bytes(root, membership) == 0


def test_without_cgroups_the_machine_s_free_memory_counts(tmp_path: Path) -> None:
    free = free_memory_bytes(tmp_path, tmp_path / "none")
    assert 0.5 < free / psutil.virtual_memory().available < 2
