"""Which tokens grammars allow next. No torch here.

A grammar is made into a matcher aside, when its request arrives; requests with the same text get copies. The masks of a
step are filled in one parallel call. Whatever is wrong with a grammar concerns its own row alone.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from services.worker.executor import Batch, DrawFailed, Outcome, token_of
from services.worker.guide import Guide
from shared.protocol.grammars import GRAMMAR_LIMITS
from shared.protocol.messages import TokenizerFiles
from shared.runtime.clock import monotonic
from shared.runtime.threads import Threads

MAKING_S = 5.0
"""How long a step waits at most for all the grammars it needs; made by their bounds, one takes tenths of a second."""
_KEPT = 128
"""Grammars whose matchers are kept, for the next request with the same text or for one that was just announced."""
_ERROR_CHARACTERS = 500
_LIMITS = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)

Allowed = npt.NDArray[np.bool_]
"""One entry for each token id."""
Masks = Mapping[int, Allowed | DrawFailed]
"""By the place of a row among those that draw; one that is not named is free."""
FREE: Masks = {}


@dataclass(frozen=True, slots=True)
class Guided:
    """A row that follows a grammar: its place among those that draw, and the outcome that it awaits, if any."""

    place: int
    guide: Guide
    position: int
    awaits: int | None


def guided_of(batch: Batch) -> tuple[Guided, ...]:
    """Return the rows of a batch that follow grammars."""
    drawing = [(row.draw, row.awaits) for row in batch if row.draw is not None]
    return tuple(
        Guided(place, draw.guide, draw.position, awaits)
        for place, (draw, awaits) in enumerate(drawing)
        if draw.guide is not None
    )


def without(allowed: Allowed, token_ids: npt.NDArray[np.int64]) -> Allowed:
    """Return what is allowed but for some tokens; if nothing else is, it stays: the grammar wins."""
    left = allowed.copy()
    left[token_ids[token_ids < len(left)]] = False
    return left if left.any() else allowed


class Grammars:
    """The grammars of one model's requests."""

    def __init__(self, files: TokenizerFiles, vocabulary: int, *, threads: int = 1) -> None:
        self._files = files
        self._vocabulary = vocabulary
        self._pool = Threads(1, "grammars")
        self._filling = LLExecutor(num_threads=threads)
        self._tokenizer: LLTokenizer | None = None
        self._made: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._lock = Lock()

    def expect(self, grammar: str) -> None:
        """Begin to make a grammar, on a thread of its own, if it is not kept."""
        self._making(grammar)

    def masks(self, guided: Sequence[Guided], before: Sequence[Outcome]) -> Masks:
        """Return what rows may draw once the step before has had these outcomes. On the thread of the steps only."""
        found: dict[int, Allowed | DrawFailed] = {}
        matchers = []
        deadline_s = monotonic() + MAKING_S
        for one in guided:
            fed = self._fed(one, before, deadline_s)
            if isinstance(fed, DrawFailed):
                found[one.place] = fed
            else:
                matchers.append((one.place, fed))
        if matchers:
            found.update(self._filled(matchers))
        return found

    def _filled(self, matchers: Sequence[tuple[int, LLMatcher]]) -> Masks:
        bits = allocate_token_bitmask(len(matchers), self._vocabulary)
        fill_next_token_bitmask_par(self._filling, [(one, at) for at, (_, one) in enumerate(matchers)], bits)
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=self._vocabulary, bitorder="little").view(np.bool_)
        return {place: _fault(one) or allowed[at] for at, (place, one) in enumerate(matchers)}

    def _fed(self, one: Guided, before: Sequence[Outcome], deadline_s: float) -> LLMatcher | DrawFailed:
        guide = one.guide
        if guide.matcher is None or guide.is_past(one.position):
            try:
                made = self._making(guide.grammar).result(max(deadline_s - monotonic(), 0.0))
            except TimeoutError:
                return DrawFailed("its grammar could not be made in time")
            except Exception as error:  # noqa: BLE001 - whatever the tokenizer or grammar is, it is this request's
                return DrawFailed(f"its grammar could not be made: {error}"[:_ERROR_CHARACTERS])
            guide.begin(made.deep_copy())
        assert guide.matcher is not None, "it has just begun"  # noqa: S101 - for the type checker
        drawn = None if one.awaits is None else token_of(before[one.awaits])
        guide.matcher.consume_tokens(guide.untold(one.position, drawn))
        return _fault(guide.matcher) or guide.matcher

    def _making(self, grammar: str) -> Future[LLMatcher]:
        with self._lock:
            making = self._made.pop(grammar, None) or self._pool.submit(self._make, grammar)
            self._made[grammar] = making
            done = next((text for text, made in self._made.items() if made.done()), None)
            if done is not None and len(self._made) > _KEPT:
                del self._made[done]
        return making

    def _make(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:  # 0.2 s and 44 MB for 49,152 tokens: not before somebody asks
            text, ends = self._files.tokenizer_json.decode(), list(self._files.eos_ids)
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocabulary, eos_token=ends)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the dearest one, and copies start with what it has found
        return matcher


def _fault(matcher: LLMatcher) -> DrawFailed | None:
    if not matcher.is_error():
        return None
    return DrawFailed(f"its grammar cannot be followed: {' '.join(matcher.get_error().split())}"[:_ERROR_CHARACTERS])
