"""What the machine is, and how fast it reads memory: measured in the same run as what is compared with it."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

_READ_MB = 256


def describe() -> str:
    """Return the machine, torch and its threads in one line."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
        name += "".join(f" {feature}" for feature in ("avx2", "avx512_bf16", "amx_bf16") if feature in " ".join(lines))
    except OSError:
        name = platform.processor() or platform.machine()
    return f"{name}, torch {torch.__version__} on {torch.get_num_threads()} threads"


class Reading:
    """Reads much more memory than caches hold; what it takes is the limit of all that streams weights or keys."""

    def __init__(self) -> None:
        self._numbers = torch.ones(_READ_MB * 1024 * 1024 // 4)
        self.bytes = self._numbers.numel() * 4

    def __call__(self) -> None:
        """Read all of it once."""
        self._numbers.sum()


def medians_s(cases: Mapping[str, Callable[[], object]], *, rounds: int, seconds: float) -> dict[str, float]:
    """Return each case's median time, all of them taken in turn so that a busy machine slows all alike.

    Ends after ``rounds``, or with the round in which ``seconds`` have gone by.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for run in cases.values():
        run()
    begun = time.perf_counter()
    for _ in range(rounds):
        for name, run in cases.items():
            before = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - before)
        if time.perf_counter() - begun > seconds:
            break
    return {name: statistics.median(taken) for name, taken in times.items()}
