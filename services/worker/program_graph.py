"""The graph of a model, as torch exports it, cleaned of what computes nothing (`torch.export`).

Inputs are token ids and positions ``[1, tokens]`` and the places whose logits are wanted ``[wanted]``. Each node is one
of: *constant* (of weights alone), *positional* (of weights and positions alone), or of the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import Dim
from transformers import PreTrainedModel

aten = torch.ops.aten

_SAMPLE_TOKENS = 6
"""Any number will do that is not one of torch's special cases (0 and 1) and unlike the number of places wanted."""
_ALIASES = frozenset(
    {
        aten.to.dtype,
        aten.to.device,
        aten.to.dtype_layout,
        aten.contiguous.default,
        aten.alias.default,
        aten.detach.default,
        aten.detach_.default,
        aten.dropout.default,
        aten.clone.default,
        aten.lift_fresh_copy.default,
    }
)


class NotLowered(Exception):
    """The model has no program; the text says why."""


class _Called(torch.nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return ``[1, wanted, vocabulary]``."""
        output = self.model(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=wanted)
        logits: torch.Tensor = output.logits
        return logits


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph and what its placeholders are."""

    nodes: list[fx.Node]
    token_ids: fx.Node
    positions: fx.Node
    wanted: fx.Node
    logits: fx.Node
    weights: dict[fx.Node, torch.Tensor]
    dtype: torch.dtype
    constant: set[fx.Node] = field(default_factory=set)
    positional: set[fx.Node] = field(default_factory=set)

    @property
    def roots(self) -> list[fx.Node]:
        """The nodes at which norms are found."""
        return [node for node in self.nodes if is_call(node, aten.rsqrt.default)]


def exported(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> Graph:
    """Return the graph of a model, with tensors for its weights by name. Raises NotLowered: torch cannot export it."""
    sample = torch.arange(_SAMPLE_TOKENS)[None]
    places = torch.arange(_SAMPLE_TOKENS // 2)
    shapes = ({1: Dim.DYNAMIC}, {1: Dim.DYNAMIC}, {0: Dim.DYNAMIC})
    try:
        with torch.no_grad():
            program = torch.export.export(
                _Called(model), (sample, sample.clone(), places), dynamic_shapes=shapes, strict=False
            )
    except Exception as error:  # whatever a model's code does, torch may say anything
        first = next(iter(str(error).splitlines()), "")
        raise NotLowered(f"torch cannot export it ({type(error).__name__}: {first})") from error
    module = program.graph_module
    graph = module.graph
    _remove_aliases(graph)
    signature = program.graph_signature
    # names as the wrapper's: "model." comes first
    values = {**program.constants, **{f"model.{name}": tensor.detach() for name, tensor in tensors.items()}}
    named = {
        **signature.inputs_to_lifted_tensor_constants,
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
    }
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    weights = {node: values[named[node.name]] for node in placeholders if node.name in named}
    token_ids, positions, wanted = (node for node in placeholders if node.name not in named)
    (outputs,) = (node for node in graph.nodes if node.op == "output")
    ((logits,),) = outputs.args
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    found = Graph(nodes, token_ids, positions, wanted, logits, weights, model.dtype)
    _sort_out(found)
    return found


def _remove_aliases(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten._assert_tensor_metadata.default:  # noqa: SLF001 - an operator's name
            graph.erase_node(node)
        elif node.target in _ALIASES and _same(node, node.args[0]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _same(one: fx.Node, other: Any) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return bool(a.dtype == b.dtype and a.shape == b.shape)


def _sort_out(graph: Graph) -> None:
    """Find what can be computed before any step, and what for each position once.

    How many tokens there are is known as positions are; what torch gives in tuples is of the step.
    """
    sizes: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        known = [one in graph.weights or one in graph.constant for one in inputs]
        positional = [one is graph.positions or one in graph.positional or one in sizes for one in inputs]
        if not isinstance(node.meta.get("val"), torch.Tensor):
            if _counts_tokens(graph, node) or (inputs and all(one in sizes for one in inputs)):
                sizes.add(node)
        elif all(known):
            graph.constant.add(node)
        elif all(either for either in map(any, zip(known, positional, strict=True))):
            graph.positional.add(node)


def _counts_tokens(graph: Graph, node: fx.Node) -> bool:
    return is_call(node, aten.sym_size.int) and node.args[0] in {graph.token_ids, graph.positions}


def is_call(node: object, *targets: object) -> bool:
    """Return whether a node calls one of some operators."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def fixed(graph: Graph, node: fx.Node) -> torch.Tensor:
    """Return the value of a constant node."""
    value: torch.Tensor = evaluated(node, dict(graph.weights))
    return value


def over_positions(graph: Graph, node: fx.Node, count: int) -> torch.Tensor:
    """Return what a positional node gives for positions 0 to ``count``."""
    positions = torch.arange(count)[None]
    known = {**graph.weights, graph.positions: positions, graph.token_ids: torch.zeros_like(positions)}
    value: torch.Tensor = evaluated(node, known)
    return value


def evaluated(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """Return a node's value, from the values of nodes that it comes from."""
    if node not in known:
        for one in node.all_input_nodes:
            evaluated(one, known)
        known[node] = called(node, known)
    return known[node]


def called(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """Return what a node's operator gives for known inputs."""
    arguments = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    args, kwargs = arguments
    assert callable(node.target), "nodes of an exported graph call operators"  # noqa: S101 - for the type checker
    return node.target(*args, **kwargs)
