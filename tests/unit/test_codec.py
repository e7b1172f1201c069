from collections.abc import Callable
from typing import Annotated, Any, Literal, NewType, get_args, get_origin

import msgpack
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.errors import ProtocolError
from shared.ids import EntryId, GatewayId, RequestId
from shared.protocol import codec
from shared.protocol.codec import MAX_MESSAGE_BYTES, decode, decode_as, encode
from shared.protocol.messages import CancelRequest, Message, StepFailed, SubmitRequest, TokenizerFiles

SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(),
    bytes: st.binary(),
    bool: st.booleans(),
    type(None): st.none(),
}


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for a type that a message may hold."""
    if isinstance(kind, NewType):
        return any_of(kind.__supertype__)
    if kind in SCALARS:
        return SCALARS[kind]
    if get_origin(kind) is Annotated:
        return any_within(*get_args(kind))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, *(any_of(field.type) for field in msgspec.structs.fields(kind)))
    return any_generic(get_origin(kind), get_args(kind))


def any_within(kind: Any, meta: msgspec.Meta) -> st.SearchStrategy[Any]:
    if meta.pattern is not None:
        return st.from_regex(meta.pattern, fullmatch=True, alphabet="0123456789-")
    if kind is int:
        return st.integers(int(meta.ge or 0), 2**64 - 1)
    if kind is bytes:
        return st.binary(min_size=meta.min_length or 0, max_size=meta.max_length)
    return any_of(kind).filter(lambda items: len(items) >= (meta.min_length or 0))


def any_generic(origin: Any, args: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(any_of(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(any_of(args[0]), any_of(args[1]), max_size=3)
    return st.one_of(*map(any_of, args))


@settings(deadline=None)
@given(any_of(Message))
@example(CancelRequest(RequestId("ré-模型-🙂"), 1))
def test_every_message_comes_out_as_it_went_in(message: Message) -> None:
    assert decode(encode(message)) == message


@settings(deadline=None)
@given(any_of(Message))
def test_a_message_is_read_as_its_own_kind_and_no_other(message: Message) -> None:
    data = encode(message)
    assert decode_as(type(message), data) == message
    other = CancelRequest if not isinstance(message, CancelRequest) else SubmitRequest
    with pytest.raises(ProtocolError, match=f"expected {other.__name__}, got {type(message).__name__}"):
        decode_as(other, data)


@settings(deadline=None)
@given(st.binary())
@example(b"")
@example(b"\xc1")
@example(b"\x91" * 5000)
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xd6\xff\x00\x00\x00\x00")
@example(msgpack.packb(["cancel/1", "r", 1]) + b"\x00")
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@settings(deadline=None)
@given(any_of(Message), st.data())
def test_half_a_message_is_a_protocol_error(message: Message, draw: st.DataObject) -> None:
    data = encode(message)
    with pytest.raises(ProtocolError):
        decode(data[: draw.draw(st.integers(0, len(data) - 1))])


def test_an_extra_field_is_ignored() -> None:
    assert decode(msgpack.packb(["cancel/1", "r", 1, "from the future"])) == CancelRequest(RequestId("r"), 1)


def test_a_missing_field_has_its_default() -> None:
    decoded = decode(msgpack.packb(["submit/1", "r", 0, "g", [5], 7]))
    assert isinstance(decoded, SubmitRequest)
    assert decoded.output_ids == ()
    assert decoded.sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        (["cancel/1", "r", "one"], r"Expected `int`, got `str` - at `\$\[2\]`"),
        (["cancel/1", "r"], "at least length 3"),
        (["cancel/1", b"r", 1], r"Expected `str`, got `bytes`"),
        (["submit/1", "r", 0, "g", [5, "x"], 7], r"\$\[4\]\[1\]"),
        (["submit/1", "r", 0, "g", [5], 7.5], r"\$\[5\]"),
        (["step-failed/1", 1, 2, None], r"\$\[3\]"),
        (["cancel/2", "r", 1], r"Invalid value 'cancel/2' - at `\$\[0\]`"),
        ([5, "r", 1], r"\$\[0\]"),
        ([], "at least length 1"),
        ({"request": "r"}, "Expected `array`, got `object`"),
        (None, "got `null`"),
        (msgpack.Timestamp(0), "Expected `array`"),
    ],
)
def test_a_wrong_type_or_an_unknown_tag_is_named(plain: object, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        decode(msgpack.packb(plain))


@pytest.mark.parametrize("key", [1, None, 1.5])
def test_keys_of_maps_are_strings(key: object) -> None:
    data = msgpack.packb(["tokenizer/1", b"{}", None, [], {key: "<s>"}])
    with pytest.raises(ProtocolError, match="not allowed for map key"):
        decode(data)


def test_bytes_that_are_not_utf_8_are_no_text() -> None:
    with pytest.raises(ProtocolError, match="not MessagePack"):
        decode(b"\x93\xa8cancel/1\xa1\xff\x01")


def larger_by(extra_bytes: int) -> TokenizerFiles:
    """Return a message that is this much larger than the largest allowed."""
    empty = len(encode(TokenizerFiles(b"x" * 2**16, None, (), {}))) - 2**16
    return TokenizerFiles(b"x" * (MAX_MESSAGE_BYTES - empty + extra_bytes), None, (), {})


def test_the_largest_message_passes() -> None:
    largest = larger_by(0)
    data = encode(largest)
    assert len(data) == MAX_MESSAGE_BYTES
    assert decode(data) == largest


def test_a_message_too_large_is_neither_written_nor_read() -> None:
    with pytest.raises(ProtocolError, match=r"TokenizerFiles of 67,108,865 bytes exceeds 67,108,864"):
        encode(larger_by(1))
    with pytest.raises(ProtocolError, match=r"67,108,865 bytes exceeds"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("read", [decode, lambda data: decode_as(StepFailed, data)])
def test_what_cannot_be_read_is_refused_however_it_is_asked_for(read: Callable[[bytes], object]) -> None:
    with pytest.raises(ProtocolError):
        read(b"\x93\xadno such thing")


def test_the_limit_leaves_room_for_the_largest_snapshot() -> None:
    assert codec.MAX_MESSAGE_BYTES > 256 * 32_768 * 5


def test_a_number_of_more_than_64_bits_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="64 bits"):
        encode(CancelRequest(RequestId("r"), 2**64))


@pytest.mark.parametrize("place", ["x", "1", "1-", "-1", "1-2-3", "1-x"])
def test_an_entry_id_that_is_none_is_found_when_it_is_read(place: str) -> None:
    submit = SubmitRequest(RequestId("r"), 2, GatewayId("g"), (1,), 1, arrival=EntryId(place))
    with pytest.raises(ProtocolError):
        decode(encode(submit))
