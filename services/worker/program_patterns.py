"""What a step program computes in one instruction, found in a model's graph by its shape.

What fits no group is left to torch.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import fx

from services.worker.program_graph import Graph, aten, fixed, is_call
from services.worker.program_groups import Add, Attend, Group, Heads, Linear, Lookup, Norm, Pick

ACTIVATIONS = {aten.silu.default: 0, aten.gelu.default: 2, aten.relu.default: 3}
GELU_TANH = 1
_FLAT = frozenset({aten.view.default, aten.reshape.default, aten.flatten.using_ints})
_CASTS = frozenset({aten.to.dtype})
_SQUARE = 2
_TABLE_DIMS = 3
"""``[1, tokens, width]``."""
ATTENTION = torch.ops.slipstream.paged_attention.default


def groups_of(graph: Graph) -> dict[fx.Node, Group]:
    """Return the groups of a graph by their last nodes; none overlap."""
    found: dict[fx.Node, Group] = {}
    taken: set[fx.Node] = set()
    for group in _candidates(graph):
        nodes = {group.last, *group.inner}
        if nodes & taken or not _is_closed(group):
            continue
        taken |= nodes
        found[group.last] = group
    return found


def _candidates(graph: Graph) -> Iterator[Group]:
    """Yield what may be a group, the larger ones first."""
    step_nodes = [node for node in graph.nodes if node not in graph.constant and node not in graph.positional]
    for find in (_norm, _ready_norm, _attend, _gated, _activated, _linear_and_add, _linear, _pick, _lookup, _add):
        for node in step_nodes:
            group = find(graph, node)
            if group is not None and group.last.meta["val"].dtype == graph.dtype and _has_rows(graph, group):
                yield group


def _has_rows(graph: Graph, group: Group) -> bool:
    """Return whether a group's value is a row for each token, or for each place wanted."""
    if isinstance(group, Norm) and group.is_turned:
        return True
    return rows_of(group.last) in {rows_of(graph.token_ids), rows_of(graph.wanted)}


def rows_of(node: fx.Node) -> Any:
    """Return what a node has one row for each of, as torch names it; None if it is no such table."""
    shape = node.meta["val"].shape
    if len(shape) == 1:
        return str(shape[0])
    return str(shape[1]) if shape[0] == 1 else None


def _is_closed(group: Group) -> bool:
    nodes = {group.last, *group.inner}
    return all(user in nodes for node in group.inner for user in node.users)


def _only_user(node: Any) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other(node: Any, one: Any) -> Any:
    a, b = node.args[:2]
    return b if a is one else a


# -- norms ----------------------------------------------------------------------------------------------------------


def _norm(graph: Graph, node: Any) -> Norm | None:
    """Find ``x * rsqrt(mean(x^2) + epsilon) * weight`` from its root, casts anywhere in between."""
    found = _root_of_mean_square(node)
    if found is None:
        return None
    source, epsilon, inner = found
    times = _only_user(node)
    if not is_call(times, aten.mul.Tensor) or _other(times, node) is not source:
        return None
    if is_call(source, *_CASTS):
        inner.add(source)
        source = source.args[0]
    last, weight, passed = _weighted(graph, times)
    if last.meta["val"].dtype != source.meta["val"].dtype:
        return None
    is_turned = _is_turn(source)
    if is_turned:
        inner.add(source)
        source = source.args[0]
    return Norm(
        last, frozenset(inner | passed - {last}), source, weight, None, epsilon, centred=False, is_turned=is_turned
    )


def _is_turn(node: Any) -> bool:
    return is_call(node, aten.transpose.int) and set(node.args[1:]) == {1, 2}


def _root_of_mean_square(node: Any) -> tuple[Any, float, set[fx.Node]] | None:
    if not is_call(node, aten.rsqrt.default):
        return None
    plus = node.args[0]
    if not is_call(plus, aten.add.Tensor, aten.add.Scalar) or not isinstance(plus.args[1], float):
        return None
    mean = plus.args[0]
    if not is_call(mean, aten.mean.dim) or list(mean.args[1]) != [-1]:
        return None
    square = mean.args[0]
    if not is_call(square, aten.pow.Tensor_Scalar) or square.args[1] != _SQUARE:
        return None
    return square.args[0], plus.args[1], {node, plus, mean, square}


def _weighted(graph: Graph, node: Any) -> tuple[fx.Node, torch.Tensor | None, set[fx.Node]]:
    """Follow casts and one multiplication with a constant vector."""
    weight: torch.Tensor | None = None
    passed = {node}
    while True:
        user = _only_user(node)
        if is_call(user, *_CASTS):
            pass
        elif weight is None and is_call(user, aten.mul.Tensor) and _is_vector(graph, _other(user, node), node):
            weight = _fixed(graph, _other(user, node))
        else:
            return node, weight, passed
        node = user
        passed.add(node)


def _is_vector(graph: Graph, node: Any, like: Any) -> bool:
    if not (node in graph.constant or node in graph.weights):
        return False
    shape = node.meta["val"].shape
    return len(shape) == 1 and shape[0] == like.meta["val"].shape[-1]


def _fixed(graph: Graph, node: Any | None) -> torch.Tensor | None:
    return None if node is None else fixed(graph, node).detach().float().contiguous()


def _ready_norm(graph: Graph, node: Any) -> Norm | None:
    """Find torch's own norms over the last dimension."""
    if is_call(node, aten.layer_norm.default) and len(node.args[1]) == 1:
        weight, bias = _fixed(graph, _argument(node, 2)), _fixed(graph, _argument(node, 3))
        return Norm(node, frozenset(), node.args[0], weight, bias, _argument(node, 4, 1e-5), centred=True)
    if is_call(node, aten.rms_norm.default) and len(node.args[1]) == 1 and _argument(node, 3) is not None:
        weight = _fixed(graph, _argument(node, 2))
        return Norm(node, frozenset(), node.args[0], weight, None, _argument(node, 3), centred=False)
    return None


def _argument(node: Any, at: int, default: float | None = None) -> Any:
    return node.args[at] if len(node.args) > at else default


# -- attention ------------------------------------------------------------------------------------------------------


def _attend(graph: Graph, node: Any) -> Attend | None:
    if not is_call(node, ATTENTION):
        return None
    query, key, value, _, layer, scale, window, softcap = node.args
    inner: set[fx.Node] = set()
    found = [_heads(graph, given, inner) for given in (query, key, value)]
    heads = [one for one in found if one is not None and (_is_private(one.input) or inner.issuperset(one.input.users))]
    if len(heads) < len(found):
        return None
    last = node
    user = _only_user(node)
    if is_call(user, *_FLAT) and user.meta["val"].dim() == _TABLE_DIMS:
        inner.add(node)
        last = user
    q, k, v = heads
    return Attend(last, frozenset(inner - {last}), q, k, v, layer, scale, window, softcap)


def _heads(graph: Graph, node: Any, inner: set[fx.Node]) -> Heads | None:
    """Find ``transpose(view(x))``, turned or not."""
    shape = node.meta["val"].shape
    heads, dim = int(shape[1]), int(shape[3])
    turned = _turned(graph, node, inner)
    source = turned[0] if turned else node
    if _is_turn(source):
        inner.add(source)
        source = source.args[0]
    elif not _is_turned_norm(graph, source):
        return None
    return Heads(source, heads, dim, *(turned or (None,))[1:])


def _is_turned_norm(graph: Graph, node: Any) -> bool:
    return any(norm.is_turned and norm.last is node for norm in map(partial(_norm, graph), graph.roots) if norm)


def _is_private(node: Any) -> bool:
    """Return whether nobody else reads this, so that it may be turned in place."""
    while is_call(node, *_FLAT, aten.slice.Tensor) and len(node.users) == 1:
        cuts = is_call(node, aten.slice.Tensor)
        node = node.args[0]
        if cuts:
            return all(is_call(user, aten.slice.Tensor) for user in node.users)
    return len(node.users) == 1


def _turned(graph: Graph, node: Any, inner: set[fx.Node]) -> tuple[Any, Any, Any, int] | None:
    """Find ``x * cos + rotate_half(x) * sin``, of all numbers of a head or of its first ones."""
    if is_call(node, aten.cat.default):
        (first, second), *_ = node.args
        if not is_call(second, aten.slice.Tensor):
            return None
        found = _turned_whole(graph, first, inner)
        if found is None or not is_call(found[0], aten.slice.Tensor) or found[0].args[0] is not second.args[0]:
            return None
        inner |= {node, second, found[0]}
        return found[0].args[0], *found[1:]
    return _turned_whole(graph, node, inner)


def _turned_whole(graph: Graph, node: Any, inner: set[fx.Node]) -> tuple[Any, Any, Any, int] | None:
    if not is_call(node, aten.add.Tensor) or not all(is_call(one, aten.mul.Tensor) for one in node.args[:2]):
        return None
    straight, crossed = node.args[:2]
    source, cosines = straight.args[:2]
    halves, sines = crossed.args[:2]
    if not {cosines, sines} <= graph.positional or cosines.meta["val"].dtype != graph.dtype:
        return None
    crossing = _half_crossing(halves, source)
    if crossing is None:
        return None
    inner |= {node, straight, crossed, *crossing}
    return source, _row_of(cosines), _row_of(sines), int(source.meta["val"].shape[-1])


def _half_crossing(node: Any, source: Any) -> set[fx.Node] | None:
    """Find ``cat(-upper half, lower half)`` and return its nodes."""
    if not is_call(node, aten.cat.default):
        return None
    minus, plus = node.args[0]
    dim = int(source.meta["val"].shape[-1])
    if not is_call(minus, aten.neg.default) or not _is_slice(minus.args[0], source, dim // 2, dim):
        return None
    return {node, minus, plus, minus.args[0]} if _is_slice(plus, source, 0, dim // 2) else None


def _is_slice(node: Any, source: Any, start: int, end: int) -> bool:
    if not is_call(node, aten.slice.Tensor) or node.args[0] is not source:
        return False
    _, dim, begin, stop = (*node.args, None, None)[:4]
    width = source.meta["val"].shape[-1]
    return dim in {3, -1} and (begin or 0) == start and min(stop if stop is not None else width, width) == end


def _row_of(node: Any) -> Any:
    """Return ``[1, tokens, dim]`` of what was unsqueezed to ``[1, 1, tokens, dim]``."""
    return node.args[0] if is_call(node, aten.unsqueeze.default) and node.args[1] in {1, -3} else node


# -- matrices -------------------------------------------------------------------------------------------------------


def _linear(graph: Graph, node: Any) -> Linear | None:
    if not is_call(node, aten.linear.default):
        return None
    source, weight, bias = (*node.args, None)[:3]
    if weight not in graph.weights or not (bias is None or bias in graph.weights):
        return None
    if weight.meta["val"].dtype != graph.dtype or (graph.dtype != torch.float32 and weight.meta["val"].shape[1] % 32):
        return None
    return Linear(node, frozenset(), source, weight, bias)


def _gated(graph: Graph, node: Any) -> Linear | None:
    """Find ``act(gate(x)) * up(x)``."""
    if not is_call(node, aten.mul.Tensor):
        return None
    for active, other in (node.args[:2], node.args[1::-1]):
        if not is_call(active, *ACTIVATIONS) or not isinstance(other, fx.Node):
            continue
        gate, up = _linear(graph, active.args[0]), _linear(graph, other)
        if gate is None or up is None or gate.input is not up.input:
            continue
        if (gate.bias is None) != (up.bias is None) or gate.weight.meta["val"].shape != up.weight.meta["val"].shape:
            continue
        if gate.weight.meta["val"].shape[0] % 16:
            continue
        inner = frozenset({active, gate.last, up.last})
        return Linear(node, inner, gate.input, gate.weight, gate.bias, up, _activation(active))
    return None


def _activated(graph: Graph, node: Any) -> Linear | None:
    """Find ``act(linear(x))``."""
    found = _linear(graph, node.args[0]) if is_call(node, *ACTIVATIONS) else None
    if found is None:
        return None
    inner = frozenset({found.last})
    return Linear(node, inner, found.input, found.weight, found.bias, activation=_activation(node))


def _activation(node: Any) -> int:
    if node.kwargs.get("approximate") == "tanh":
        return GELU_TANH
    return ACTIVATIONS[node.target]


def _linear_and_add(graph: Graph, node: Any) -> Linear | None:
    if not is_call(node, aten.add.Tensor) or node.kwargs:
        return None
    for other, one in (node.args[:2], node.args[1::-1]):
        if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
            continue
        found = _linear(graph, one)
        if found is None or not _alike(node, other) or not _alike(node, one):
            continue
        return Linear(node, frozenset({one}), found.input, found.weight, found.bias, add=other)
    return None


def _alike(one: Any, other: Any) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return bool(a.shape == b.shape and a.dtype == b.dtype)


# -- rows -----------------------------------------------------------------------------------------------------------


def _pick(graph: Graph, node: Any) -> Pick | None:
    if not is_call(node, aten.index.Tensor):
        return None
    source, places = node.args
    if list(places) != [None, graph.wanted] or source.meta["val"].dim() != _TABLE_DIMS:
        return None
    return Pick(node, frozenset(), source)


def _lookup(graph: Graph, node: Any) -> Lookup | None:
    if is_call(node, aten.embedding.default) and node.args[1] is graph.token_ids and node.args[0] in graph.weights:
        return Lookup(node, frozenset(), node.args[0])
    return None


def _add(graph: Graph, node: Any) -> Add | None:
    del graph
    if not is_call(node, aten.add.Tensor) or node.kwargs:
        return None
    one, other = node.args[:2]
    if isinstance(one, fx.Node) and isinstance(other, fx.Node) and _alike(node, one) and _alike(node, other):
        return Add(node, frozenset(), one, other)
    return None


def flattened(node: Any) -> Any:
    """Return what a node only shapes anew, if it does."""
    return node.args[0] if is_call(node, *_FLAT) else None
