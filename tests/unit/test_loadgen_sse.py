import random
from itertools import pairwise

import pytest

from loadgen.sse import EventParser, EventTooLong

STREAM = (
    b": a comment\n\n"
    b'data: {"text":"caf\xc3\xa9 \xf0\x9f\x9a\x80"}\n\n'
    b"event: message\r\nid: 3\r\ndata:no space\r\n\r\n"
    b"data: two\rdata: lines\r\r"
    b"\n\n"
    b"data:\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = ['{"text":"café 🚀"}'.encode(), b"no space", b"two\nlines", b"", b"[DONE]"]


def parse(*pieces: bytes) -> list[bytes]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_events_are_read_with_every_kind_of_line_end_comment_and_field() -> None:
    assert parse(STREAM) == EVENTS


def test_events_are_the_same_wherever_the_network_cuts_them_once() -> None:
    for cut in range(len(STREAM) + 1):
        assert parse(STREAM[:cut], STREAM[cut:]) == EVENTS, cut


def test_events_are_the_same_byte_by_byte_so_that_a_character_may_come_in_halves() -> None:
    assert parse(*(bytes([byte]) for byte in STREAM)) == EVENTS


def test_events_are_the_same_in_pieces_of_any_size() -> None:
    source = random.Random(8)
    for _ in range(300):
        cuts = sorted(source.choices(range(len(STREAM) + 1), k=source.randrange(1, 30)))
        edges = [0, *cuts, len(STREAM)]
        assert parse(*(STREAM[a:b] for a, b in pairwise(edges))) == EVENTS, cuts


def test_an_event_is_given_with_the_piece_that_completes_it_and_not_later() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\n") == [b"a"]
    assert parser.feed(b"data: b\n\ndata: c") == [b"b"]


def test_a_byte_order_mark_before_the_first_line_is_skipped() -> None:
    assert parse(b"\xef\xbb", b"\xbfdata: a\n\n") == [b"a"]


def test_an_event_without_its_blank_line_is_no_event() -> None:
    assert parse(b"data: [DONE]\n") == []


@pytest.mark.parametrize("line", [b"x" * 100, b"data: y\n" * 30, b"data:\n" * 90])
def test_an_event_without_an_end_is_refused(line: bytes) -> None:
    parser = EventParser(max_event_bytes=256)
    parser.feed(line)
    parser.feed(b": still short\n")
    with pytest.raises(EventTooLong):
        parser.feed(line * 3)
