"""Where the values of a program lie in its arena: two that are needed at the same time lie apart."""

from services.worker.program_lowering import Lowered, Value, values_of

_ALIGNED_BYTES = 64
"""Matrix tiles are read in lines of this size."""


def lay_out(program: Lowered, element_bytes: int) -> tuple[int, int]:
    """Set ``at`` of each value; return the bytes of one row of all, for tokens and for places wanted."""
    spans: dict[Value, tuple[int, int]] = {}
    for at, step in enumerate(program.steps):
        for value in values_of(step):
            spans[value] = (spans.get(value, (at, at))[0], at)
    return (
        _lay_out({value: span for value, span in spans.items() if not value.wanted}, element_bytes),
        _lay_out({value: span for value, span in spans.items() if value.wanted and not value.is_logits}, element_bytes),
    )


def _lay_out(spans: dict[Value, tuple[int, int]], element_bytes: int) -> int:
    """Give each value the first gap that is free for as long as it is needed."""
    laid: list[Value] = []
    end = 0
    for value, (first, last) in spans.items():
        size = _bytes(value, element_bytes)
        overlapping = [one for one in laid if spans[one][0] <= last and spans[one][1] >= first]
        value.at = _first_gap(sorted((one.at, one.at + _bytes(one, element_bytes)) for one in overlapping), size)
        laid.append(value)
        end = max(end, value.at + size)
    return end


def _first_gap(taken: list[tuple[int, int]], size: int) -> int:
    at = 0
    for start, end in taken:
        if start - at >= size:
            return at
        at = max(at, end)
    return at


def _bytes(value: Value, element_bytes: int) -> int:
    return -(-value.width * element_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
