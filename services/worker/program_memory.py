"""Where the values of a program lie in its arena: two that are needed at the same time lie apart."""

from torch import fx
from torch._ops import OpOverload

from services.worker.program_lowering import Called, Lowered, Shown, Taken, Value, values_of

_ALIGNED_BYTES = 64
"""Matrix tiles are read in lines of this size."""


def lay_out(program: Lowered, element_bytes: int) -> tuple[int, int]:
    """Set ``at`` of each value; return the bytes of one row of all, for tokens and for places wanted."""
    spans: dict[Value, tuple[int, int]] = {}
    read_last = _read_last(program)
    for at, step in enumerate(program.steps):
        until = read_last.get(step.node, at) if isinstance(step, Shown) else at
        for value in values_of(step):
            first, last = spans.get(value, (at, at))
            spans[value] = (first, max(last, until))
    return (
        _lay_out({value: span for value, span in spans.items() if not value.wanted}, element_bytes),
        _lay_out({value: span for value, span in spans.items() if value.wanted and not value.is_logits}, element_bytes),
    )


def _read_last(program: Lowered) -> dict[fx.Node, int]:
    """Return the last step at which torch reads what it has of a node: of one shown to it that is the place itself."""
    last: dict[fx.Node, int] = {}
    if program.ends_in_torch and program.graph is not None:
        last[program.graph.logits] = len(program.steps)
    for at, step in reversed(list(enumerate(program.steps))):
        if isinstance(step, Taken):
            last[step.node] = max(at, last.get(step.node, at))
        elif isinstance(step, Called):
            until = max(at, last.get(step.node, at)) if _may_be_a_view(step.node) else at
            for one in step.node.all_input_nodes:
                last[one] = max(until, last.get(one, until))
    return last


def _may_be_a_view(node: fx.Node) -> bool:
    """Return whether what torch makes of its inputs may lie where they lie."""
    if not isinstance(node.target, OpOverload):
        return True
    return any(one.alias_info is not None for one in node.target._schema.returns)  # noqa: SLF001 - torch has no other word for it


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
