"""A step's arrays, and the one operator that a model sees of attention."""

import gc
import random
import weakref
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from services.worker.attention_path import Asked, New, StepView, Unsupported
from services.worker.executor import Draw, Row
from services.worker.paged_attention import PagedAttention
from services.worker.torch_executor import last_tokens
from shared.ids import BlockId, RequestId
from shared.protocol.messages import Sampling
from tests.attention_paths import PATHS, path_of

SPANS = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=8)


def rows_of(spans: list[tuple[int, int]], block_tokens: int, seed: int) -> tuple[Row, ...]:
    numbers = random.Random(seed)
    blocks = [BlockId(block) for block in range(sum(-(-(start + fed) // block_tokens) + 1 for start, fed in spans))]
    numbers.shuffle(blocks)
    rows = []
    for at, (start, fed) in enumerate(spans):
        # a table may hold more blocks than the row reaches
        table = tuple(blocks.pop() for _ in range(-(-(start + fed) // block_tokens) + numbers.randrange(2)))
        draw = Draw(Sampling(), start + fed) if numbers.randrange(2) else None
        rows.append(Row(RequestId(str(at)), start, tuple(numbers.randrange(100) for _ in range(fed)), table, draw))
    return tuple(rows)


@given(spans=SPANS, block_tokens=st.sampled_from([1, 7, 16]), seed=st.integers(0, 99))
def test_a_view_says_of_each_token_what_its_row_says(
    spans: list[tuple[int, int]], block_tokens: int, seed: int
) -> None:
    batch = rows_of(spans, block_tokens, seed)
    view = StepView.of(batch, block_tokens)
    places = [(row, position) for row in batch for position in range(row.start, row.end)]
    assert view.token_ids.tolist() == [token for row in batch for token in row.token_ids]
    assert view.positions.tolist() == [position for _, position in places]
    assert view.slots.tolist() == [
        row.table[position // block_tokens] * block_tokens + position % block_tokens for row, position in places
    ]
    ends = [sum(fed for _, fed in spans[: at + 1]) for at in range(len(spans))]
    assert [*view.firsts.tolist()[1:], len(places)] == ends
    assert view.starts.tolist() == [row.start for row in batch]
    assert view.ends.tolist() == [row.end for row in batch]
    assert view.tables.tolist() == [block for row in batch for block in row.table]
    assert view.table_firsts.tolist() == [sum(len(row.table) for row in batch[:at]) for at in range(len(batch))]
    assert last_tokens(batch).tolist() == [end - 1 for end, row in zip(ends, batch, strict=True) if row.draw]


def attention(path: str = "torch") -> PagedAttention:
    return PagedAttention(blocks=12, block_tokens=16, dtype=torch.float32, path=path_of(path))


def new() -> New:
    return New(*(torch.ones(heads, 1, 8) for heads in (2, 1, 1)))


def test_attention_outside_of_a_step_is_a_mistake() -> None:
    with pytest.raises(RuntimeError, match="outside of a step"):
        attention().attend(0, new(), Asked(1.0))


def test_a_layer_attends_once_in_a_step() -> None:
    mine = attention()
    view = StepView.of(rows_of([(0, 1)], 16, 0), 16)
    for _ in range(2):
        with mine.step(view):
            mine.attend(0, new(), Asked(1.0))
    with mine.step(view):
        mine.attend(1, new(), Asked(1.0))
        with pytest.raises(Unsupported, match="several attentions in one layer"):
            mine.attend(1, new(), Asked(1.0))


def test_a_pool_goes_with_its_attention_though_the_interface_keeps_its_name() -> None:
    gone = weakref.ref(attention())
    gc.collect()
    assert gone() is None


def tiny() -> Any:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.train(mode=False)
    return model


@pytest.mark.parametrize("path", PATHS)
def test_a_model_is_one_graph_whatever_the_batch(path: str) -> None:
    model, mine = tiny(), attention(path)
    model.set_attn_implementation(mine.name)
    graphs = 0

    def counted(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled: Any = torch.compile(model, backend=counted, fullgraph=True, dynamic=True)
    for spans in ([(0, 5), (0, 3)], [(5, 1), (3, 4), (0, 2)], [(0, 30)]):
        view = StepView.of(rows_of(spans, 16, 0), 16)
        inputs = {
            "input_ids": torch.from_numpy(view.token_ids)[None],
            "position_ids": torch.from_numpy(view.positions)[None],
            "use_cache": False,
        }
        with torch.inference_mode():
            with mine.step(view):
                plain = model(**inputs).logits
            with mine.step(view):
                assert torch.equal(compiled(**inputs).logits, plain)
    assert graphs == 1
