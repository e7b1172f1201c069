"""How far a request has come in its grammar. The ledger makes it; only the thread of the steps feeds its matcher."""

from collections.abc import Sequence

from llguidance import LLMatcher

from shared.protocol.messages import SubmitRequest


class Guide:
    """The grammar that an output follows which others append to; each of its tokens is told exactly once."""

    def __init__(self, submit: SubmitRequest, output_ids: Sequence[int]) -> None:
        self.grammar = submit.sampling.grammar
        self.matcher: LLMatcher | None = None
        self._prompt_tokens = len(submit.prompt_ids)
        self._output_ids = output_ids
        self._told = 0

    def begin(self, matcher: LLMatcher) -> None:
        """Follow with this matcher, which has been told nothing yet."""
        self.matcher, self._told = matcher, 0

    def is_past(self, position: int) -> bool:
        """Return whether more was told than comes before this position of prompt + output."""
        return self._told > position - self._prompt_tokens

    def untold(self, position: int, drawn: int | None) -> list[int]:
        """Return the tokens before a position that were not told yet, as told from now on.

        ``drawn`` is the last of them if the step before has drawn it: the output may not have it yet.
        """
        wanted = position - self._prompt_tokens
        untold = list(self._output_ids[self._told : wanted])
        if drawn is not None and self._told + len(untold) < wanted:
            untold.append(drawn)
        self._told = wanted
        return untold


def guide_of(submit: SubmitRequest, output_ids: Sequence[int]) -> Guide | None:
    """Return what guides a request that others append output to; None if its answer is free."""
    return Guide(submit, output_ids) if submit.sampling.grammar else None
