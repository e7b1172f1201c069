"""What was fed and drawn of one request, as far as the draw of its next token depends on it. No torch here."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from shared.protocol.messages import Sampling, SubmitRequest

_Ids = npt.NDArray[np.int64]
_SOME = 64


class History:
    """Counts the tokens of an output that others append to; what was counted is not looked at again."""

    def __init__(self, output_ids: Sequence[int], *, prompt_ids: Sequence[int], ending_ids: Iterable[int]) -> None:
        self.ending_ids: _Ids = np.array(sorted(ending_ids), dtype=np.int64)
        """The tokens that may end the answer."""
        self._output_ids = output_ids
        self._counted = 0
        prompt = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._places: dict[int, int] = {token_id: place for place, token_id in enumerate(prompt.tolist())}
        self._ids: _Ids = np.concatenate([prompt, np.zeros(_SOME, dtype=np.int64)])
        self._counts = np.zeros(self._ids.shape, dtype=np.float32)

    @property
    def output_tokens(self) -> int:
        """Tokens of the output so far."""
        return len(self._output_ids)

    def seen(self) -> tuple[_Ids, npt.NDArray[np.float32]]:
        """Return every token seen, once, and how often the output has it: 0 for one of the prompt alone."""
        for token_id in self._output_ids[self._counted :]:
            self._count(token_id)
        self._counted = len(self._output_ids)
        seen = len(self._places)
        return self._ids[:seen], self._counts[:seen]

    def _count(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += 1


def penalises(sampling: Sampling) -> bool:
    """Return whether tokens that were seen change a draw."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty) or sampling.repetition_penalty != 1


def history_of(submit: SubmitRequest, output_ids: Sequence[int], eos_ids: Iterable[int]) -> History | None:
    """Return the history of a request that others append output to; None if no draw of it depends on one."""
    sampling = submit.sampling
    if not penalises(sampling) and not sampling.min_tokens:
        return None
    # only a repetition penalty looks at the prompt
    prompt_ids = submit.prompt_ids if sampling.repetition_penalty != 1 else ()
    return History(output_ids, prompt_ids=prompt_ids, ending_ids={*eos_ids, *sampling.stop_token_ids})
