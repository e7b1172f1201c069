"""Prefixes that the requests of a trace share, and prompts that share them."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from loadgen.prompts import TOKEN_IDS
from loadgen.trace_formats import TraceRequest


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Blocks of prompt looked up, and those of them that had been seen."""

    requests: int
    blocks: int
    hits: int

    @property
    def hit_rate(self) -> float:
        """Share of the blocks that were hits, 0 without blocks."""
        return self.hits / self.blocks if self.blocks else 0.0


def look_up(requests: Iterable[TraceRequest]) -> PrefixHits:
    """Look requests up one after another in a cache that forgets nothing: a hit is a leading block seen before.

    This is the trace's own hit rate. A server's is lower: it has a bounded memory, computes prompts while their
    siblings wait, and serves no part of a block and never the last token from its cache.
    """
    seen: set[int] = set()
    count = blocks = hits = 0
    for request in requests:
        count += 1
        blocks += len(request.hash_ids)
        hits += sum(1 for _ in takewhile(seen.__contains__, request.hash_ids))
        seen.update(request.hash_ids)
    return PrefixHits(count, blocks, hits)


def shared_prefix_tokens(one: TraceRequest, other: TraceRequest, block_tokens: int) -> int:
    """Return how many tokens of prompt two requests have in common, by their hash ids."""
    pairs = zip(one.hash_ids, other.hash_ids, strict=False)
    blocks = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return min(blocks * block_tokens, one.prompt_tokens, other.prompt_tokens)


class PromptMaker:
    """Makes prompts of a trace's lengths: alike as far as hash ids are, different where they are not."""

    def __init__(self, block_tokens: int, seed: int) -> None:
        self._block_tokens = block_tokens
        self._seed = seed
        self._made = 0

    def prompt(self, request: TraceRequest) -> tuple[int, ...]:
        """Return token ids; those of a request without hash ids are like no other's."""
        if request.hash_ids:
            blocks = [self._draw(0, hash_id, self._block_tokens) for hash_id in request.hash_ids]
            return tuple(np.concatenate(blocks).tolist()[: request.prompt_tokens])
        self._made += 1
        return tuple(self._draw(1, self._made, request.prompt_tokens).tolist())

    def _draw(self, kind: int, key: int, tokens: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        source = np.random.default_rng((self._seed, kind, key))
        return source.integers(TOKEN_IDS.low, TOKEN_IDS.high, size=tokens, endpoint=True)
