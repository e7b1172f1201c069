"""How KV memory is given: what is set aside at admission, and whether contents are shared."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Footprint:
    """Positions that a request needs now (prompt and answer so far) and those it may need at most."""

    known_tokens: int
    most_tokens: int


@dataclass(frozen=True, slots=True)
class KvManager:
    """``set_aside`` says how many positions a request gets at admission.

    ``is_on_demand``: the rest is given block by block as the request grows, and full blocks are shared.
    """

    set_aside: Callable[[Footprint], int]
    is_on_demand: bool


def paged(footprint: Footprint) -> int:
    """Set aside what is known; the answer's blocks come as it grows (PagedAttention §3.1)."""
    return footprint.known_tokens


def reserve(footprint: Footprint) -> int:
    """Set aside prompt and ``max_tokens``, so that an admitted request never lacks a slot (ORCA, Algorithm 1)."""
    return footprint.most_tokens


KV_MANAGERS: Mapping[str, KvManager] = MappingProxyType(
    {"paged": KvManager(paged, is_on_demand=True), "reserve": KvManager(reserve, is_on_demand=False)}
)
