"""A folder for one process and what it starts; what a killed one left is removed by the next that makes one.

The owner holds a lock on a file in its folder for as long as it lives, however it ends: the system gives it up.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_PREFIX = "slipstream-"
_OWNER = "owner.lock"


@contextmanager
def private_folder() -> Iterator[Path]:
    """Give a folder that only this user may enter, and remove it at the end. Raises OSError if there is no place."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _remove_orphans(folder.parent)
        # locked before it has its name: nobody may find a lock file that is not held by a living owner
        unnamed = folder / "unnamed"
        with unnamed.open("wb") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            unnamed.rename(folder / _OWNER)
            yield folder


def _remove_orphans(parent: Path) -> None:
    for lock in parent.glob(f"{_PREFIX}*/{_OWNER}"):
        with suppress(OSError), ExitStack() as held:  # its owner lives or has just removed it, or it is another user's
            _take(held.enter_context(lock.open("rb")))
            shutil.rmtree(lock.parent, ignore_errors=True)


def _take(lock: BinaryIO) -> None:
    if os.fstat(lock.fileno()).st_uid != os.getuid():
        raise PermissionError("not ours")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
