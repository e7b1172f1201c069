"""The address of the gateway, seen from the one who starts it: is it free, does it answer."""

import asyncio
import errno
import socket

from shared.errors import StartupError

_ANSWER_S = 2.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - recognised here, not listened on


def choose_port(host: str, port: int) -> int:
    """Return the port if it is free, any free one for 0. Raises `StartupError` if nobody could listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as the gateway does: old connections may linger
            probe.bind(address)
            chosen: int = probe.getsockname()[1]
            return chosen
    except OSError as error:
        raise StartupError(_why_not(error, host, port)) from error
    except UnicodeError as error:  # a label is empty or too long: the resolver was not even asked
        raise StartupError(f"cannot listen on {host} port {port}: no host can have that name") from error


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is already taken (--port names another, 0 any free one)"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} may not be used by this user (--port names another)"
    return f"cannot listen on {host} port {port}: {error.strerror}"


def url_of(host: str, port: int) -> str:
    """Return the URL of an address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def is_ready(host: str, port: int) -> bool:
    """Ask ``GET /ready`` once; True if the answer is 200, False for any other and for none within two seconds."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(_ANY.get(host, host), port)
            try:
                writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return (await reader.readline()).split()[1:2] == [b"200"]
            finally:
                writer.close()
    except OSError:  # nobody listens yet; TimeoutError is one of them
        return False
