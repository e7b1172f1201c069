"""A few tokens through a model just loaded: rows must not leak into each other, and plain code must say the same."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from services.worker.attention_path import AttentionPath, Unsupported
from services.worker.compatibility import expected_windows, refusal
from services.worker.executor import Draw, Row
from services.worker.kv_size import BLOCK_TOKENS
from services.worker.paged_attention import PagedAttention
from services.worker.program import Program
from services.worker.torch_executor import TorchExecutor
from shared.ids import BlockId, RequestId
from shared.protocol.messages import Sampling, WorkerSize

_BLOCKS = 4
_FIRST, _SECOND = 7, 5
"""Tokens of the two rows: unequal and odd, so that no layout fits by chance."""
_CUT = 3
_TOLERANCE = {torch.float32: 1e-3}
_INT8_TOLERANCE = 0.25
_COARSE_TOLERANCE = 6e-2
"""For narrow types: of the largest logit. Rows that leak differ by a good part of it."""


class Probe:
    """Runs the model on a pool of its own; `check` raises StartupError."""

    def __init__(self, model: PreTrainedModel, vocabulary: int, path: AttentionPath) -> None:
        self._model = model
        self._attention = PagedAttention(blocks=_BLOCKS, block_tokens=BLOCK_TOKENS, dtype=model.dtype, path=path)
        self._vocabulary = vocabulary
        size = WorkerSize(_BLOCKS, BLOCK_TOKENS, BLOCK_TOKENS)
        self._executor = TorchExecutor(model, self._attention, size=size, vocabulary=vocabulary)
        self._tolerance = _TOLERANCE.get(model.dtype, _COARSE_TOLERANCE)

    def check(self) -> int:
        """Return the bytes that one position takes in the pool. Raises StartupError if rows do not stay apart."""
        self._model.set_attn_implementation(self._attention.name)
        try:
            self._check_rows()
        except Unsupported as error:
            raise refusal(self._model.config.model_type, str(error)) from error
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            why = next(iter(str(error).splitlines()), "")
            feature = f"its code fails on a ragged batch ({type(error).__name__}: {why})"
            raise refusal(self._model.config.model_type, feature) from error
        self._check_layers()
        self._check_against_plain()
        return self._attention.bytes_per_position()

    def agrees(self, program: Program, *, is_int8: bool = False) -> bool:
        """Return whether a program says what the model says, of whole prompts, of one in two parts, and decoding.

        Weights of fewer bits may differ by more: what they cost is measured elsewhere, a wrong program shows here.

        On the thread that runs steps, between two of them. The program keeps the probe's pools: give it others next.
        """
        first, second = self._ids(_FIRST, 1), self._ids(_SECOND, 2)
        batches = (
            (_row(0, first[:_CUT]), _row(1, second)),
            (_row(1, [*second, *first], start=_SECOND), _row(0, first[: _CUT + 1], start=_CUT)),
        )
        serving: str = self._model.config._attn_implementation  # noqa: SLF001 - there is no public name for it
        self._model.set_attn_implementation(self._attention.name)
        try:
            said = [self._logits(*rows) for rows in batches]
        finally:
            self._model.set_attn_implementation(serving)
        program.use(self._attention)
        running = TorchExecutor(self._model, self._attention, size=self._executor.size, vocabulary=self._vocabulary)
        running.take_over(program)
        heard = [_logits(running, *rows) for rows in batches]
        tolerance = _INT8_TOLERANCE if is_int8 else self._tolerance
        return all(
            (a.float() - b.float()).abs().max() <= tolerance * a.float().abs().max()
            for one, other in zip(said, heard, strict=True)
            for a, b in zip(one, other, strict=True)
        )

    def _check_rows(self) -> None:
        first, second, other_first, other_second = (
            self._ids(_FIRST, 1), self._ids(_SECOND, 2), self._ids(_FIRST, 3), self._ids(_SECOND, 4),
        )  # fmt: skip
        self._first_ids = first
        alone = self._logits(_row(0, first), _row(1, second))
        self._require(alone[0], self._logits(_row(0, first), _row(1, other_second))[0], "its layers mix rows")
        self._require(alone[1], self._logits(_row(0, other_first), _row(1, second))[1], "its layers mix rows")
        self._logits(_row(2, first[:_CUT]), _row(3, second))
        continued = self._logits(_row(3, other_second), _row(2, first, start=_CUT))
        self._require(alone[0][_CUT:], continued[1], "a prompt in two chunks comes out different")
        self._in_batch = alone[0]

    def _check_layers(self) -> None:
        """Every layer must have attended once, with the window that the configuration gives it."""
        seen = self._executor.windows
        layers = self._model.config.num_hidden_layers
        if sorted(seen) != list(range(layers)):
            raise refusal(self._model.config.model_type, f"{len(seen)} of its {layers} layers attend")
        expected = expected_windows(self._model.config)
        if expected is not None and expected != [seen[layer] for layer in range(layers)]:
            raise refusal(self._model.config.model_type, "its code does not name its sliding windows")

    @torch.inference_mode()
    def _check_against_plain(self) -> None:
        """Compare with the model's own attention on the first row alone: what vanishes with the mask shows here."""
        self._model.set_attn_implementation("eager")
        plain = self._model(input_ids=torch.tensor([self._first_ids]), use_cache=False).logits[0]
        self._require(plain, self._in_batch, "its attention needs something that is not passed on here")

    def _logits(self, *rows: Row) -> tuple[torch.Tensor, ...]:
        """Return for each row the logits after each of its tokens: a leak may show in the first one only."""
        return _logits(self._executor, *rows)

    def _require(self, expected: torch.Tensor, got: torch.Tensor, feature: str) -> None:
        expected, got = expected.float(), got.float()
        if not torch.isfinite(expected).all():
            raise refusal(self._model.config.model_type, "its logits are not finite")
        if (expected - got).abs().max() > self._tolerance * expected.abs().max():
            raise refusal(self._model.config.model_type, feature)

    def _ids(self, count: int, seed: int) -> tuple[int, ...]:
        return tuple((7919 * (index + 1) * seed + 13) % self._vocabulary for index in range(count))


def _logits(executor: TorchExecutor, *rows: Row) -> tuple[torch.Tensor, ...]:
    lengths = [len(row.token_ids) for row in rows]
    logits = executor.forward(rows, torch.arange(sum(lengths)))
    return torch.split(logits, lengths)


def _row(block: int, ids: Sequence[int], *, start: int = 0) -> Row:
    return Row(RequestId(f"probe-{block}"), start, tuple(ids[start:]), (BlockId(block),), Draw(Sampling(), len(ids)))
