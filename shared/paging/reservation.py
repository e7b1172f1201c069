"""Two ways to give KV memory at admission; what is not given then is given block by block, on demand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Footprint:
    """Positions that a request needs now (prompt and answer so far) and those it may need at most."""

    known_tokens: int
    most_tokens: int


Reservation = Callable[[Footprint], int]
"""How many positions are set aside when a request is admitted."""


def paged(footprint: Footprint) -> int:
    """Set aside what is known; the answer's blocks come as it grows (PagedAttention §3.1)."""
    return footprint.known_tokens


def reserve(footprint: Footprint) -> int:
    """Set aside prompt and ``max_tokens``, so that an admitted request never lacks a slot (ORCA, Algorithm 1)."""
    return footprint.most_tokens


RESERVATIONS: Mapping[str, Reservation] = MappingProxyType({"paged": paged, "reserve": reserve})
