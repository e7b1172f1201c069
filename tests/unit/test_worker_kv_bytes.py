"""What one position of the KV pool takes, measured on the pool that the worker allocates, not on a formula."""

import pytest
import torch

from services.worker.attention_path import Asked, New, StepView
from services.worker.executor import Row
from services.worker.kv_size import BLOCK_TOKENS, kv_blocks
from services.worker.paged_attention import PagedAttention
from shared.ids import BlockId, RequestId

LLAMA_2_7B = (32, 32, 128)
OPT_13B = (40, 40, 128)
"""Layers, KV heads, and numbers in a head."""


def bytes_per_token(layers: int, kv_heads: int, dim: int) -> int:
    """Let every layer attend once, in half precision, and return what the pool takes for one position."""
    attention = PagedAttention(blocks=1, block_tokens=BLOCK_TOKENS, dtype=torch.float16)
    view = StepView.of((Row(RequestId("r"), 0, (1,), (BlockId(0),), None),), BLOCK_TOKENS)
    state = torch.zeros(kv_heads, 1, dim, dtype=torch.float16)
    with attention.step(view):
        for layer in range(layers):
            attention.attend(layer, New(state, state, state), Asked(1.0))
    return attention.bytes_per_position()


@pytest.mark.parametrize(("shape", "expected"), [(LLAMA_2_7B, 524_288), (OPT_13B, 819_200)], ids=["llama", "opt"])
def test_t42_a_token_takes_512_kib_in_llama_2_7b_and_800_in_opt_13b(shape: tuple[int, int, int], expected: int) -> None:
    assert bytes_per_token(*shape) == expected


def test_t42_a_layer_takes_16_kib_and_a_pool_is_sized_by_it() -> None:
    _, kv_heads, dim = LLAMA_2_7B
    assert bytes_per_token(1, kv_heads, dim) == 16_384
    eight_blocks = 8 * BLOCK_TOKENS * 524_288
    assert kv_blocks(8 * BLOCK_TOKENS, bytes_per_token=524_288, free_bytes=eight_blocks, sharers=1) == 8
    assert kv_blocks(None, bytes_per_token=524_288, free_bytes=10 * eight_blocks, sharers=1) == 24
