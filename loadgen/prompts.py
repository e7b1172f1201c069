"""What is asked: drawn from one seed, so that a run can be repeated, and no run has the prompts of another."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from loadgen.lengths import Seed, Span

Endpoint = Literal["completions", "chat"]

TOKEN_IDS = Span(33, 93)
"""Single printable characters in every byte-level vocabulary in common use, and never a special token in one."""

_WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work number night point home water
room mother area money story fact month lot right study book eye job word business issue side kind
head house service friend father power hour game line end member law car city name team minute idea
body back parent face level office door health person art war party result change morning reason
research girl guy moment air teacher force education
""".split()  # noqa: SIM905 - a hundred quotes would help nobody


@dataclass(frozen=True, slots=True)
class Workload:
    """What kind of requests a run is made of."""

    endpoint: Endpoint
    prompt_tokens: Span
    output_tokens: Span
    cancel_share: float


@dataclass(frozen=True, slots=True)
class Request:
    """One request before it is sent. `leaves_early`: its client closes the connection after the first token."""

    index: int
    prompt: tuple[int, ...] | str
    output_tokens: int
    leaves_early: bool

    @property
    def prompt_tokens(self) -> int | None:
        """The prompt's exact length, None for text: only the server knows how it is tokenised."""
        return None if isinstance(self.prompt, str) else len(self.prompt)


def draw_requests(workload: Workload, seed: Seed) -> Iterator[Request]:
    """Yield requests without end; the same seed yields the same ones."""
    source = np.random.default_rng(seed)
    index = 0
    while True:
        yield Request(
            index=index,
            prompt=_prompt(workload, source),
            output_tokens=workload.output_tokens.draw(source),
            leaves_early=bool(source.random() < workload.cancel_share),
        )
        index += 1


def _prompt(workload: Workload, source: np.random.Generator) -> tuple[int, ...] | str:
    length = workload.prompt_tokens.draw(source)
    if workload.endpoint == "chat":
        return " ".join(_WORDS[i] for i in source.integers(len(_WORDS), size=length))
    return tuple(source.integers(TOKEN_IDS.low, TOKEN_IDS.high, size=length, endpoint=True).tolist())
