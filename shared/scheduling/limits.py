"""What a step may take."""

from dataclasses import dataclass

PREEMPTIONS_AT_MOST = 3
"""After so many a request is admitted only with everything it may need set aside, and is no victim any more."""


WATERMARK = 0.01
"""Share of the blocks that an admission leaves free while others run, for their next tokens (Sarathi-Serve's)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of every plan: tokens fed in one step, requests that hold blocks at once. Raises ValueError."""

    max_num_batched_tokens: int
    max_num_seqs: int
    long_prefill_tokens: int = 0
    """All who miss more than this share so many tokens of a step while shorter prompts wait; 0: no such cap."""
    tile_tokens: int = 1
    """A step that is full feeds a multiple of this: matrix kernels compute whole tiles (Sarathi-Serve §4.3)."""
    stages: int = 1
    """Disjoint batches in flight, as a pipeline of so many stages needs them (ORCA's ``n_workers``)."""

    def __post_init__(self) -> None:
        if min(self.max_num_seqs, self.tile_tokens, self.stages) < 1 or self.long_prefill_tokens < 0:
            raise ValueError(f"limits must be positive: {self}")
        if self.max_num_seqs > self.step_tokens:
            raise ValueError(f"{self.max_num_seqs} decodes must fit into {self.step_tokens} tokens")

    @property
    def step_tokens(self) -> int:
        """Tokens of a full step."""
        return whole_tiles(self.max_num_batched_tokens, self.tile_tokens)


def whole_tiles(budget: int, tile_tokens: int) -> int:
    """Return the tokens of a budget that make whole tiles; all of it if not even one fits."""
    return budget - budget % tile_tokens or budget


class TokenBudget:
    """Tokens that one step may still spend. Never goes below zero: `take` is the only way to spend."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def take(self, wanted: int) -> int:
        """Spend up to this many and return how many."""
        granted = min(wanted, self.left)
        self.left -= granted
        return granted
