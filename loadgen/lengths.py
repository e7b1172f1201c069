"""How long prompts and answers are."""

import re
from dataclasses import dataclass
from typing import Self

import numpy as np

Seed = int | np.random.SeedSequence


@dataclass(frozen=True, slots=True)
class Span:
    """A length in tokens: from `low` to `high`, both included, each as likely."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``128`` or ``64-256``. Raises ValueError with a sentence when it is neither."""
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", text.strip())
        if match is None:
            raise ValueError(f"{text!r} is neither a number of tokens (128) nor a range (64-256)")
        low, high = int(match[1]), int(match[2] or match[1])
        if not 1 <= low <= high:
            raise ValueError(f"{text!r} must start at 1 or more and must not run backwards")
        return cls(low, high)

    def draw(self, source: np.random.Generator) -> int:
        """Return one length in tokens."""
        return int(source.integers(self.low, self.high, endpoint=True))
