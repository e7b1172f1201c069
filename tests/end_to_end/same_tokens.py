"""Greedy tokens of the whole system beside those of transformers: the courses, and how one of them is run."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shared.scheduling.policies import POLICIES
from tests.end_to_end.token_client import Wanted, token_client
from tests.equivalence.oracle import assert_equal_or_tie, reference_tokens
from tests.integration.processes import slipstream_up, variable_of

MODEL = "equal"
_LENGTHS = (2, 600, 15, 16, 1, 37, 17, 100, 250, 33, 400, 64)
"""The first four fill a small pool to the last block as soon as the second one is in: the next token preempts."""
_VOCABULARY = 49_000
_STAGGER_S = 0.05
_BLOCK = 16
_LEAVER_TOKENS = 150
"""More than it gets before it leaves, and no more than the smallest pool holds."""


@dataclass(frozen=True)
class Course:
    """One way to run the services."""

    name: str
    flags: tuple[str, ...]
    holds: int = 0
    """Paged, in a pool that holds so many of the longest requests, and one block more; 0: the default pool."""

    def all_flags(self, wanted: Sequence["Ask"]) -> tuple[str, ...]:
        """Return the flags for these prompts."""
        longest = max(len(ask.prompt) + ask.max_tokens for ask in wanted)
        pool = self.holds * -(-longest // _BLOCK) * _BLOCK + _BLOCK
        return (*self.flags, "--kv", "paged", "--kv-tokens", str(pool)) if self.holds else self.flags


COURSES = (
    Course("static", ("--policy", "static")),
    Course("orca", ("--policy", "orca")),
    Course("sarathi in chunks of 16", ("--policy", "sarathi", "--max-num-batched-tokens", "16")),
    Course("sarathi in chunks of 512", ("--policy", "sarathi", "--max-num-batched-tokens", "512")),
    Course("static, preempting", ("--policy", "static"), holds=1),
    Course("orca, preempting", ("--policy", "orca"), holds=1),
    Course("sarathi, preempting", ("--policy", "sarathi"), holds=1),
)
CROWDED = tuple(Course(policy, ("--policy", policy, "--plan-depth", "3"), holds=3) for policy in POLICIES)
"""KV memory for three requests of a dozen, under every policy."""


@dataclass(frozen=True)
class Ask:
    """One prompt and how many tokens are wanted."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Came:
    """What a course came to: answers equal to the reference and ties, and how often each request was preempted."""

    equal: int
    ties: int
    preempted: Counter[str]

    @property
    def preemptions(self) -> int:
        """Preemptions of all requests together."""
        return self.preempted.total()


def asks(count: int, max_tokens: int, seed: int = 1) -> list[Ask]:
    """Return prompts of lengths 1 to 600 from a seed; answers differ in length, so that requests leave mid-flight."""
    draw = random.Random(seed)
    return [
        Ask(tuple(draw.randrange(100, _VOCABULARY) for _ in range(length)), max_tokens - 3 * (number % 4))
        for number, length in enumerate(_LENGTHS[:count])
    ]


def crowd(count: int, max_tokens: int, seed: int = 5) -> list[Ask]:
    """Return prompts of like lengths, so that three of them fill a pool for three."""
    draw = random.Random(seed)
    return [
        Ask(tuple(draw.randrange(100, _VOCABULARY) for _ in range(33 + number)), max_tokens) for number in range(count)
    ]


def run_course(course: Course, wanted: Sequence[Ask], model_folder: Path, folder: Path) -> Came:
    """Run all prompts at the same time, with staggered starts, and compare token for token. Raises AssertionError."""
    expected = [_reference(model_folder, ask) for ask in wanted]
    flags = (
        "--dtype",
        "float32",
        "--served-model-name",
        MODEL,
        "--model",
        str(model_folder),
    )
    with slipstream_up(folder, "--log-level", "debug", *flags, *course.all_flags(wanted)) as up:
        up.until_ready(within_s=120)
        redis_url = variable_of(up.part("worker"), "SLIPSTREAM_REDIS_URL")
        names, got = asyncio.run(_answers(redis_url, wanted))
        plans = up.events("plan")
    _check_first_never_gives_way(names, plans)
    verdicts = [
        assert_equal_or_tie(model_folder, ask.prompt, tokens, reference)
        for ask, tokens, reference in zip(wanted, got, expected, strict=True)
    ]
    preempted = Counter(request for plan in plans for request in plan["preempted"])
    return Came(verdicts.count("equal"), verdicts.count("tie"), preempted)


def _check_first_never_gives_way(names: Sequence[str], plans: Sequence[dict[str, Any]]) -> None:
    """Check that of those not yet released the one that came first is in no plan among the preempted."""
    left = list(names)
    for plan in plans:
        left = [name for name in left if name not in plan["released"]]
        assert not left or left[0] not in plan["preempted"], plan


@cache
def _reference(model_folder: Path, ask: Ask) -> tuple[int, ...]:
    return reference_tokens(model_folder, ask.prompt, ask.max_tokens, ignore_eos=True)


async def _answers(redis_url: str, wanted: Sequence[Ask]) -> tuple[list[str], list[tuple[int, ...]]]:
    async with token_client(redis_url, MODEL) as client:
        names = []
        leaver = None
        for ask in wanted:
            names += await client.submit(Wanted(ask.prompt, ask.max_tokens))
            leaver = leaver or (await client.submit(Wanted(ask.prompt, _LEAVER_TOKENS)))[0]
            await asyncio.sleep(_STAGGER_S)  # arrivals spread over the first iterations: part of what is tried
        assert leaver is not None
        await client.first_token(leaver)
        await client.cancel(leaver)
        return names, [await client.answer(name) for name in names]
