"""Measures how long an idle server's steps take, as a client that only sees tokens come.

A decode step is the gap between two tokens of a stream while a known number of streams runs. A prompt's steps are the
time to its first token, less what every request takes beyond its steps: the time to the first token of a prompt of one
token, less one step of one stream.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise

import numpy as np

from loadgen.calibrate_fit import Point, decode_point, prompt_point
from loadgen.calibrate_settings import CalibrateSettings
from loadgen.client import Client, Record, Target
from loadgen.lengths import Span
from loadgen.measure import Arrival, arrivals_of
from loadgen.prompts import Request, Workload, draw_requests
from loadgen.server import CannotStart, choose_model, open_session
from shared.runtime.clock import Clock

SHORT_PROMPT = 16
LONG_PROMPTS = (256, 1024)
STEPS_WANTED = 12
MIN_STEPS = 5
_SPARE_STEPS = 8
"""How many steps a stream may start later than its prompt's turn would have it."""
_GRACE_S = 30.0
"""How long what was begun in time may last beyond it."""
_GROWTH = 1.3
"""How much longer than the last batch's steps those of the next one are taken to be."""


class LeftOut(Exception):
    """A point cannot be measured here; the text says why."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Lone prompts to be timed, one after another."""

    tokens: int
    repeats: int

    def __str__(self) -> str:
        return f"prompt of {self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class Batch:
    """Streams to be timed while all of them run."""

    streams: int
    prompt_tokens: int

    def __str__(self) -> str:
        return f"{self.streams} streams after prompts of {self.prompt_tokens} tokens"


@dataclass(frozen=True, slots=True)
class Measurements:
    """What a server showed. `left_out` are sentences."""

    model: str
    overhead_ms: float
    points: tuple[Point, ...]
    left_out: tuple[str, ...]


def to_measure(step_tokens: int, max_streams: int) -> list[Prompts | Batch]:
    """Return what to measure, what tells most first: should time run out, what is left out matters least."""
    streams = _doubling(1, max_streams)
    within_a_step = [Prompts(tokens, 5 if tokens <= SHORT_PROMPT else 3) for tokens in _doubling(2, step_tokens)]
    tail = step_tokens // 8  # a last chunk of another size tells what a position costs from what a pair costs
    longer = [Prompts(tokens, 3) for tokens in (step_tokens + tail, 2 * step_tokens, 3 * step_tokens - tail)]
    batches = [Batch(number, tokens) for tokens in LONG_PROMPTS for number in streams]
    batches.sort(key=lambda batch: batch.streams * batch.prompt_tokens)
    return [*within_a_step, *(Batch(number, SHORT_PROMPT) for number in streams[1:]), *longer, *batches]


def _doubling(low: int, high: int) -> list[int]:
    """Return low, 2 low, 4 low, ... and high itself."""
    return sorted({*(low << power for power in range((high // low).bit_length())), high})


async def measure(settings: CalibrateSettings, clock: Clock, say: Callable[[str], None]) -> Measurements:
    """Measure a server; `say` is told how it goes. Raises `CannotStart`."""
    key = settings.api_key.get_secret_value() if settings.api_key else None
    async with open_session(key) as session:
        model = await choose_model(session, settings.url, settings.model)
        target = Target(
            settings.url,
            model,
            "completions",
            temperature=0.0,
            ignore_eos=True,
            continuous_usage=True,
            timeout_s=settings.budget_s,
        )
        ends_s = clock() + settings.budget_s
        probe = _Probe(lambda timeout_s: Client(session, replace(target, timeout_s=timeout_s), clock), target)
        return await _Survey(probe, settings, clock, ends_s, say).run(model)


class _Survey:
    """Goes through all there is to measure, as far as the time allows."""

    def __init__(
        self, probe: "_Probe", settings: CalibrateSettings, clock: Clock, ends_s: float, say: Callable[[str], None]
    ) -> None:
        self._probe = probe
        self._settings = settings
        self._clock = clock
        self._ends_s = ends_s
        self._say = say
        self._overhead_s = 0.0
        self._token_s = 0.0
        self._step_s = 0.0

    async def run(self, model: str) -> Measurements:
        points = [await self._first()]
        left_out: list[str] = []
        for what in to_measure(self._settings.step_tokens, self._settings.max_streams):
            try:
                points.append(await self._measured(what))
                self._say(f"{what}: {points[-1].ms:.1f} ms")
            except LeftOut as why:
                left_out.append(f"{what}: {why}")
                self._say(f"{left_out[-1]} (left out)")
        return Measurements(model, self._overhead_s * 1000, tuple(points), tuple(left_out))

    async def _first(self) -> Point:
        """Return one stream's step, and learn what a request takes beyond its steps."""
        try:
            await self._probe.first_token_s(SHORT_PROMPT, _GRACE_S)  # the first request of all may find a server asleep
            step_s, context = await self._probe.step_s(Batch(1, SHORT_PROMPT), self._settings.step_tokens, _GRACE_S)
            first_s = await self._probe.median_first_token_s(Prompts(1, 7), _GRACE_S)
        except LeftOut as why:
            raise CannotStart(f"nothing can be measured: {why}") from why
        self._overhead_s = max(0.0, first_s - step_s)
        self._token_s, self._step_s = first_s, step_s
        self._say(f"1 stream after a prompt of {SHORT_PROMPT} tokens: {step_s * 1000:.1f} ms")
        self._say(f"a request beyond its steps: {self._overhead_s * 1000:.1f} ms")
        return decode_point(1, context, step_s * 1000)

    async def _measured(self, what: Prompts | Batch) -> Point:
        left_s = self._ends_s - self._clock()
        if self._guess_s(what) > left_s:
            raise LeftOut("no time left for it in --budget-s")
        timeout_s = left_s + _GRACE_S
        if isinstance(what, Prompts):
            first_s = await self._probe.median_first_token_s(what, timeout_s)
            self._token_s = first_s / what.tokens
            return prompt_point(
                what.tokens, (first_s - self._overhead_s) * 1000, step_tokens=self._settings.step_tokens
            )
        self._step_s, context = await self._probe.step_s(what, self._settings.step_tokens, timeout_s)
        return decode_point(what.streams, context, self._step_s * 1000)

    def _guess_s(self, what: Prompts | Batch) -> float:
        if isinstance(what, Prompts):
            return what.repeats * what.tokens * self._token_s
        prefill_s = what.streams * what.prompt_tokens * self._token_s
        return prefill_s + output_tokens(what, self._settings.step_tokens) * self._step_s * _GROWTH


class _Probe:
    """Sends fresh prompts and says when their tokens came. Raises `LeftOut` if a request fails."""

    def __init__(self, client: Callable[[float], Client], target: Target) -> None:
        self._client = client
        self._target = target
        self._numbers = count()

    async def median_first_token_s(self, what: Prompts, timeout_s: float) -> float:
        return float(np.median([await self.first_token_s(what.tokens, timeout_s) for _ in range(what.repeats)]))

    async def first_token_s(self, tokens: int, timeout_s: float) -> float:
        record = await self._ask(self._client(timeout_s), self._request(tokens, 1))
        return tokens_of(record)[0].at_s - record.sent_s

    async def step_s(self, batch: Batch, step_tokens: int, timeout_s: float) -> tuple[float, float]:
        """Return the seconds of a step with all streams, and the positions that each of them read on average."""
        client, tokens = self._client(timeout_s), output_tokens(batch, step_tokens)
        requests = [self._request(batch.prompt_tokens, tokens) for _ in range(batch.streams)]
        async with asyncio.TaskGroup() as streams:
            asked = [streams.create_task(self._ask(client, request)) for request in requests]
        return step_while_all_run([tokens_of(stream.result()) for stream in asked], batch.prompt_tokens)

    def _request(self, tokens: int, output_tokens: int) -> Request:
        workload = Workload("completions", Span(tokens, tokens), Span(output_tokens, output_tokens), 0.0)
        return replace(next(draw_requests(workload, secrets.randbits(64))), index=next(self._numbers))

    async def _ask(self, client: Client, request: Request) -> Record:
        return await client.ask(request, self._target.body(request), intended_s=0.0)


def output_tokens(batch: Batch, step_tokens: int) -> int:
    """Return how long answers must be for the first stream to run on until the last has joined and been timed."""
    steps_of_prompts = -(-batch.streams * batch.prompt_tokens // step_tokens)
    return steps_of_prompts + steps_of_prompts // 4 + _SPARE_STEPS + STEPS_WANTED


def tokens_of(record: Record) -> list[Arrival]:
    """Return when a request's tokens came. Raises `LeftOut` if it failed or that cannot be told."""
    if record.failure is not None:
        raise LeftOut(f"{record.failure.name}: {record.failure.message}")
    source, arrivals = arrivals_of(record.answer)
    if source == "unknown" or not arrivals:
        raise LeftOut("chunks came with an unknown number of tokens")
    return arrivals


def step_while_all_run(streams: Sequence[Sequence[Arrival]], prompt_tokens: int) -> tuple[float, float]:
    """Return the median seconds from token to token, and the positions read, while every stream runs.

    All run from the moment when the last has its first token until the first has its last. Raises `LeftOut` if that
    is hardly ever.
    """
    begins_s = max(stream[0].at_s for stream in streams)
    ends_s = min(stream[-1].at_s for stream in streams)
    gaps_s: list[float] = []
    positions: list[int] = []
    for stream in streams:
        had = 0
        for former, later in pairwise(stream):
            had += former.tokens
            if former.at_s >= begins_s and later.at_s <= ends_s:
                # a chunk of several tokens stands for as many steps
                gaps_s += [(later.at_s - former.at_s) / later.tokens] * later.tokens
                positions += range(prompt_tokens + had, prompt_tokens + had + later.tokens)
    if len(gaps_s) < MIN_STEPS * len(streams):
        raise LeftOut(f"the server hardly ever ran {len(streams)} at once")
    return float(np.median(gaps_s)), float(np.mean(positions))
