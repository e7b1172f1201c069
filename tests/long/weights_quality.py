"""What weights in int8 cost in quality: perplexity, and how often the very same token is drawn.

Run from the root of the project: ``python -m tests.long.weights_quality``. Takes about five minutes.

The text is the project's own README and sources. Perplexity is over windows of 512 tokens, each token predicted from
those before it in its window. Agreement is with bfloat16 over 32 tokens after 200 prompts: *drawn freely* compares two
answers place by place, so that one early difference counts for all that follows it; *after the same text* asks int8 for
the next token after each beginning of the other's answer. How far bfloat16 itself is from float32 stands beside it.
"""

import argparse
import gc
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from services.worker.executor import Batch, Draw, Row, token_of
from services.worker.loading import load_folder
from services.worker.model_store import model_folder
from services.worker.progress import Progress
from services.worker.tokenizer_side import tokenizer_files
from services.worker.torch_executor import TorchExecutor
from shared.ids import BlockId, RequestId
from shared.protocol.messages import Sampling
from shared.runtime.settings import DEFAULT_MODEL, WorkerSettings

WINDOW = 512
ANSWER = 32
PROMPT = 48
ROOT = Path(__file__).parents[2]
GREEDY = Sampling(temperature=0.0)
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "weights": "int8"},
}
_AT_ONCE = 50

Ids = Sequence[int]
Answers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one kind of weights: perplexity, its own answers, and what it draws after each beginning of others'."""

    perplexity: float
    answers: Answers


class Subject:
    """A loaded model, asked by rows."""

    def __init__(self, kind: str) -> None:
        settings = WorkerSettings(compile="now", kv_tokens=_AT_ONCE * (WINDOW + 16), **KINDS[kind])
        loaded = load_folder(model_folder(DEFAULT_MODEL, Progress()), settings, Progress())
        assert isinstance(loaded.executor, TorchExecutor)
        self._executor = loaded.executor
        self._block_tokens = loaded.executor.size.block_tokens

    def row(self, place: int, start: int, fed: Ids) -> Row:
        """Return one row; each place has blocks of its own."""
        per_row = -(-WINDOW // self._block_tokens)
        table = tuple(BlockId(block) for block in range(place * per_row, (place + 1) * per_row))
        return Row(RequestId(str(place)), start, tuple(fed), table, Draw(GREEDY, start + len(fed)))

    def loss(self, window: Ids) -> float:
        """Return the sum of -log p of all tokens of a window but the first."""
        wanted = torch.arange(len(window) - 1)
        logits = self._executor.forward((self.row(0, 0, window),), wanted).float()
        found = torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum")
        return float(found)

    def answers(self, prompts: Sequence[Ids]) -> Answers:
        """Return what is drawn after each prompt."""
        drawn = [self._run(tuple(self.row(at, 0, prompt) for at, prompt in enumerate(prompts)))]
        for step in range(ANSWER - 1):
            rows = (self.row(at, PROMPT + step, [token]) for at, token in enumerate(drawn[-1]))
            drawn.append(self._run(tuple(rows)))
        return np.array(drawn).T

    def next_after(self, prompts: Sequence[Ids], answers: Answers) -> Answers:
        """Return the likeliest token after each beginning of somebody's answers."""
        found = []
        for prompt, answer in zip(prompts, answers, strict=True):
            wanted = torch.arange(PROMPT - 1, PROMPT + ANSWER - 1)
            fed = (*prompt, *answer[:-1].tolist())
            found.append(self._executor.forward((self.row(0, 0, fed),), wanted).argmax(-1).numpy())
        return np.array(found)

    def _run(self, batch: Batch) -> list[int]:
        return [token_of(outcome) for outcome in self._executor.execute(batch)]


def text_ids() -> list[int]:
    """Return the project's own text as tokens."""
    files = [ROOT / "README.md", *sorted((ROOT / "services").rglob("*.py")), *sorted((ROOT / "shared").rglob("*.py"))]
    text = "\n".join(file.read_text() for file in files)
    data = tokenizer_files(model_folder(DEFAULT_MODEL, Progress())).tokenizer_json
    return list(Tokenizer.from_str(data.decode()).encode(text, add_special_tokens=False).ids)


def prompts_of(ids: Ids, count: int) -> list[Ids]:
    """Return pieces of the text."""
    places = random.Random(1).sample(range(len(ids) - PROMPT), count)
    return [ids[place : place + PROMPT] for place in places]


def main() -> None:
    """Print one line for each kind of weights, and two of agreement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=48, help="of 512 tokens each, spread over the text")
    parser.add_argument("--prompts", type=int, default=200)
    given = parser.parse_args()
    ids = text_ids()
    starts = np.linspace(0, len(ids) - WINDOW, given.windows).astype(int).tolist()
    prompts = prompts_of(ids, given.prompts)
    base: dict[str, Quality] = {}
    print(f"{DEFAULT_MODEL}; {given.windows} windows of {WINDOW} from {len(ids):,} tokens; {given.prompts} prompts")
    for kind in KINDS:
        subject = Subject(kind)
        loss = sum(subject.loss(ids[start : start + WINDOW]) for start in starts)
        perplexity = math.exp(loss / (given.windows * (WINDOW - 1)))
        groups = [prompts[at : at + _AT_ONCE] for at in range(0, len(prompts), _AT_ONCE)]
        answers = np.concatenate([subject.answers(group) for group in groups])
        print(f"{kind:>9}: perplexity {perplexity:.4f}", end="")
        if base:
            other, than = list(base.items())[-1]
            freely = float((answers == than.answers).mean())
            after = float((subject.next_after(prompts, than.answers) == than.answers).mean())
            more = perplexity / than.perplexity - 1
            print(f" ({more:+.2%}); same tokens as {other}: {freely:.1%} drawn freely, {after:.1%} after the same text")
        else:
            print()
        base[kind] = Quality(perplexity, answers)
        del subject
        gc.collect()


if __name__ == "__main__":
    main()
