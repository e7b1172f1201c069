"""The system without its model: output tokens per second over HTTP, and the processor time of each part per token.

Run from the root of the project, on a machine that does nothing else:
``python -m tests.benchmarks.control_plane [--streams 256] [--rounds 3] [--up "--plan-depth 3"] ...``.

It starts ``slipstream up --executor fake``, whose worker takes next to no time for a step, and asks for all streams at
once by a client that only counts. What each part takes is read from the system: user and system time of its process,
all threads. The client's own is counted apart, as the reader; it runs on the same cores. A short wave goes before, and
the whole of each wave counts, prompts and ends included. Ends within ``--minutes``.

``--profile PY_SPY``, the executable of an environment of its own, adds a wave that counts for nothing else, samples
gateway and scheduler meanwhile, and tells where their time goes.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.benchmarks.company import Company
from tests.benchmarks.machine import describe
from tests.benchmarks.peer_systems import model_of
from tests.benchmarks.profiles import recording, table
from tests.benchmarks.sessions import LeftOut, TimeLeft
from tests.benchmarks.streams import Asked, Server, Wave, wave
from tests.integration.processes import Up, slipstream_up

PARTS = {"gateway": "gateway", "scheduler": "scheduler", "worker": "worker", "valkey": "valkey-server"}
"""The parts, and the words by which their processes are found."""
PROFILED = ("gateway", "scheduler")
READER = "reader"
IDS = range(32, 127)
WARM_TOKENS = 16
READY_S = 60.0
WAVE_S = 120.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Taken:
    """One wave: its rate, its pace, and the processor seconds of each part."""

    tokens: int
    wall_s: float
    gap_ms: float
    first_ms: float
    cpu_s: Mapping[str, float]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens by wall time."""
        return self.tokens / self.wall_s


def cpu_s(pid: int) -> float:
    """Return the user and system time that a process has taken, in whole ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def all_cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    """Return the same for each part."""
    return {name: cpu_s(pid) for name, pid in pids.items()}


def taken(server: Server, pids: Mapping[str, int], asked: Asked, streams: int, within_s: float) -> Taken:
    """Measure one wave."""
    before = all_cpu_s(pids)
    measured: Wave = asyncio.run(wave(server, asked, streams, within_s=within_s))
    spent = {name: after - before[name] for name, after in all_cpu_s(pids).items()}
    return Taken(
        sum(answer.tokens for answer in measured.answers),
        measured.wall_s,
        measured.gap_ms,
        measured.first_ms,
        spent | {READER: measured.client_cpu_s},
    )


def waves(up: Up, given: argparse.Namespace, left: TimeLeft) -> list[Taken]:
    """Measure as many waves as were asked for, or as there is time for."""
    host, port = up.until_ready(within_s=left.at_most(READY_S)).address
    server = Server(host, port, model_of(host, port))
    pids = {name: up.part(word) for name, word in PARTS.items()}
    taken(server, pids, Asked(given.prompt_tokens, WARM_TOKENS, IDS), given.streams, left.at_most(WAVE_S))
    found: list[Taken] = []
    for _ in range(given.rounds):
        asked = Asked(given.prompt_tokens, given.output_tokens, IDS)
        try:
            found.append(taken(server, pids, asked, given.streams, left.at_most(WAVE_S)))
        except (LeftOut, TimeoutError) as error:
            print(f"left out: {given.rounds - len(found)} of {given.rounds} rounds ({str(error) or 'not in time'})")
            break
    return found


def profile(up: Up, given: argparse.Namespace, left: TimeLeft, folder: Path) -> None:
    """Sample one more wave, and print where the time of each part goes."""
    host, port = up.address
    server, asked = Server(host, port, model_of(host, port)), Asked(given.prompt_tokens, given.output_tokens, IDS)
    with recording(given.profile, {name: up.part(PARTS[name]) for name in PROFILED}, folder) as seen:
        asyncio.run(wave(server, asked, given.streams, within_s=left.at_most(WAVE_S)))
    for name, samples in seen.items():
        print(f"\n{table(name, samples)}")


def show(found: list[Taken]) -> None:
    """Print medians."""
    rate = statistics.median(one.tokens_per_s for one in found)
    print(f"{rate:,.0f} tok/s, rounds: {', '.join(f'{one.tokens_per_s:,.0f}' for one in found)}")
    gap_ms = statistics.median(one.gap_ms for one in found)
    first_ms = statistics.median(one.first_ms for one in found)
    print(f"a stream's median gap {gap_ms:.1f} ms, its first token after {first_ms:.0f} ms\n")
    print("| part | µs of processor per token | of one core |\n|---|---|---|")
    for name in (*PARTS, READER):
        print(
            _row(name, [one.cpu_s[name] / one.tokens for one in found], [one.cpu_s[name] / one.wall_s for one in found])
        )
    total_s = [sum(one.cpu_s.values()) for one in found]
    per_token = [spent_s / one.tokens for spent_s, one in zip(total_s, found, strict=True)]
    shares = [spent_s / one.wall_s for spent_s, one in zip(total_s, found, strict=True)]
    print(_row("all", per_token, shares))


def _row(name: str, per_token_s: list[float], shares: list[float]) -> str:
    return f"| {name} | {statistics.median(per_token_s) * 1e6:.1f} | {statistics.median(shares):.0%} |"


def flags() -> argparse.ArgumentParser:
    """Return what can be asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=3.0, help="for all of it")
    parser.add_argument("--up", default="", help='more flags of the server, in one string: --up="--plan-depth 3"')
    parser.add_argument("--profile", type=Path, metavar="PY_SPY", help="sample gateway and scheduler with this py-spy")
    parser.add_argument("--out", type=Path, help="where all rounds are written as JSON")
    return parser


def server_flags(given: argparse.Namespace) -> list[str]:
    """Return what lets all streams run at once: nothing may wait for a place, a block or a second step of prompts."""
    per_stream = given.prompt_tokens + given.output_tokens + 16
    sizes = {
        "--max-num-seqs": given.streams,
        "--max-num-batched-tokens": max(512, 2 * given.streams),
        "--max-queue": 2 * given.streams,
        "--kv-tokens": given.streams * per_stream,
    }
    return [
        "--executor",
        "fake",
        *(word for name, size in sizes.items() for word in (name, str(size))),
        *given.up.split(),
    ]


def main() -> None:
    """Measure, print, write."""
    given = flags().parse_args()
    left = TimeLeft(given.minutes * 60)
    asked = server_flags(given)
    print(f"machine: {describe()}, {os.cpu_count()} processors")
    print(f"server: slipstream up {' '.join(asked)}")
    print(f"asked: {given.streams} streams, prompts of {given.prompt_tokens}, outputs of {given.output_tokens}\n")
    company = Company()
    with tempfile.TemporaryDirectory() as folder, slipstream_up(Path(folder), *asked) as up:
        found = waves(up, given, left)
        print(f"cores that others kept busy meanwhile: {company.cores():.2f}")
        if given.profile:
            profile(up, given, left, Path(folder))
    if not found:
        raise SystemExit("not one round was measured")
    show(found)
    if given.out:
        result = {"machine": describe(), "server": asked, "rounds": [asdict(one) for one in found]}
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
