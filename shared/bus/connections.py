"""Connections to Redis: commands go out together, all answers come back, or the connection is thrown away.

Built on redis-py's connections and not on its client, whose pool, retries and timeouts are not ours: a command is sent
once, one deadline bounds everything from waiting for a connection to the last answer, and `close` moves that deadline.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, NoReturn, Protocol, cast

import hiredis
from redis.asyncio.connection import Connection as TcpConnection
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from shared.errors import BusUnavailable, StartupError

Command = tuple[str | bytes | int, ...]
Answer = Any
"""What the parser made of an answer: bytes, int, None, a list or (RESP3) a dict of them, or a `ResponseError`."""


class Script:
    """A Lua script that lies next to this file."""

    def __init__(self, name: str) -> None:
        self.text = resources.files("shared.bus").joinpath(f"{name}.lua").read_bytes()
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()


class _Connection(Protocol):
    """The part of redis-py's connection that is used here."""

    is_connected: bool

    async def connect(self) -> None: ...
    async def can_read(self) -> bool: ...
    async def disconnect(self, *, nowait: bool = False) -> None: ...
    async def send_packed_command(self, command: Sequence[bytes], *, check_health: bool) -> None: ...
    async def read_response(self) -> Answer: ...


class Connections:
    """At most ``limit`` connections, made when needed and made anew when lost. Every call raises `BusUnavailable`."""

    def __init__(self, url: str, *, limit: int) -> None:
        self._settings = _settings(url)
        self._where = _where(self._settings)
        self._limit = limit
        self._free = asyncio.Semaphore(limit)
        self._idle: list[_Connection] = []
        self._deadlines: set[asyncio.Timeout] = set()
        self._closed = asyncio.Event()
        self._make()  # so that a URL which asks for the impossible is found out at the start

    async def call(self, *commands: Command, within_s: float) -> list[Answer]:
        """Send commands in one piece and return their answers; an error among them is raised after all were read."""
        answers = await self._ask(commands, within_s)
        for command, answer in zip(commands, answers, strict=True):
            if isinstance(answer, ResponseError):
                self._refused(command, answer)
        return answers

    async def run(
        self, script: Script, keys: Sequence[str], args: Sequence[str | bytes | int], within_s: float
    ) -> Answer:
        """Run a script by its hash, or by its text if the server has forgotten it."""
        command: Command = ("EVALSHA", script.sha, len(keys), *keys, *args)
        answer = (await self._ask([command], within_s))[0]
        if isinstance(answer, NoScriptError):
            answer = (await self._ask([("EVAL", script.text, *command[2:])], within_s))[0]
        if isinstance(answer, ResponseError):
            self._refused(command, answer)
        return answer

    async def close(self) -> None:
        """Close everything. Calls under way and calls to come raise `BusUnavailable`."""
        if self._closed.is_set():
            return
        self._closed.set()
        for deadline in [under_way for under_way in self._deadlines if not under_way.expired()]:
            deadline.reschedule(0)
        for _ in range(self._limit):  # until every call under way has ended
            await self._free.acquire()
        while self._idle:
            await self._idle.pop().disconnect()

    async def _ask(self, commands: Sequence[Command], within_s: float) -> list[Answer]:
        if self._closed.is_set():
            raise BusUnavailable("The connection to Redis has been closed")
        deadline = asyncio.timeout(within_s)
        try:
            async with deadline:
                self._deadlines.add(deadline)
                async with self._free:
                    return await self._exchange(commands)
        except TimeoutError as error:
            ending = "the connection has been closed" if self._closed.is_set() else f"no answer within {within_s:g} s"
            raise BusUnavailable(f"Redis at {self._where} is not available: {ending}") from error
        except (RedisError, OSError) as error:
            raise BusUnavailable(f"Redis at {self._where} is not available: {error}") from error
        finally:
            self._deadlines.discard(deadline)

    async def _exchange(self, commands: Sequence[Command]) -> list[Answer]:
        connection = await self._take()
        try:
            if not connection.is_connected:
                await connection.connect()
            await connection.send_packed_command([_pack(command) for command in commands], check_health=False)
            answers = [await _answer(connection) for _ in commands]
        except BaseException:
            # Whatever ended this, cancellation included, may have left half an answer behind.
            await connection.disconnect(nowait=True)
            raise
        self._idle.append(connection)
        return answers

    async def _take(self) -> _Connection:
        """Return an idle connection that the server has not closed meanwhile, else a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_connected and not await connection.can_read():
                return connection
            await connection.disconnect(nowait=True)
        return self._make()

    def _make(self) -> _Connection:
        settings = dict(self._settings)
        kind = settings.pop("connection_class", TcpConnection)
        try:
            return cast(_Connection, kind(**settings, **_OURS, retry=Retry(NoBackoff(), 0)))
        except (TypeError, ValueError, RedisError) as error:
            raise StartupError(f"Cannot use this Redis URL: {error}") from error

    def _refused(self, command: Command, error: ResponseError) -> NoReturn:
        raise BusUnavailable(f"Redis at {self._where} refuses {command[0]!s}: {error}") from error


_OURS: Mapping[str, Any] = {
    "socket_timeout": None,  # the call's own deadline bounds every read and write
    "driver_info": None,  # CLIENT SETINFO is not known to 7.0
}


_pack: Callable[[Command], bytes] = cast(Any, hiredis.pack_command)  # its stub knows tuples of one argument only


async def _answer(connection: _Connection) -> Answer:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


def _settings(url: str) -> Mapping[str, Any]:
    try:
        settings: dict[str, Any] = dict(parse_url(url))
    except ValueError as error:
        raise StartupError(f"Cannot use this Redis URL: {error}") from error
    return {name: value for name, value in settings.items() if name not in _OURS}


def _where(settings: Mapping[str, Any]) -> str:
    """Return the server's address without the password that the URL may carry."""
    path = settings.get("path")
    return str(path) if path else f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"
