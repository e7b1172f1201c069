"""What a program computes in one instruction: nodes of a graph, of which only the last one's value is used outside."""

from dataclasses import dataclass

import torch
from torch import fx


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that become one value: ``last`` and those that nobody else needs."""

    last: fx.Node
    inner: frozenset[fx.Node]


@dataclass(frozen=True, slots=True)
class Norm(Group):
    """RMS or layer norm over the last dimension."""

    input: fx.Node
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    epsilon: float
    centred: bool
    is_turned: bool = False
    """``last`` is ``[1, heads, tokens, dim]``, of an input that is not."""


@dataclass(frozen=True, slots=True)
class Linear(Group):
    """A matrix product; with ``activation`` that follows, with ``up`` it is ``act(gate) * up``, ``add`` is added."""

    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    up: "Linear | None" = None
    activation: int | None = None
    add: fx.Node | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """Queries, keys or values before they are attended to: ``input`` is ``[1, tokens, heads(, )dim]``."""

    input: fx.Node
    heads: int
    dim: int
    cosines: fx.Node | None = None
    sines: fx.Node | None = None
    turned: int = 0
    """Numbers of each head that are turned, 0 for none."""


@dataclass(frozen=True, slots=True)
class Attend(Group):
    """One layer's attention."""

    query: Heads
    key: Heads
    value: Heads
    layer: int
    scale: float
    window: int
    softcap: float


@dataclass(frozen=True, slots=True)
class Pick(Group):
    """The rows whose logits are wanted."""

    input: fx.Node


@dataclass(frozen=True, slots=True)
class Lookup(Group):
    """Rows of a constant table, by token id."""

    table: fx.Node


@dataclass(frozen=True, slots=True)
class Add(Group):
    """A sum of two values of one shape."""

    one: fx.Node
    other: fx.Node
