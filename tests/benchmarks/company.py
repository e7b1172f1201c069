"""Whether a measurement was alone on the machine: processor time that went to neither it nor what it started."""

import os
import time
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE_FIELDS = (3, 4)
"""idle and iowait, in the first line of /proc/stat."""
_GUEST_FIELDS = 8
"""Fields from here on are counted in the first ones already."""


class Company:
    """Counts from its making on."""

    def __init__(self) -> None:
        self._begun_s = time.perf_counter()
        self._before_s = _machine_cpu_s() - own_cpu_s()

    def cores(self) -> float:
        """Return how many cores others have kept busy since, on average; never below zero."""
        others_s = _machine_cpu_s() - own_cpu_s() - self._before_s
        return max(0.0, others_s / (time.perf_counter() - self._begun_s))


def _machine_cpu_s() -> float:
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]][:_GUEST_FIELDS]
    return (sum(fields) - sum(fields[index] for index in _IDLE_FIELDS)) / _TICKS_PER_S


def own_cpu_s() -> float:
    """Return what this process and all below it have taken, those included that ended and were waited for."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))
    return sum(ticks[pid] for pid in ticks if _is_below(pid, os.getpid(), parents)) / _TICKS_PER_S


def _is_below(pid: int, top: int, parents: dict[int, int]) -> bool:
    while pid not in {0, top}:
        pid = parents.get(pid, 0)
    return pid == top
