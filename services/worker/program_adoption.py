"""When a model's own code gives way to its program: before it serves, beside its first steps, or never."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import structlog
from transformers import PreTrainedModel

from services.worker.attention_path import AttentionPath
from services.worker.executor import Finish
from services.worker.paged_attention import PagedAttention
from services.worker.probe import Probe
from services.worker.program import Program
from services.worker.program_building import Source, Wish, assembled, require_kernel
from services.worker.program_graph import NotLowered
from services.worker.torch_executor import TorchExecutor
from shared.errors import StartupError
from shared.runtime.clock import monotonic

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Serving:
    """A model that serves, and what it serves with."""

    model: PreTrainedModel
    attention: PagedAttention
    path: AttentionPath
    executor: TorchExecutor


def adopt_now(serving: Serving, wish: Wish) -> None:
    """Let a program take over before anything is served. Raises StartupError if int8 was asked for and cannot be."""
    if not adopt_kept(serving, wish):
        keep_it = adopt_later(serving, wish)()
        if keep_it is not None:
            keep_it()
    if wish.weights == "int8" and not serving.executor.has_program:
        raise StartupError("weights in int8 need the step program, which this model or machine does not have")


def adopt_kept(serving: Serving, wish: Wish) -> bool:
    """Let a program of an earlier start take over, and return whether it has. What fails is told, and made anew."""
    begun_s = monotonic()
    try:
        require_kernel(serving.path, serving.model.dtype, wish)
    except NotLowered:  # who builds one next says why: once is enough
        return False
    with _or_off():
        source = Source(serving.model, wish.max_model_len)
        program = source.kept()
        if program is not None:
            ready = assembled(program, serving.path, wish)
            _take_over(serving, wish, ready, _told("found in the cache", begun_s))
    return serving.executor.has_program


def adopt_later(serving: Serving, wish: Wish) -> Finish:
    """Build a program, on any thread, and return what lets it take over, between two steps; then what keeps it."""
    begun_s = monotonic()
    with _or_off():
        require_kernel(serving.path, serving.model.dtype, wish)
        source = Source(serving.model, wish.max_model_len)
        program = source.made()
        ready = assembled(program, serving.path, wish)
        return partial(_take_over_and_keep, serving, wish, ready, partial(source.keep, program), _told("made", begun_s))
    return _nothing


def _nothing() -> None:
    """Leave the model to serve."""


def _told(how: str, begun_s: float) -> Mapping[str, object]:
    return {"how": how, "built_s": round(monotonic() - begun_s, 2)}


@contextmanager
def _or_off() -> Iterator[None]:
    """Leave the model's own code to serve, and say why, if its program cannot be had."""
    try:
        yield
    except NotLowered as error:
        _decline(str(error))
    except Exception:  # whatever else a model's code or its graph leads to: it serves without a program
        log.exception("step_program", state="off", why="it cannot be built")


def _decline(why: str) -> None:
    log.warning("step_program", state="off", why=why)


def _take_over_and_keep(
    serving: Serving, wish: Wish, program: Program, keep: Callable[[], None], told: Mapping[str, object]
) -> Callable[[], None] | None:
    """Take over, and return what keeps the program for the next start: not before it has been checked."""
    with _or_off():
        _take_over(serving, wish, program, told)
    return keep if serving.executor.has_program else None


def _take_over(serving: Serving, wish: Wish, program: Program, told: Mapping[str, object]) -> None:
    begun_s = monotonic()
    if not Probe(serving.model, wish.vocabulary, serving.path).agrees(program, is_int8=wish.weights == "int8"):
        raise NotLowered("it does not say what the model says")
    program.use(serving.attention)
    serving.executor.take_over(program)
    for weight in serving.model.parameters():  # what the program needs of them it holds; nothing else may
        weight.data = weight.data.new_empty(0)
    log.info(
        "step_program",
        state="on",
        weights=wish.weights,
        torch_calls=program.torch_calls,
        **told,
        checked_s=round(monotonic() - begun_s, 2),
    )
