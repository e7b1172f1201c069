"""Bytes of messages: MessagePack with size limits, and a schema check on top."""

from typing import TypeVar

import msgpack
import msgspec

from shared.errors import ProtocolError
from shared.protocol.messages import Message

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Larger than the largest legal snapshot: 256 residents of 32,768 tokens at five bytes each are 42 MB,
with the largest grammar each another 17 MB.
"""

_M = TypeVar("_M")


def encode(message: Message) -> bytes:
    """Return the message as MessagePack. Raises ProtocolError if no reader would take it."""
    try:
        data: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))
    except OverflowError as error:
        raise ProtocolError(f"a {type(message).__name__} holds a number of more than 64 bits") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a {type(message).__name__} of {len(data):,} bytes exceeds {MAX_MESSAGE_BYTES:,}")
    return data


def decode(data: bytes) -> Message:
    """Return the message that the bytes hold. Raises ProtocolError: too large, not MessagePack, unknown tag or type."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data):,} bytes exceeds {MAX_MESSAGE_BYTES:,}")
    try:
        plain = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolError(f"not MessagePack: {error}") from error
    try:
        message: Message = msgspec.convert(plain, type=Message)
    except msgspec.ValidationError as error:
        raise ProtocolError(str(error)) from error
    return message


def decode_as(kind: type[_M], data: bytes) -> _M:
    """Return the message, which must be of this kind. Raises ProtocolError as `decode` does, or for another kind."""
    message = decode(data)
    if not isinstance(message, kind):
        raise ProtocolError(f"expected {kind.__name__}, got {type(message).__name__}")
    return message
