"""When a model's own code gives way to its program: before it serves, beside its first steps, or never."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import structlog
from transformers import PreTrainedModel

from services.worker.attention_path import AttentionPath
from services.worker.paged_attention import PagedAttention
from services.worker.probe import Probe
from services.worker.program import Program
from services.worker.program_building import Wish, assembled, kept, made
from services.worker.program_graph import NotLowered
from services.worker.program_lowering import Lowered
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
        adopt_later(serving, wish)()
    if wish.weights == "int8" and not serving.executor.has_program:
        raise StartupError("weights in int8 need the step program, which this model or machine does not have")


def adopt_kept(serving: Serving, wish: Wish) -> bool:
    """Let a program of an earlier start take over, if there is one."""
    begun_s = monotonic()
    program = kept(serving.model, wish)
    if program is not None:
        _finish(serving, wish, program, begun_s, "found in the cache")()
    return program is not None


def adopt_later(serving: Serving, wish: Wish) -> Callable[[], None]:
    """Build a program, on any thread, and return what lets it take over, between two steps."""
    begun_s = monotonic()
    try:
        program = made(serving.model, wish)
    except NotLowered as error:
        return partial(_decline, str(error))
    return _finish(serving, wish, program, begun_s, "made")


def _finish(serving: Serving, wish: Wish, program: Lowered, begun_s: float, how: str) -> Callable[[], None]:
    """Pack the matrices, and return what lets the program take over."""
    try:
        ready = assembled(program, serving.path, wish)
    except NotLowered as error:
        return partial(_decline, str(error))
    return partial(_take_over, serving, wish, ready, {"how": how, "built_s": round(monotonic() - begun_s, 2)})


def _decline(why: str) -> None:
    log.warning("step_program", state="off", why=why)


def _take_over(serving: Serving, wish: Wish, program: Program, told: Mapping[str, object]) -> None:
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
        **told,
        checked_s=round(monotonic() - begun_s, 2),
    )
