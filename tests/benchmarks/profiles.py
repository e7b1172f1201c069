"""Where the processor time of running Python processes goes, as py-spy samples it: by function and by kind of work.

py-spy comes from an environment of its own, and samples from outside: the processes need nothing for it. What a
function in C takes counts for the Python function that calls it. py-spy leaves idle threads out where the system tells
it which they are; elsewhere they are known by the functions that wait, whose own little time is left out with them.
"""

import signal
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

RATE_HZ = 200
WRITTEN_WITHIN_S = 30.0
FUNCTIONS_SHOWN = 12

GROUPS: Mapping[str, tuple[str, ...]] = {
    "socket send": (
        "write (asyncio/selector_events",
        "_write_",
        "writelines (asyncio",
        "send (asyncio/selector_events",
    ),
    "JSON and SSE": (
        "gateway/formats.py",
        "gateway/logprob_formats.py",
        "gateway/sse.py",
        "aiohttp_sse/",
        "http_writer",
    ),
    "msgpack": ("protocol/codec.py", "msgpack/"),
    "redis protocol": ("redis/", "bus/connections.py", "bus/redis_bus.py"),
}
"""Kinds of work, and what the frames of one contain. The innermost frame that is of any kind decides."""
LOOP, OTHER = "asyncio loop", "other"
WAITING = (
    "select (selectors.py",
    "_worker (concurrent/futures/thread.py",
    "_serve (shared/runtime/threads.py",
    "wait (threading.py",
    "get (queue.py",
)
"""What the innermost frames of threads contain that have nothing to do."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A stack from the outermost call to the innermost, and how often it was seen."""

    frames: tuple[str, ...]
    count: int

    @property
    def function(self) -> str:
        """The innermost function, which the time is its own of."""
        return self.frames[-1]

    @property
    def is_waiting(self) -> bool:
        """Whether the thread had nothing to do, as far as its function tells."""
        return any(mark in self.function for mark in WAITING)

    @property
    def group(self) -> str:
        """The kind of work."""
        for frame in reversed(self.frames):
            for group, marks in GROUPS.items():
                if any(mark in frame for mark in marks):
                    return group
        return LOOP if "(asyncio/" in self.function else OTHER


def read_raw(text: str) -> list[Sample]:
    """Read py-spy's raw format: ``function (file:line);…;function (file:line) count``. Lines are left out of frames.

    Raises ValueError for anything else.
    """
    return [_sample(line) for line in text.splitlines() if line]


def _sample(line: str) -> Sample:
    stack, _, count = line.rpartition(" ")
    if not stack or not count.isdecimal():
        raise ValueError(f"not a stack and its count: {line!r}")
    return Sample(tuple(map(_without_line, stack.split(";"))), int(count))


def _without_line(frame: str) -> str:
    place, _, line = frame.rpartition(":")
    return f"{place})" if line.removesuffix(")").isdecimal() else frame


def shares(names: Iterable[tuple[str, int]]) -> list[tuple[str, float]]:
    """Return each name's share of all that was counted, largest first."""
    counts: Counter[str] = Counter()
    for name, count in names:
        counts[name] += count
    total = counts.total()
    return [(name, count / total) for name, count in counts.most_common()]


def table(part: str, samples: Sequence[Sample]) -> str:
    """Return the shares of kinds of work, and of the functions that take most themselves; who waits is left out."""
    working = [one for one in samples if not one.is_waiting]
    groups = shares((one.group, one.count) for one in working)
    functions = shares((one.function, one.count) for one in working)[:FUNCTIONS_SHOWN]
    counted = sum(one.count for one in working)
    idle = sum(one.count for one in samples) - counted
    lines = [f"{part}: {counted:,} samples, and {idle:,} of threads that wait", "| | of its time |\n|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {share:.1%} |" for name, share in [*groups, *functions])])


@contextmanager
def recording(py_spy: Path, pids: Mapping[str, int], folder: Path) -> Iterator[dict[str, list[Sample]]]:
    """Sample processes while the block runs; what was seen of each is there when it has ended.

    Raises TimeoutExpired if py-spy writes nothing in time, CalledProcessError if it cannot sample.
    """
    seen: dict[str, list[Sample]] = {}
    with ExitStack() as running:
        begun = {name: running.enter_context(_sampling(py_spy, pid, folder / name)) for name, pid in pids.items()}
        yield seen
        for process in begun.values():
            process.send_signal(signal.SIGINT)
        for name, process in begun.items():
            process.communicate(timeout=WRITTEN_WITHIN_S)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args)
            seen[name] = read_raw((folder / name).read_text())


@contextmanager
def _sampling(py_spy: Path, pid: int, out: Path) -> Iterator[subprocess.Popen[str]]:
    command = [
        str(py_spy), "record", "--pid", str(pid), "--format", "raw", "--function", "--rate", str(RATE_HZ),
        "--output", str(out),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
