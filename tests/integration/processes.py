"""Processes as tests see them: by a mark in their environment, and gone when the system says so."""

import os
import select
import signal
from pathlib import Path


def marked_with(mark: str) -> set[int]:
    """Return the ids of all processes whose environment holds the mark: children inherit it, the dead have none."""
    found = set()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environment.read_bytes():
                found.add(int(environment.parent.name))
        except OSError:  # it ended while we looked, or is not ours
            continue
    return found


def is_gone(pid: int, *, within_s: float) -> bool:
    """Wait for a process to end, without polling; False if it still runs after that time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


def all_gone(mark: str, *, within_s: float = 10.0) -> bool:
    """Tell whether no marked process is left after that time; those that are left are killed, for the next test."""
    left = [pid for pid in marked_with(mark) if not is_gone(pid, within_s=within_s)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left
