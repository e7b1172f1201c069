"""Answers that follow a grammar: which tokens may come next, for all rows of a step in one call. No torch here."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import llguidance.numpy
import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from services.worker.executor import Draw, DrawFailed
from services.worker.history import History
from shared.protocol.messages import TokenizerFiles

Allowed = npt.NDArray[np.bool_]
"""For each token of the vocabulary whether it may come next."""

_COMPILE_S = 60.0
"""A grammar that is not ready by then fails its request; the largest that gateways let pass take about a second."""


@dataclass(slots=True)
class _Following:
    """A matcher, and how much of the output it has been fed."""

    matcher: LLMatcher
    fed: int = 0


class Grammars:
    """Follows the grammars of the requests that have one, from the histories of their draws.

    What was drawn is fed from the history, whoever drew it: so a request goes on after it was preempted, and on a
    worker that had never heard of it, as if nothing had been.
    """

    def __init__(self, files: TokenizerFiles, vocabulary: int) -> None:
        self._files = files
        self._vocabulary = vocabulary
        self._aside = ThreadPoolExecutor(1, "grammars")
        self._executor = LLExecutor(os.cpu_count() or 1)
        self._tokenizer: LLTokenizer | None = None
        self._followings: WeakKeyDictionary[History, Future[_Following]] = WeakKeyDictionary()

    def begin(self, draws: Sequence[Draw]) -> None:
        """Compile, aside, what these draws need: it is there when the model has run."""
        for draw in draws:
            if draw.sampling.grammar and draw.history is not None and draw.history not in self._followings:
                self._followings[draw.history] = self._aside.submit(self._compile, draw.sampling.grammar)

    def allowed(self, draws: Sequence[Draw]) -> Mapping[int, Allowed | DrawFailed]:
        """Return what may be drawn, by the place of the draw; only for those that have a grammar."""
        self.begin(draws)
        places = [place for place, draw in enumerate(draws) if draw.sampling.grammar]
        found: dict[int, Allowed | DrawFailed] = {}
        matchers: list[tuple[LLMatcher, int]] = []
        for place in places:
            matcher = self._matcher_at(draws[place])
            if isinstance(matcher, DrawFailed):
                found[place] = matcher
            else:
                matchers.append((matcher, place))
        return found | self._masks(matchers)

    def _masks(self, matchers: Sequence[tuple[LLMatcher, int]]) -> dict[int, Allowed | DrawFailed]:
        if not matchers:
            return {}
        masks = llguidance.numpy.allocate_token_bitmask(len(matchers), self._vocabulary)
        rows = [(matcher, row) for row, (matcher, _) in enumerate(matchers)]
        llguidance.numpy.fill_next_token_bitmask_par(self._executor, rows, masks)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, count=self._vocabulary, bitorder="little").view(np.bool_)
        return {
            place: _failure(matcher.get_error()) if matcher.is_error() else bits[row]
            for row, (matcher, place) in enumerate(matchers)
        }

    def _matcher_at(self, draw: Draw) -> LLMatcher | DrawFailed:
        """Return the matcher of a request, fed with all of its output."""
        history = draw.history
        if history is None:
            return DrawFailed("a grammar without the history of its answer")
        try:
            following = self._followings[history].result(_COMPILE_S)
        except Exception as error:  # noqa: BLE001 - whatever a grammar comes to ends its own request only
            return _failure(str(error) or type(error).__name__)
        following.matcher.consume_tokens(history.output_since(following.fed))
        following.fed = history.output_tokens
        return _failure(following.matcher.get_error()) if following.matcher.is_error() else following.matcher

    def _compile(self, grammar: str) -> _Following:
        if self._tokenizer is None:  # 0.2 s, which only those wait for who need it
            text, ends = self._files.tokenizer_json.decode(), list(self._files.eos_ids)
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocabulary, eos_token=ends)
        return _Following(LLMatcher(self._tokenizer, grammar, log_level=0))


def _failure(why: str) -> DrawFailed:
    return DrawFailed(f"the grammar cannot be followed: {why.partition(chr(10))[0][:200]}")


def allowed_by(grammars: Grammars | None, draws: Sequence[Draw]) -> Mapping[int, Allowed | DrawFailed]:
    """Return what the grammars of a step allow; without any `Grammars` whoever has one fails."""
    if not any(draw.sampling.grammar for draw in draws):
        return {}
    if grammars is not None:
        return grammars.allowed(draws)
    failed = _failure("this worker has no tokenizer")
    return {place: failed for place, draw in enumerate(draws) if draw.sampling.grammar}
