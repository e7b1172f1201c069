"""What grammars cost a step: the masks of 16 rows in one call, and laying them over their logits. No model runs.

Usage: ``python -m tests.benchmarks.grammars "$(slipstream convert)"``
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch

from services.gateway.grammars import grammar_of_schema
from services.worker.executor import Draw, DrawFailed
from services.worker.grammars import Grammars, Guided
from services.worker.guide import Guide
from services.worker.sampling import draw_tokens
from services.worker.tokenizer_side import tokenizer_files
from shared.ids import GatewayId, RequestId
from shared.protocol.messages import Sampling, SubmitRequest
from shared.runtime.clock import monotonic
from tests.schemas import SCHEMAS

ROWS, STEPS = 16, 60


def main() -> None:
    """Print one line of JSON."""
    files = tokenizer_files(Path(sys.argv[1]))
    vocabulary = json.loads((Path(sys.argv[1]) / "config.json").read_text())["vocab_size"]
    grammars = Grammars(files, vocabulary, threads=torch.get_num_threads())
    texts = [grammar_of_schema(schema, "schema") for schema in (*SCHEMAS.values(), {"type": "object"})]
    begun_s = monotonic()
    grammars.masks([_row(0, texts[0], [])], ())
    first_s = monotonic() - begun_s
    outputs: list[list[int]] = [[] for _ in range(ROWS)]
    rows = [_row(place, texts[place % len(texts)], output) for place, output in enumerate(outputs)]
    logits = torch.randn(ROWS, vocabulary)
    masks_s: list[float] = []
    free_s: list[float] = []
    guided_s: list[float] = []
    numbers = random.Random(1)
    for step in range(STEPS):
        asked = [Guided(row.place, row.guide, len(outputs[row.place]) + 1, None) for row in rows]
        begun_s = monotonic()
        masks = grammars.masks(asked, ())
        masks_s.append(monotonic() - begun_s)
        draws = [Draw(Sampling(seed=place), step) for place in range(ROWS)]
        for spent, given in ((free_s, {}), (guided_s, masks)):
            begun_s = monotonic()
            draw_tokens(logits, draws, given)
            spent.append(monotonic() - begun_s)
        for place, mask in masks.items():
            assert not isinstance(mask, DrawFailed), mask.why
            outputs[place].append(int(numbers.choice(np.flatnonzero(mask))))
            if outputs[place][-1] in files.eos_ids:  # begin anew
                outputs[place].clear()
                rows[place] = _row(place, texts[place % len(texts)], outputs[place])
    told = {"masks_ms": masks_s, "draw_free_ms": free_s, "draw_guided_ms": guided_s}
    figures = {name: round(float(np.median(spent)) * 1000, 3) for name, spent in told.items()}
    worst = round(max(masks_s) * 1000, 3)
    print(json.dumps({"rows": ROWS, "first_grammar_ms": round(first_s * 1000), **figures, "masks_worst_ms": worst}))


def _row(place: int, grammar: str, output: list[int]) -> Guided:
    submit = SubmitRequest(RequestId("r"), 1, GatewayId("g"), (1,), 1000, Sampling(grammar=grammar))
    return Guided(place, Guide(submit, output), 1, None)


if __name__ == "__main__":
    main()
