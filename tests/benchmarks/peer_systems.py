"""The systems that are compared, each started, measured and ended alone: ours, peers over HTTP, peers in process."""

import asyncio
import http.client
import importlib.metadata
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.peer_figures import OURS, EngineFigure, Figure, read_engine
from tests.benchmarks.sessions import LeftOut, Session, TimeLeft, session, tail_of
from tests.benchmarks.streams import Asked, BadAnswer, Server, Wave, wave
from tests.integration.processes import slipstream_up

WARM_TOKENS = 16
_OURS_READY_S = 120.0
_PEER_READY_S = 300.0
_ENGINE_S = 400.0
_WAVE_S = 180.0
_ASK_S = 5.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Peers:
    """Where the peers are: `scripts` holds the programs `serve` and `engine`, `home` what those run."""

    scripts: Path
    home: Path

    def command(self, program: str, *arguments: str) -> list[str]:
        """Return a command line."""
        return [str(self.scripts / program), *arguments]

    @property
    def variables(self) -> Mapping[str, str]:
        """What they must find in their environment."""
        return {"PEERS_HOME": str(self.home)}

    def version(self, name: str, package: str) -> str:
        """Return a package and its version, as it is installed for a peer."""
        folders = [str(folder) for folder in self.home.glob(f"{name}/lib/python3*/site-packages")]
        found = importlib.metadata.distributions(name=package, path=folders)
        return f"{package} {next((one.version for one in found), 'is not installed')}"


@dataclass(frozen=True, slots=True)
class Run:
    """What is measured in one start of a system."""

    peer: str
    round: int
    streams: Sequence[int]
    asked: Asked
    waves: int
    time: TimeLeft
    leave_out: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ours:
    """``slipstream up`` with the default model."""

    flags: Sequence[str] = ()
    settle_s: float = 0.0
    """How long code that is compiled aside gets to take over."""

    def measure(self, run: Run) -> Iterator[Figure]:
        """Yield a figure for each number of streams."""
        with tempfile.TemporaryDirectory() as folder, slipstream_up(Path(folder), *self.flags) as up:
            try:
                host, port = up.until_ready(within_s=run.time.at_most(_OURS_READY_S)).address
            except AssertionError as error:
                raise LeftOut(f"ours does not get ready: {tail_of(str(error))}") from error
            time.sleep(run.time.at_most(self.settle_s))
            yield from _served(OURS, Server(host, port, model_of(host, port)), run)


@dataclass(frozen=True, slots=True)
class ServedPeer:
    """A peer that speaks OpenAI's API."""

    peers: Peers
    name: str

    def measure(self, run: Run) -> Iterator[Figure]:
        """Yield a figure for each number of streams."""
        port = _free_port()
        with _logged(self.peers, self.peers.command("serve", self.name, str(port))) as running:
            _wait_until_served(running, port, run.time.at_most(_PEER_READY_S))
            yield from _served(self.name, Server("127.0.0.1", port, model_of("127.0.0.1", port)), run)


@dataclass(frozen=True, slots=True)
class EnginePeer:
    """A peer in process, without HTTP. `own_tokens`: its outputs' length, where it is not ours to choose."""

    peers: Peers
    name: str
    own_tokens: int

    def measure(self, run: Run) -> Iterator[Figure]:
        """Yield its figures for each number of streams; what it said before it was stopped counts."""
        command = self.peers.command("engine", self.name, *map(str, run.streams))
        with _logged(self.peers, command) as running:
            status = _status_of(running.process, run.time.at_most(_ENGINE_S))
            found = read_engine(running.output)
            if status != 0:
                run.leave_out(f"the rest of {self.name}, {_ended(status)}: {running.tail}")
        for one in found:
            if one.streams in run.streams:
                yield self._figure(one, run)

    def _figure(self, one: EngineFigure, run: Run) -> Figure:
        tokens_per_s = one.at(self.own_tokens, run.asked.output_tokens)
        system = self.name if one.system == self.name else f"{self.name} {one.system}"
        return Figure(run.peer, system, run.round, one.streams, tokens_per_s, one.step_ms)


@contextmanager
def _logged(peers: Peers, command: Sequence[str]) -> Iterator[Session]:
    with tempfile.TemporaryDirectory() as folder, session(command, peers.variables, Path(folder) / "log") as running:
        yield running


def _status_of(process: "subprocess.Popen[bytes]", within_s: float) -> int | None:
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        return None


def _ended(status: int | None) -> str:
    return "out of time" if status is None else f"ended with status {status}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _wait_until_served(running: Session, port: int, within_s: float) -> None:
    """Ask until models are listed. Raises `LeftOut`."""
    until_s = time.perf_counter() + within_s
    while time.perf_counter() < until_s:
        status = running.process.poll()
        if status is not None:
            raise LeftOut(f"it {_ended(status)}: {running.tail}")
        try:
            model_of("127.0.0.1", port)
        except (OSError, LeftOut, http.client.HTTPException):
            time.sleep(_LOOK_S)
        else:
            return
    raise LeftOut(f"it does not serve after {within_s:.0f} s: {running.tail}")


def model_of(host: str, port: int) -> str:
    """Return the first model that a server lists. Raises `LeftOut`, OSError, HTTPException."""
    connection = http.client.HTTPConnection(host, port, timeout=_ASK_S)
    try:
        connection.request("GET", "/v1/models")
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise LeftOut(f"/v1/models answers {response.status}: {body[:200]!r}")
    return str(json.loads(body)["data"][0]["id"])


def _served(system: str, server: Server, run: Run) -> Iterator[Figure]:
    """Yield a figure for each wave, all waves of one number of streams after a short one that warms up."""
    for streams in run.streams:
        try:
            asyncio.run(_wave(server, Asked(run.asked.prompt_tokens, WARM_TOKENS), streams, run.time))
            taken = [asyncio.run(_wave(server, run.asked, streams, run.time)) for _ in range(run.waves)]
        except (LeftOut, BadAnswer, TimeoutError) as error:
            why = str(error) or "not finished in time"
            run.leave_out(f"{system} at {streams} streams (round {run.round}, beside {run.peer}): {why}")
            continue
        yield _figure(system, streams, run, sorted(taken, key=lambda one: one.tokens_per_s)[len(taken) // 2])


async def _wave(server: Server, asked: Asked, streams: int, left: TimeLeft) -> Wave:
    return await wave(server, asked, streams, within_s=left.at_most(_WAVE_S))


def _figure(system: str, streams: int, run: Run, middle: Wave) -> Figure:
    return Figure(
        run.peer,
        system,
        run.round,
        streams,
        middle.tokens_per_s,
        middle.gap_ms,
        middle.per_token_ms,
        middle.first_ms,
        middle.client_cpu_s / middle.wall_s,
    )
