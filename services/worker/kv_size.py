"""How many positions the KV pool gets."""

from pathlib import Path

import psutil

from shared.errors import StartupError

BLOCK_TOKENS = 16
DEFAULT_KV_TOKENS = 64 * 2048
"""At most so many positions unless more are asked for: 64 sequences of 2,048."""
_FREE_SHARE = 0.3
_CGROUP_V2 = ("memory.max", "memory.current")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def kv_blocks(kv_tokens: int | None, *, bytes_per_token: int, free_bytes: int, sharers: int) -> int:
    """Return the blocks of the pool. Raises StartupError if not even one fits, or what was asked for does not.

    Free memory is divided by the workers that share it, who all take their part at about the same time.
    Without a wish: 30 % of that, at most 131,072 positions.
    """
    mine_bytes = free_bytes // sharers
    if kv_tokens is None:
        tokens = min(int(mine_bytes * _FREE_SHARE) // bytes_per_token, DEFAULT_KV_TOKENS)
    else:
        tokens = kv_tokens
        if tokens * bytes_per_token > mine_bytes:
            shared = f" for each of {sharers} workers" if sharers > 1 else ""
            raise StartupError(
                f"--kv-tokens {tokens:,} needs {tokens * bytes_per_token / 1e9:.1f} GB of memory, "
                f"but only {mine_bytes / 1e9:.1f} GB are free{shared}"
            )
    if tokens < BLOCK_TOKENS:
        raise StartupError(
            f"a KV pool of {tokens} positions is too small: at least {BLOCK_TOKENS} are needed, "
            f"{bytes_per_token:,} bytes each ({free_bytes / 1e9:.1f} GB of memory are free)"
        )
    return tokens // BLOCK_TOKENS


def free_memory_bytes(root: Path = _CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the memory this process may still take: what the machine has free, within every limit of its cgroups."""
    limits = [_left_in(folder) for folder in _cgroup_folders(root, membership)]
    return min([int(psutil.virtual_memory().available), *(left for left in limits if left is not None)])


def _cgroup_folders(root: Path, membership: Path) -> list[Path]:
    """Return the memory cgroups this process is in, innermost first, with all their parents."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []  # no cgroups here, so no limit
    folders: list[Path] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top = root
        elif "memory" in controllers.split(","):
            top = root / "memory"
        else:
            continue
        inner = top / path.lstrip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    return folders


def _left_in(folder: Path) -> int | None:
    for limit_name, usage_name in (_CGROUP_V2, _CGROUP_V1):
        try:
            limit = (folder / limit_name).read_text().strip()
            usage = int((folder / usage_name).read_text())
        except OSError:
            continue
        if limit != "max":
            return max(int(limit) - usage + _reclaimable(folder), 0)
    return None


def _reclaimable(folder: Path) -> int:
    """Return the cached file pages that count as used but are given back on demand."""
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
