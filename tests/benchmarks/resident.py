"""What a worker takes of memory: at its peak while it loads the default model, and in service.

Run from the root of the project: ``python -m tests.benchmarks.resident``. Ends within five minutes. The model may be
fetched and converted first; what that takes is part of the peak of the first start alone. Files that are mapped, as
libraries are, count as resident too: ``private`` leaves them out.
"""

import argparse
import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.machine import describe
from tests.benchmarks.peer_systems import model_of
from tests.benchmarks.streams import Asked, Server, wave
from tests.integration.processes import Up, slipstream_up

WAYS = {"bfloat16": ("--dtype", "bfloat16"), "float32": ("--dtype", "float32"), "int8": ("--weights", "int8")}
READY_S = 120.0
WAVE_S = 120.0
ASKED = Asked(prompt_tokens=128, output_tokens=128)
KV_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Resident:
    """Megabytes of a process."""

    now: float
    private: float
    peak: float


def resident_of(pid: int) -> Resident:
    """Read what the kernel counts."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kilobytes = {
        name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines) if "kB" in value
    }
    return Resident(*(kilobytes[name] / 1000 for name in ("VmRSS", "RssAnon", "VmHWM")))


def measure(up: Up, streams: int) -> tuple[Resident, Resident]:
    """Return a worker's memory after a first answer, with its program in use, and after a wave of streams."""
    host, port = up.until_ready(within_s=READY_S).address
    server = Server(host, port, model_of(host, port))
    asyncio.run(wave(server, ASKED, 1, within_s=WAVE_S))
    loaded = resident_of(up.part("worker"))
    asyncio.run(wave(server, ASKED, streams, within_s=WAVE_S))
    return loaded, resident_of(up.part("worker"))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    given = parser.parse_args()
    print(f"{describe()}; a pool of {KV_TOKENS:,} tokens, {given.streams} streams of 128 + 128 tokens; MB")
    print(
        "| weights | loaded | private | peak until then | in service | private | peak |\n|---|---|---|---|---|---|---|"
    )
    for name, flags in WAYS.items():
        pool = ("--kv-tokens", str(KV_TOKENS))
        with (
            tempfile.TemporaryDirectory() as folder,
            slipstream_up(Path(folder), *flags, *pool, "--compile", "now") as up,
        ):
            figures = measure(up, given.streams)
        cells = (f"{number:,.0f}" for one in figures for number in (one.now, one.private, one.peak))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
