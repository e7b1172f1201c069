"""The shared equality oracle (DESIGN §4): transformers' own greedy `generate` in float32, on the folder that is served.

Equal, or at the first difference the two candidates lie within 1e-3 in the reference's logits: a tie. The caller counts
ties and asserts that they are at most 1 % of its cases.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

TIE = 1e-3


@lru_cache(maxsize=1)
def reference_model(folder: Path) -> Any:
    """Return the plain model in float32, kept for the next call. Any: transformers leaves `generate` untyped."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.train(mode=False)
    return model


def reference_tokens(
    folder: Path, prompt_ids: Sequence[int], max_tokens: int, *, ignore_eos: bool = False
) -> tuple[int, ...]:
    """Return what transformers generates greedily, an end-of-turn token included if it comes."""
    return _generated(folder, tuple(prompt_ids), max_tokens, ignore_eos)


@lru_cache(maxsize=1000)
def _generated(folder: Path, prompt_ids: tuple[int, ...], max_tokens: int, ignore_eos: bool) -> tuple[int, ...]:
    model = reference_model(folder)
    ids = torch.tensor([prompt_ids])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **({"eos_token_id": -1} if ignore_eos else {}),
        )
    tokens: list[int] = out[0, len(prompt_ids) :].tolist()
    return tuple(tokens)


def reference_logits(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits of the token that follows."""
    with torch.inference_mode():
        logits: torch.Tensor = reference_model(folder)(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    return logits[0, -1]


def assert_equal_or_tie(
    folder: Path, prompt_ids: Sequence[int], got: Sequence[int], expected: Sequence[int]
) -> Literal["equal", "tie"]:
    """Return how an answer compares with the reference's. Raises AssertionError unless it is equal or a tie."""
    if tuple(got) == tuple(expected):
        return "equal"
    common = next((at for at, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)
    assert common is not None, f"{len(got)} tokens where the reference has {len(expected)}, all those equal"
    logits = reference_logits(folder, [*prompt_ids, *expected[:common]])
    apart = abs(float(logits[got[common]] - logits[expected[common]]))
    assert apart <= TIE, f"token {common} is {got[common]}, the reference's {expected[common]}: {apart:.4f} apart"
    return "tie"
