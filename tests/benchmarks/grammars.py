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
from services.worker.grammars import FREE, Grammars, Guided, Masks
from services.worker.guide import Guide
from services.worker.sampling import draw_tokens
from services.worker.tokenizer_side import tokenizer_files
from shared.ids import GatewayId, RequestId
from shared.protocol.messages import Sampling, SubmitRequest
from shared.runtime.clock import monotonic
from tests.schemas import SCHEMAS

ROWS, STEPS = 16, 60


class Rows:
    """Sixteen answers that are drawn at random among what is allowed, and begin anew when they end."""

    def __init__(self, folder: Path) -> None:
        self.files = tokenizer_files(folder)
        self.vocabulary: int = json.loads((folder / "config.json").read_text())["vocab_size"]
        self.grammars = Grammars(self.files, self.vocabulary, threads=torch.get_num_threads())
        self._texts = [grammar_of_schema(schema, "schema") for schema in (*SCHEMAS.values(), {"type": "object"})]
        self._outputs: list[list[int]] = [[] for _ in range(ROWS)]
        self._guides = [self._guide(place) for place in range(ROWS)]
        self._numbers = random.Random(1)

    def _guide(self, place: int) -> Guide:
        sampling = Sampling(grammar=self._texts[place % len(self._texts)])
        submit = SubmitRequest(RequestId("r"), 1, GatewayId("g"), (1,), 1000, sampling)
        return Guide(submit, self._outputs[place])

    def masks(self) -> tuple[Masks, float]:
        """Return what each may draw next, and how long it took to find out."""
        asked = [Guided(at, guide, len(self._outputs[at]) + 1, None) for at, guide in enumerate(self._guides)]
        begun_s = monotonic()
        return self.grammars.masks(asked, ()), monotonic() - begun_s

    def go_on(self, masks: Masks) -> None:
        """Draw a token for each."""
        for place, mask in masks.items():
            assert not isinstance(mask, DrawFailed), mask.why
            self._outputs[place].append(int(self._numbers.choice(np.flatnonzero(mask))))
            if self._outputs[place][-1] in self.files.eos_ids:
                self._outputs[place].clear()
                self._guides[place] = self._guide(place)


def main() -> None:
    """Print one line of JSON."""
    rows = Rows(Path(sys.argv[1]))
    logits = torch.randn(ROWS, rows.vocabulary)
    first_s = rows.masks()[1]
    spent: dict[str, list[float]] = {"masks_ms": [], "draw_free_ms": [], "draw_guided_ms": []}
    for step in range(STEPS):
        masks, took_s = rows.masks()
        spent["masks_ms"].append(took_s)
        draws = [Draw(Sampling(seed=place), step) for place in range(ROWS)]
        for name, given in (("draw_free_ms", FREE), ("draw_guided_ms", masks)):
            begun_s = monotonic()
            draw_tokens(logits, draws, given)
            spent[name].append(monotonic() - begun_s)
        rows.go_on(masks)
    medians = {name: round(float(np.median(times_s)) * 1000, 3) for name, times_s in spent.items()}
    least = {f"least_{name}": round(min(times_s) * 1000, 3) for name, times_s in spent.items()}
    print(json.dumps({"rows": ROWS, "first_masks_ms": round(first_s * 1000), **medians, **least}))


if __name__ == "__main__":
    main()
