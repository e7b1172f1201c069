"""From a graph to instructions: each group becomes one, what fits no group is a call of torch between them."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from services.worker.program_graph import Graph, aten, fixed, is_call, over_positions
from services.worker.program_groups import Add, Attend, Group, Heads, Linear, Lookup, Norm, Pick
from services.worker.program_patterns import flattened, groups_of, rows_of

_TABLE_DIMS = 3
_TABLE_BYTES = 64 << 20
"""What depends on positions alone is computed for each of them once, if that takes no more."""


@dataclass(eq=False, slots=True)
class Value:
    """Rows of ``width`` numbers, one for each token or for each place wanted."""

    width: int
    wanted: bool
    is_logits: bool = False
    at: int = 0
    """Bytes of each row of the arena before it: set when the whole program is known."""


@dataclass(frozen=True, slots=True)
class Place:
    """A value, or some columns of it."""

    value: Value
    column: int
    width: int


@dataclass(frozen=True, slots=True)
class Looked:
    """Rows of a table, by token id or by position."""

    table: torch.Tensor
    by: Literal["token", "position"]


@dataclass(frozen=True, slots=True)
class Normed:
    """A norm over each of some groups of numbers."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    width: int
    groups: int
    centred: bool
    epsilon: float


@dataclass(frozen=True, slots=True)
class Multiplied:
    """Products with matrices ``[out, in]`` side by side; activated: one, or two of which the first gates the second."""

    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor | None, ...]
    activation: int | None = None


@dataclass(frozen=True, slots=True)
class Rotated:
    """Heads turned in place."""

    heads: int
    dim: int
    half: int


@dataclass(frozen=True, slots=True)
class Attended:
    """One layer's attention."""

    layer: int
    heads: int
    kv_heads: int
    dim: int
    scale: float
    window: int
    softcap: float


@dataclass(frozen=True, slots=True)
class Picked:
    """The rows wanted."""


@dataclass(frozen=True, slots=True)
class Added:
    """A sum."""


What = Looked | Normed | Multiplied | Rotated | Attended | Picked | Added


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of the kernel."""

    what: What
    inputs: tuple[Place, ...]
    out: Place


@dataclass(frozen=True, slots=True)
class Shown:
    """A value is shown to torch as the tensor of a node."""

    node: fx.Node
    place: Place


@dataclass(frozen=True, slots=True)
class Called:
    """Torch computes a node."""

    node: fx.Node


@dataclass(frozen=True, slots=True)
class Taken:
    """What torch computed is copied to a place."""

    node: fx.Node
    place: Place


Step = Instruction | Shown | Called | Taken


@dataclass(slots=True)
class Lowered:
    """A program, its values without places yet."""

    graph: Graph | None
    """None if torch computes nothing of it."""
    dtype: torch.dtype
    steps: list[Step] = field(default_factory=list)
    ends_in_torch: bool = False


def lowered(graph: Graph, max_model_len: int) -> Lowered:
    """Return the program of a graph."""
    return _Lowering(graph, max_model_len).run()


class _Lowering:
    def __init__(self, graph: Graph, max_model_len: int) -> None:
        self._graph = graph
        self._max_model_len = max_model_len
        self._groups = groups_of(graph)
        self._inner = {node for group in self._groups.values() for node in group.inner}
        self._together = _together(self._groups)
        self._places: dict[fx.Node, Place] = {}
        self._in_torch: set[fx.Node] = set(graph.weights) | {graph.token_ids, graph.positions, graph.wanted}
        self._out = Lowered(graph, graph.dtype)

    def run(self) -> Lowered:
        """Walk the graph in order."""
        for node in self._graph.nodes:
            if node in self._graph.constant or node in self._graph.positional or node in self._inner:
                continue
            group = self._groups.get(node)
            if group is not None:
                self._lower(group)
            elif not self._is_shape_only(node):
                self._call(node)
        logits = self._graph.logits
        if logits not in self._places or not self._places[logits].value.is_logits:
            self._need_in_torch(logits)
            self._out.ends_in_torch = True
        return self._out

    def _is_shape_only(self, node: fx.Node) -> bool:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return True  # a number of tokens: torch's nodes ask for it when they need it
        return self._aliased(node) is not None

    # -- where values lie -------------------------------------------------------------------------------------------

    def _place(self, node: fx.Node) -> Place:
        """Return where a value lies for the kernel, brought there if need be."""
        if node not in self._places:
            aliased = self._aliased(node)
            if aliased is not None:
                self._places[node] = aliased
            elif node in self._graph.positional and self._table_bytes(node) <= _TABLE_BYTES:
                table = over_positions(self._graph, node, self._max_model_len)[0].contiguous()
                self._emit(node, Looked(table, "position"))
            else:
                self._need_in_torch(node)
                self._places[node] = Place(self._value_of(node), 0, _width(node))
                self._out.steps.append(Taken(node, self._places[node]))
        return self._places[node]

    def _aliased(self, node: fx.Node) -> Place | None:
        """Return the place of a node that only shapes anew what lies somewhere already, or cuts columns from it."""
        source = flattened(node)
        if source is not None and rows_of(source) == rows_of(node) and self._lies(source):
            return self._place(source)
        cut = _columns(node)
        if cut is None or not self._lies(cut[0]):
            return None
        whole = self._place(cut[0])
        return Place(whole.value, whole.column + cut[1], cut[2])

    def _lies(self, node: fx.Node) -> bool:
        return node in self._places or node in self._groups or self._aliased(node) is not None

    def _table_bytes(self, node: fx.Node) -> int:
        bytes_of_one: int = node.meta["val"].element_size()
        return self._max_model_len * _width(node) * bytes_of_one

    def _value_of(self, node: fx.Node, width: int | None = None) -> Value:
        return Value(width or _width(node), rows_of(node) == rows_of(self._graph.wanted))

    def _emit(
        self, node: fx.Node, what: What, *inputs: Place, width: int | None = None, is_logits: bool = False
    ) -> Place:
        value = self._value_of(node, width)
        value.is_logits = is_logits
        place = Place(value, 0, value.width)
        self._out.steps.append(Instruction(what, inputs, place))
        self._places[node] = place
        return place

    # -- torch in between -------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> None:
        for one in node.all_input_nodes:
            self._need_in_torch(one)
        self._in_torch.add(node)
        self._out.steps.append(Called(node))

    def _need_in_torch(self, node: fx.Node) -> None:
        if node in self._in_torch:
            return
        if node in self._groups:
            self._in_torch.add(node)
            self._out.steps.append(Shown(node, self._places[node]))
        else:
            self._call(node)

    # -- groups -----------------------------------------------------------------------------------------------------

    def _lower(self, group: Group) -> None:
        match group:
            case Lookup():
                self._emit(group.last, Looked(fixed(self._graph, group.table).contiguous(), "token"))
            case Norm():
                self._norm(group)
            case Linear():
                self._linear(group)
            case Attend():
                self._attend(group)
            case Pick():
                self._emit(group.last, Picked(), self._place(group.input))
            case Add():
                self._emit(group.last, Added(), self._place(group.one), self._place(group.other))

    def _norm(self, group: Norm) -> None:
        source = self._place(group.input)
        width = int(group.last.meta["val"].shape[-1])
        what = Normed(group.weight, group.bias, width, source.width // width, group.centred, group.epsilon)
        self._emit(group.last, what, source, width=source.width)

    def _linear(self, group: Linear) -> None:
        if group.last in self._places:  # it was computed together with another
            return
        source = self._place(group.input)
        if group.activation is not None:
            joined = (group,) if group.up is None else (group, group.up)
            self._emit(group.last, self._multiplied(joined, group.activation), source)
        elif group.add is not None:
            self._emit(group.last, self._multiplied((group,)), source, self._place(group.add))
        elif group.last is self._graph.logits:
            self._emit(group.last, self._multiplied((group,)), source, is_logits=True)
        else:
            self._several(self._together[group.input], source)

    def _several(self, together: list[Linear], source: Place) -> None:
        widths = [_width(one.last) for one in together]
        value = Value(sum(widths), source.value.wanted)
        out = Place(value, 0, value.width)
        self._out.steps.append(Instruction(self._multiplied(tuple(together)), (source,), out))
        column = 0
        for one, width in zip(together, widths, strict=True):
            self._places[one.last] = Place(value, column, width)
            column += width

    def _multiplied(self, linears: tuple[Linear, ...], activation: int | None = None) -> Multiplied:
        weights = tuple(self._graph.weights[one.weight] for one in linears)
        biases = tuple(None if one.bias is None else self._graph.weights[one.bias] for one in linears)
        return Multiplied(weights, biases, activation)

    def _attend(self, group: Attend) -> None:
        places = [self._heads(given) for given in (group.query, group.key, group.value)]
        query, key = group.query, group.key
        what = Attended(group.layer, query.heads, key.heads, query.dim, group.scale, group.window, group.softcap)
        self._emit(group.last, what, *places)

    def _heads(self, heads: Heads) -> Place:
        place = self._place(heads.input)
        if heads.cosines is not None and heads.sines is not None:
            angles = self._place(heads.cosines), self._place(heads.sines)
            what = Rotated(heads.heads, heads.dim, heads.turned // 2)
            self._out.steps.append(Instruction(what, (place, *angles), place))
        return place


def _together(groups: dict[fx.Node, Group]) -> dict[fx.Node, list[Linear]]:
    """Return the plain products by their input: those of one input are computed as one."""
    together: dict[fx.Node, list[Linear]] = defaultdict(list)
    for group in groups.values():
        if isinstance(group, Linear) and group.activation is None and group.add is None:
            together[group.input].append(group)
    return together


def _width(node: fx.Node) -> int:
    """Return the numbers of one row of ``[1, rows, ...]``."""
    width = 1
    for size in node.meta["val"].shape[2:]:
        width *= int(size)
    return width


def _columns(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Return source, first column and width of a node that cuts columns from ``[1, tokens, width]``."""
    if not is_call(node, aten.slice.Tensor) or node.meta["val"].dim() != _TABLE_DIMS:
        return None
    source, dim, start, *_ = (*node.args, 0, 0)[:3]
    if dim not in {2, -1} or not isinstance(source, fx.Node) or not isinstance(start, int):
        return None
    return source, start, int(node.meta["val"].shape[2])


def values_of(step: Step) -> Iterator[Value]:
    """Yield the values that a step reads or writes."""
    match step:
        case Instruction():
            yield from (place.value for place in (*step.inputs, step.out))
        case Shown() | Taken():
            yield step.place.value
