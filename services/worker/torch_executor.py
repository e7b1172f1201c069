"""A real model: transformers' own code with our attention, one ragged batch per step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from services.worker.attention_path import RunningStep, StepView
from services.worker.executor import Batch, Draw, DrawFailed, Outcome, Step, token_of
from services.worker.grammars import FREE, Grammars, Guided, Masks, guided_of
from services.worker.paged_attention import PagedAttention
from services.worker.program import Program
from services.worker.prompt_scores import Asked, LogitsAt, layers_run_once, with_scores
from services.worker.sampling import draw_tokens
from shared.protocol.messages import WorkerSize

_NO_GRAMMARS = DrawFailed("this executor follows no grammars")


class _Output(Protocol):
    logits: torch.Tensor


class CausalModel(Protocol):
    """What we call of a transformers model."""

    def __call__(self, **inputs: object) -> _Output:
        """Run the model forward."""

    @property
    def base_model(self) -> torch.nn.Module:
        """What lies under its head."""


class TorchExecutor:
    """Runs steps of a model whose attention is ``attention``."""

    def __init__(self, model: CausalModel, attention: PagedAttention, *, size: WorkerSize, vocabulary: int) -> None:
        self._model: CausalModel | None = model
        self._attention = attention
        self._program: Program | None = None
        self._grammars: Grammars | None = None
        self.size = size
        self.vocabulary = vocabulary

    @property
    def windows(self) -> Mapping[int, int | None]:
        """Of the last step: the layers that attended, and the sliding window each asked for."""
        return self._attention.windows

    @property
    def has_program(self) -> bool:
        """Whether steps run as a program."""
        return self._program is not None

    def take_over(self, program: Program) -> None:
        """Run steps as a program from now on; the model is let go. Between two steps only."""
        self._program, self._model = program, None

    def follow(self, grammars: Grammars) -> None:
        """Let rows follow grammars from now on. Before any step."""
        self._grammars = grammars

    def expect(self, grammar: str) -> None:
        """Begin to make a grammar aside."""
        if self._grammars is not None:
            self._grammars.expect(grammar)

    def forget(self) -> None:
        """Do nothing: a slot is always written before a row that owns it reads it."""

    def execute(self, batch: Batch) -> tuple[Outcome, ...]:
        """Run a batch that awaits nothing."""
        return self.prepare(batch)(())

    def prepare(self, batch: Batch) -> Step:
        """Lay out all that does not depend on the step before: what depends is a handful of token ids."""
        prepared = Prepared.of(batch, self.size.block_tokens)
        return partial(self._run, prepared)

    def _run(self, prepared: "Prepared", before: Sequence[Outcome]) -> tuple[Outcome, ...]:
        """Run one step and draw the tokens of the rows that sample; then tell of prompts what they ask for."""
        prepared.feed(before)
        if prepared.asked is None:
            with torch.inference_mode():
                logits = self._forward(prepared.view, prepared.wanted)
                return draw_tokens(logits, prepared.draws, self._masks(prepared.guided, before))
        with torch.inference_mode(), self._attention.step(prepared.view) as step, self._head(prepared.view, step) as at:
            # the rows that draw go through the head by themselves, as in any step: nothing of theirs changes
            logits = at(prepared.wanted)
            drawn = draw_tokens(logits, prepared.draws, self._masks(prepared.guided, before))
            return with_scores(prepared.batch, drawn, prepared.asked.told(at))

    def _masks(self, guided: Sequence[Guided], before: Sequence[Outcome]) -> Masks:
        if not guided:
            return FREE
        if self._grammars is None:
            return {one.place: _NO_GRAMMARS for one in guided}
        return self._grammars.masks(guided, before)

    def logits(self, batch: Batch) -> torch.Tensor:
        """Write a batch into the pool and return ``[rows that draw, vocabulary]``."""
        return self.forward(batch, last_tokens(batch))

    def forward(self, batch: Batch, wanted: torch.Tensor) -> torch.Tensor:
        """Write a batch into the pool and return the logits after the tokens at ``wanted`` places of the batch."""
        # a program's logits lie where the next step's will
        return self._forward(StepView.of(batch, self.size.block_tokens), wanted).clone()

    @torch.inference_mode()
    def _forward(self, view: StepView, wanted: torch.Tensor) -> torch.Tensor:
        with self._attention.step(view) as step:
            if self._program is not None:
                return self._program(view, step, wanted.numpy())
            return self._modelled(view, wanted)

    @contextmanager
    def _head(self, view: StepView, step: RunningStep) -> Iterator[LogitsAt]:
        """Give what returns logits at places of a step: its first call runs the step, later ones the head alone."""
        if self._program is not None:
            begun = self._program.begin(view, step)
            yield lambda wanted: begun(wanted.numpy())
            return
        assert self._model is not None, "one of the two is there"  # noqa: S101 - for the type checker
        with layers_run_once(cast("torch.nn.Module", self._model), self._model.base_model):
            yield partial(self._modelled, view)

    def _modelled(self, view: StepView, wanted: torch.Tensor) -> torch.Tensor:
        """Return logits by the model's own code, within a step of its attention."""
        assert self._model is not None, "there is no program"  # noqa: S101 - for the type checker
        output = self._model(
            input_ids=torch.from_numpy(view.token_ids)[None],
            position_ids=torch.from_numpy(view.positions)[None],
            use_cache=False,
            logits_to_keep=wanted,
        )
        return output.logits[0]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step laid out: its arrays, who draws, and which of its tokens the step before it draws."""

    batch: Batch
    view: StepView
    wanted: torch.Tensor
    draws: Sequence[Draw]
    awaiting: npt.NDArray[np.int64]
    """Places in the batch of tokens that are not known yet."""
    awaited: Sequence[int]
    """For each of them the place among the outcomes of the step before."""
    asked: Asked | None
    guided: Sequence[Guided] = ()

    @classmethod
    def of(cls, batch: Batch, block_tokens: int) -> "Prepared":
        """Return the layout of a batch."""
        view = StepView.of(batch, block_tokens)
        rows = [index for index, row in enumerate(batch) if row.awaits is not None]
        awaited = [row.awaits for row in batch if row.awaits is not None]
        draws = [row.draw for row in batch if row.draw is not None]
        awaiting, asked = view.firsts[rows].astype(np.int64), Asked.of(batch, view.firsts)
        return cls(batch, view, last_tokens(batch), draws, awaiting, awaited, asked, guided_of(batch))

    def feed(self, before: Sequence[Outcome]) -> None:
        """Fill in what the step before has drawn."""
        self.view.token_ids[self.awaiting] = [token_of(before[place]) for place in self.awaited]


def last_tokens(batch: Batch) -> torch.Tensor:
    """Return where in the ragged batch the last tokens of the drawing rows lie: only they need logits."""
    ends = np.cumsum([len(row.token_ids) for row in batch], dtype=np.int64)
    draws = np.fromiter((row.draw is not None for row in batch), np.bool_, len(batch))
    return torch.from_numpy(ends[draws] - 1)
