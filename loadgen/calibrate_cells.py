"""What ``loadgen calibrate`` measures, and in which order."""

from dataclasses import dataclass

SHORT_PROMPT = 16
LONG_PROMPTS = (256, 1024)
STEPS_WANTED = 12
_SPARE_STEPS = 8
"""How many steps a stream may start later than its prompt's turn would have it."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Lone prompts to be timed, one after another."""

    tokens: int
    repeats: int

    def __str__(self) -> str:
        return f"prompt of {self.tokens} token{'s' if self.tokens > 1 else ''}"


@dataclass(frozen=True, slots=True)
class Batch:
    """Streams to be timed while all of them run."""

    streams: int
    prompt_tokens: int

    def __str__(self) -> str:
        return f"{self.streams} stream{'s' if self.streams > 1 else ''} after {self.prompt_tokens} tokens of prompt"


@dataclass(frozen=True, slots=True)
class Mixed:
    """Lone prompts that join a running batch, one after another."""

    batch: Batch
    tokens: int

    def __str__(self) -> str:
        return f"prompt of {self.tokens} tokens beside {self.batch}"


Cell = Prompts | Batch | Mixed


def to_measure(step_tokens: int, max_streams: int) -> list[Cell]:
    """Return what to measure, what tells most first: should time run out, what is left out matters least.

    Prompts within a step are measured from short to long and, later, back again: a machine that grows faster or slower
    meanwhile would otherwise seem to be faster or slower at long ones.
    """
    streams = _doubling(1, max_streams)
    within_a_step = [Prompts(tokens, 5 if tokens <= SHORT_PROMPT else 3) for tokens in _doubling(1, step_tokens)]
    tail = step_tokens // 8  # a last chunk of another size tells what a position costs from what a pair costs
    longer = [Prompts(tokens, 3) for tokens in (step_tokens + tail, 2 * step_tokens, 3 * step_tokens - tail)]
    batches = [Batch(number, tokens) for tokens in LONG_PROMPTS for number in streams]
    batches.sort(key=lambda batch: batch.streams * batch.prompt_tokens)
    mixed = [
        Mixed(Batch(number, SHORT_PROMPT), step_tokens // part)
        for number, part in ((8, 4), (8, 2), (32, 2))
        if number <= min(max_streams, step_tokens // 2)
    ]
    short = [Batch(number, SHORT_PROMPT) for number in streams[1:]]
    return [*within_a_step, *short, *reversed(within_a_step), *mixed, *longer, *batches]


def _doubling(low: int, high: int) -> list[int]:
    """Return low, 2 low, 4 low, ... and high itself."""
    return sorted({*(low << power for power in range((high // low).bit_length())), high})


def output_tokens(batch: Batch, step_tokens: int) -> int:
    """Return how long answers must be for the first stream to run on until the last has joined and been timed."""
    steps_of_prompts = -(-batch.streams * batch.prompt_tokens // step_tokens)
    return steps_of_prompts + steps_of_prompts // 4 + _SPARE_STEPS + STEPS_WANTED
