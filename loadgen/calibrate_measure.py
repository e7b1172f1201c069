"""Measures how long an idle server's steps take, as a client that only sees tokens come.

A decode step is the gap between two tokens of a stream while a known number of streams runs; a mixed one is such a gap
with a prompt's first token at its end. A lone prompt shows the time to its first token, which has more in it than its
steps: what more is left to the fit.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from loadgen.calibrate_cells import SHORT_PROMPT, STEPS_WANTED, Batch, Cell, Mixed, Prompts, output_tokens, to_measure
from loadgen.calibrate_fit import Point, decode_point, mixed_point, prompt_point
from loadgen.calibrate_settings import CalibrateSettings
from loadgen.calibrate_steps import LeftOut, step_while_all_run, step_with_a_prompt, tokens_of
from loadgen.client import Client, Record, Target
from loadgen.lengths import Span
from loadgen.prompts import Request, Workload, draw_requests
from loadgen.server import CannotStart, choose_model, open_session
from shared.runtime.clock import Clock

_GRACE_S = 30.0
"""How long what was begun in time may last beyond it."""
_GROWTH = 1.3
"""How much longer than the last batch's steps those of the next one are taken to be."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """What a server showed. `left_out` are sentences."""

    model: str
    points: tuple[Point, ...]
    left_out: tuple[str, ...]


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
        self._token_s = 0.0
        self._step_s = 0.0

    async def run(self, model: str) -> Measurements:
        points = [await self._first()]
        left_out: list[str] = []
        too_late: list[str] = []
        for what in to_measure(self._settings.step_tokens, self._settings.max_streams):
            left_s = self._ends_s - self._clock()
            if self._guess_s(what) > left_s:
                too_late.append(str(what))
                continue
            try:
                points.append(await self._measured(what, left_s + _GRACE_S))
                self._say(f"{what}: {points[-1].ms:.1f} ms")
            except LeftOut as why:
                left_out.append(f"{what}: {why}")
                self._say(f"{left_out[-1]} (left out)")
        if too_late:
            left_out.append(f"for want of time (--budget-s {self._settings.budget_s:g}), {'; '.join(too_late)}")
            self._say(f"left out {left_out[-1]}")
        return Measurements(model, tuple(points), tuple(left_out))

    async def _first(self) -> Point:
        """Return one stream's step, and find out whether anything can be measured at all."""
        alone, timeout_s = Batch(1, SHORT_PROMPT), self._settings.budget_s + _GRACE_S
        try:
            self._token_s = await self._probe.first_token_s(SHORT_PROMPT, timeout_s)  # of a server asleep, perhaps
            self._step_s, context = await self._probe.step_s(alone, self._settings.step_tokens, timeout_s)
        except LeftOut as why:
            raise CannotStart(f"nothing can be measured: {why}") from why
        self._say(f"{alone}: {self._step_s * 1000:.1f} ms")
        return decode_point(1, context, self._step_s * 1000)

    async def _measured(self, what: Cell, timeout_s: float) -> Point:
        step_tokens = self._settings.step_tokens
        match what:
            case Prompts():
                first_s = await self._probe.median_first_token_s(what, timeout_s)
                self._token_s = min(self._token_s, first_s / what.tokens)  # short ones are all overhead
                return prompt_point(what.tokens, first_s * 1000, step_tokens=step_tokens)
            case Batch():
                self._step_s, context = await self._probe.step_s(what, step_tokens, timeout_s)
                return decode_point(what.streams, context, self._step_s * 1000)
            case Mixed():
                step_s, context = await self._probe.mixed_step_s(what, step_tokens, timeout_s)
                return mixed_point(what.batch.streams, context, what.tokens, step_s * 1000)

    def _guess_s(self, what: Cell) -> float:
        match what:
            case Prompts():
                return what.repeats * what.tokens * self._token_s
            case Batch():
                prefill_s = what.streams * what.prompt_tokens * self._token_s
                return prefill_s + output_tokens(what, self._settings.step_tokens) * self._step_s * _GROWTH
            case Mixed():
                return self._guess_s(what.batch) + STEPS_WANTED * what.tokens * self._token_s


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
        async with asyncio.TaskGroup() as group:
            asked = self._begin(group, batch, step_tokens, timeout_s)
        return step_while_all_run([tokens_of(stream.result()) for stream in asked], batch.prompt_tokens)

    async def mixed_step_s(self, mixed: Mixed, step_tokens: int, timeout_s: float) -> tuple[float, float]:
        """Return the seconds of a step with all streams and a prompt, and the positions that each stream read."""
        client, joined = self._client(timeout_s), list[Record]()
        async with asyncio.TaskGroup() as group:
            asked = self._begin(group, mixed.batch, step_tokens, timeout_s)
            while not any(stream.done() for stream in asked) and not any(record.failure for record in joined[-1:]):
                joined.append(await self._ask(client, self._request(mixed.tokens, 1)))
        streams = [tokens_of(stream.result()) for stream in asked]
        moments = [(record.sent_s, tokens_of(record)[0].at_s) for record in joined]
        return step_with_a_prompt(streams, moments, mixed.batch.prompt_tokens)

    def _begin(
        self, group: asyncio.TaskGroup, batch: Batch, step_tokens: int, timeout_s: float
    ) -> list[asyncio.Task[Record]]:
        client, tokens = self._client(timeout_s), output_tokens(batch, step_tokens)
        requests = [self._request(batch.prompt_tokens, tokens) for _ in range(batch.streams)]
        return [group.create_task(self._ask(client, request)) for request in requests]

    def _request(self, tokens: int, output_tokens: int) -> Request:
        workload = Workload("completions", Span(tokens, tokens), Span(output_tokens, output_tokens), 0.0)
        return replace(next(draw_requests(workload, secrets.randbits(64))), index=next(self._numbers))

    async def _ask(self, client: Client, request: Request) -> Record:
        return await client.ask(request, self._target.body(request), intended_s=0.0)
