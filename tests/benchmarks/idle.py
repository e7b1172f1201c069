"""The system with nothing to do: what each of its processes takes of a core.

Run from the root of the project, on a machine that does nothing else:
``python -m tests.benchmarks.idle [--seconds 30] [--port 8140]``. Ends with 1 if all of them together take 2 % or more.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from tests.benchmarks.machine import describe

TARGET_PERCENT = 2.0
SETTLING_S = 8.0
STOPPING_S = 30.0


def family(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += family(int(child))
    return found


def on_cpu_s(pid: int) -> float:
    """Return the seconds that all threads of a process have run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def name_of(pid: int) -> str:
    """Return the last words of a command line."""
    return " ".join(Path(f"/proc/{pid}/cmdline").read_text().split("\0")).strip()[-40:]


def measure(up: "subprocess.Popen[str]", seconds: float) -> float:
    """Print what each process takes, and return the percentage of all together."""
    for line in up.stdout or ():
        if line.startswith("ready "):
            break
    else:
        raise SystemExit("it did not become ready")
    time.sleep(SETTLING_S)
    before = {pid: on_cpu_s(pid) for pid in family(up.pid)}
    begun = time.perf_counter()
    time.sleep(seconds)
    wall_s = time.perf_counter() - begun
    percents = {pid: (on_cpu_s(pid) - taken) / wall_s * 100 for pid, taken in before.items()}
    for pid, percent in percents.items():
        print(f"{name_of(pid):>42} {percent:6.2f} %")
    return sum(percents.values())


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--port", type=int, default=8140)
    given = parser.parse_args()
    print(describe())
    command = (sys.executable, "-m", "services.cli", "up", "--port", str(given.port))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
        try:
            percent = measure(up, given.seconds)
        finally:
            up.terminate()
            up.wait(STOPPING_S)
    print(f"{'all':>42} {percent:6.2f} % of a core (target: below {TARGET_PERCENT} %)")
    return int(percent >= TARGET_PERCENT)


if __name__ == "__main__":
    raise SystemExit(main())
