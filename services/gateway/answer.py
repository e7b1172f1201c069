"""One answer and which of its tokens are accepted (DESIGN §4). Pure: no I/O, no clock.

A gateway takes tokens of the present attempt, from the first worker heard in it, without a gap. Everything else is
dropped, or says that the answer has to be asked for again.
"""

from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from shared.ids import EntryId, GatewayId, RequestId, WorkerId, entry_key
from shared.protocol.messages import Finish, Logprobs, Sampling, SubmitRequest, TokenRow

FRUITLESS_ATTEMPTS = 3
"""Attempts in a row without a new token after which a request is given up."""


NOBODY = RequestId("")
"""Whose prompt is computed by an answer that waits for none."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of the pool: the same in every attempt."""

    request: RequestId
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    ignore_eos: bool
    eos_ids: frozenset[int]
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    shares_with: RequestId = NOBODY

    def is_ended_by(self, token_id: int) -> bool:
        """Return whether a token ends the answer: it is counted, and never shown."""
        if token_id in self.eos_ids and not self.ignore_eos:
            return True
        return token_id in self.sampling.stop_token_ids


@dataclass(frozen=True, slots=True)
class Accepted:
    """The new tokens of a row, perhaps none, and whether the answer ends with them."""

    token_ids: tuple[int, ...] = ()
    finish: Finish | None = None
    logprobs: tuple[Logprobs, ...] = ()
    """One for each token, if the worker told any."""
    of_prompt: tuple[Logprobs, ...] = ()
    """Those of the next tokens of the prompt."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The present attempt is lost."""

    why: Literal["gap", "two workers", "not held"]


class Answer:
    """The tokens of one answer and the position of its present attempt."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.output_ids: list[int] = []
        self.attempt = 1
        self.worker: WorkerId | None = None
        self.is_sent = False
        """Whether the present attempt is written, or being written."""
        self.entry: EntryId | None = None
        """Where the present attempt stands in ``requests``, once that is known."""
        self.arrival = EntryId("")
        """Where the first attempt stood: the place in line, for ever."""
        self._prompt_untold = len(wanted.prompt_ids) - 1 if wanted.sampling.prompt_logprobs is not None else 0
        """Tokens of the prompt, of which no logprobs have come; of its first none ever do."""
        self._fruitless = 0
        self._tokens_before_attempt = 0
        self._cached_tokens: int | None = None

    @property
    def cached_tokens(self) -> int:
        """Return how many tokens of the prompt were found in a prefix cache; 0 until there is a token.

        What the row with the answer's first token said, never more than the prompt has. A recovered request keeps this
        figure: that a later attempt finds the prompt cached is no saving to the client who has waited for it once.
        """
        return self._cached_tokens or 0

    def submission(self, gateway: GatewayId) -> SubmitRequest:
        """Return the present attempt as a message: no token that was accepted is asked for twice.

        Nor what the worker would compute the whole prompt for, if all of that has come.
        """
        wanted = self.wanted
        sampling = wanted.sampling if self._prompt_untold else replace(wanted.sampling, prompt_logprobs=None)
        return SubmitRequest(
            request=wanted.request,
            attempt=self.attempt,
            gateway=gateway,
            prompt_ids=wanted.prompt_ids,
            max_tokens=wanted.max_tokens,
            sampling=sampling,
            output_ids=tuple(self.output_ids),
            arrival=self.arrival,
            ignore_eos=wanted.ignore_eos,
            priority=wanted.priority,
            tenant=wanted.tenant,
            cache_salt=wanted.cache_salt,
            shares_with=wanted.shares_with,
        )

    def submitted(self, attempt: int, entry: EntryId) -> None:
        """Note where an attempt stands in the waiting line."""
        self.arrival = self.arrival or entry
        if attempt == self.attempt:
            self.entry = entry

    def accept(self, worker: WorkerId, row: TokenRow) -> Accepted | Lost:
        """Return only what is new; `Lost` when the answer has to be asked for again."""
        if row.attempt != self.attempt:
            return Accepted()
        if self.worker not in {None, worker}:
            return Lost("two workers")
        have = len(self.output_ids)
        of_prompt = self._of_prompt(row)
        if row.first_index > have or of_prompt is None:
            return Lost("gap")
        self.worker = worker
        self._prompt_untold -= len(of_prompt)
        if row.first_index + len(row.token_ids) < have:
            return Accepted()
        new, logprobs = row.token_ids[have - row.first_index :], row.logprobs[have - row.first_index :]
        self.output_ids += new
        if new and self._cached_tokens is None:
            self._cached_tokens = max(0, min(row.cached_tokens, len(self.wanted.prompt_ids)))
        return Accepted(new, row.finish, logprobs, of_prompt)

    def _of_prompt(self, row: TokenRow) -> tuple[Logprobs, ...] | None:
        """Return what is new of what a row tells of the prompt; None if what must come before has not."""
        if not self._prompt_untold:
            return ()
        first = len(self.wanted.prompt_ids) - self._prompt_untold
        if row.prompt_first > first:
            return None
        new = row.prompt_logprobs[first - row.prompt_first :][: self._prompt_untold]
        return None if row.token_ids and len(new) < self._prompt_untold else new

    def is_missing(self, read_to: EntryId, held_attempt: int | None) -> bool:
        """Say whether the leader, who has read that far and holds that attempt, no longer knows of this one."""
        if self.entry is None or held_attempt == self.attempt:
            return False
        return entry_key(self.entry) <= entry_key(read_to)

    @property
    def has_brought_tokens(self) -> bool:
        """True if a token of the present attempt was accepted: some worker runs it."""
        return len(self.output_ids) > self._tokens_before_attempt

    def complete(self) -> Finish | None:
        """Return how the accepted tokens end the answer by themselves, if they do."""
        if self.output_ids and self.wanted.is_ended_by(self.output_ids[-1]):
            return "stop"
        return "length" if len(self.output_ids) >= self.wanted.max_tokens else None

    def try_again(self, *, blameless: bool = False) -> bool:
        """Begin the next attempt; False if the last three in a row brought no token.

        A blameless loss (the gateway itself was declared dead) does not count.
        """
        if self.has_brought_tokens:
            self._fruitless = 0
        elif not blameless:
            self._fruitless += 1
        if self._fruitless >= FRUITLESS_ATTEMPTS:
            return False
        self.attempt += 1
        self._tokens_before_attempt = len(self.output_ids)
        self.worker = None
        self.is_sent = False
        self.entry = None
        return True
