"""What a step may take."""

from dataclasses import dataclass

PREEMPTIONS_AT_MOST = 3
"""After so many a request is admitted only with everything it may need set aside, and is no victim any more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of every plan: tokens fed in one step, requests that hold blocks at once. Raises ValueError."""

    max_num_batched_tokens: int
    max_num_seqs: int

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(f"{self.max_num_seqs} decodes must fit into {self.max_num_batched_tokens} tokens")


class TokenBudget:
    """Tokens that one step may still spend. Never goes below zero: `take` is the only way to spend."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def take(self, wanted: int) -> int:
        """Spend up to this many and return how many."""
        granted = min(wanted, self.left)
        self.left -= granted
        return granted
