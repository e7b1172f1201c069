"""Server-sent events out of bytes, wherever the network cuts them."""

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventTooLong(Exception):
    """The server sends an event that has no end."""


class EventParser:
    """Turns pieces of a stream into the data of whole events. Comments and other fields are skipped.

    Lines are cut before they are decoded, so that a character may arrive in halves.
    """

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = b""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._at_start = True

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that this piece completes. Raises `EventTooLong`."""
        events: list[bytes] = []
        for line in self._lines(piece):
            if line:
                self._take(line)
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data, self._data_bytes = [], 0
        if len(self._rest) + self._data_bytes > self._max_event_bytes:
            raise EventTooLong(f"an event of more than {self._max_event_bytes} bytes")
        return events

    def _lines(self, piece: bytes) -> list[bytes]:
        text = self._rest + piece
        # a carriage return at the very end may be half of a line end: wait for what follows
        held = text[-1:] if text.endswith(b"\r") else b""
        *lines, rest = _LINE_END.split(text.removesuffix(held) if held else text)
        self._rest = rest + held
        if self._at_start and lines:
            lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
            self._at_start = False
        return lines

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value) + 1
