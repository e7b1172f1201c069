"""The system with nothing to do: what each of its processes takes of a core.

Run from the root of the project, on a machine that does nothing else: ``python -m tests.benchmarks.idle``. It starts
``slipstream up`` with the default model and lets it settle. What a process takes is read from the scheduler of the
kernel, in nanoseconds, all threads. Ends within ``--seconds`` and two minutes, with 1 if all take 2 % or more.
"""

import argparse
import tempfile
import time
from pathlib import Path

from tests.benchmarks.control_plane import PARTS
from tests.benchmarks.machine import describe
from tests.integration.processes import Up, slipstream_up

TARGET = 0.02
READY_S = 100.0
"""The model may have to be made first."""
SETTLING_S = 8.0


def on_cpu_s(pid: int) -> float:
    """Return the seconds that all threads of a process have run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def shares(up: Up, seconds: float) -> dict[str, float]:
    """Return what each process takes of a core while nothing is asked."""
    up.until_ready(within_s=READY_S)
    time.sleep(SETTLING_S)
    pids = {"up": up.process.pid} | {name: up.part(word) for name, word in PARTS.items()}
    before = {name: on_cpu_s(pid) for name, pid in pids.items()}
    begun = time.perf_counter()
    time.sleep(seconds)
    wall_s = time.perf_counter() - begun
    return {name: (on_cpu_s(pid) - before[name]) / wall_s for name, pid in pids.items()}


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory() as folder, slipstream_up(Path(folder)) as up:
        found = shares(up, given.seconds)
    print("| part | of one core |\n|---|---|")
    for name, share in (found | {"all": sum(found.values())}).items():
        print(f"| {name} | {share:.2%} |")
    return int(sum(found.values()) >= TARGET)


if __name__ == "__main__":
    raise SystemExit(main())
