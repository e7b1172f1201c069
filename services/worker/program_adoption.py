"""When a model's own code gives way to its program: before it serves, beside its first steps, or never."""

from collections.abc import Callable
from dataclasses import dataclass

import structlog
from transformers import PreTrainedModel

from services.worker.attention_kernel import KernelPath
from services.worker.attention_path import AttentionPath
from services.worker.paged_attention import PagedAttention
from services.worker.probe import Probe
from services.worker.program import Program
from services.worker.program_building import Wish, build
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
    adopt_later(serving, wish)()
    if wish.weights == "int8" and not serving.executor.has_program:
        raise StartupError("weights in int8 need the step program, which this model or machine does not have")


def adopt_later(serving: Serving, wish: Wish) -> Callable[[], None]:
    """Build a program, on any thread, and return what lets it take over, between two steps."""
    begun_s = monotonic()
    try:
        program = _built(serving, wish)
    except NotLowered as error:
        why = str(error)
        return lambda: _decline(why)
    built_s = monotonic() - begun_s
    return lambda: _take_over(serving, wish, program, built_s)


def _built(serving: Serving, wish: Wish) -> Program:
    if not isinstance(serving.path, KernelPath):
        raise NotLowered("there is no kernel")
    return build(serving.model, serving.path, wish)


def _decline(why: str) -> None:
    log.warning("step_program", state="off", why=why)


def _take_over(serving: Serving, wish: Wish, program: Program, built_s: float) -> None:
    begun_s = monotonic()
    # weights of fewer bits differ by more than rounding: what they cost is measured elsewhere
    probe = Probe(serving.model, wish.vocabulary, serving.path)
    if wish.weights != "int8" and not probe.agrees(program):
        _decline("it does not say what the model says")
        return
    program.use(serving.attention)
    serving.executor.take_over(program)
    for weight in serving.model.parameters():  # what the program needs of them it holds; nothing else may
        weight.data = weight.data.new_empty(0)
    log.info(
        "step_program",
        state="on",
        weights=wish.weights,
        torch_calls=program.torch_calls,
        built_s=round(built_s, 2),
        checked_s=round(monotonic() - begun_s, 2),
    )
