"""The next plan as it will come to be, told while the step before it still runs: then its batch is laid out aside.

What that step will draw is the only thing that is not known yet. So a row may await a token, and a row whose request
turns out to have ended is computed in vain: it writes behind what anybody reads, and its outcome is dropped. Nothing is
entered. Whatever cannot be told yet raises Contradiction; the ledger then takes the plan in its turn, as it takes all.
"""

from collections.abc import Mapping, Sequence

from services.worker.blocks import Blocks, Contradiction
from services.worker.executor import Batch, Draw, Outcome, Row, known_ids
from services.worker.plan_draft import Draft, Held, Model
from shared.ids import RequestId
from shared.protocol.messages import Slice, StepPlan, WorkerSize

Drawing = Mapping[RequestId, int]
"""The requests for which a step draws, each with the place of its token among the outcomes."""


def places_of(batch: Batch) -> Drawing:
    """Return where the outcome of each request is among those of a step."""
    return {row.request: place for place, row in enumerate(row for row in batch if row.has_outcome)}


def drawing_of(batch: Batch) -> Drawing:
    """Return who draws in a step."""
    places = places_of(batch)
    return {row.request: places[row.request] for row in batch if row.draw is not None}


class Foresight(Draft):
    """A plan applied behind a step that draws for some requests."""

    def __init__(
        self, held: dict[RequestId, Held], blocks: Blocks, size: WorkerSize, model: Model, drawing: Drawing
    ) -> None:
        super().__init__(held, blocks, size, model)
        self._drawing = dict(drawing)

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan. Raises Contradiction if it must wait for its turn."""
        gone = {*plan.released, *plan.preempted, *(new.submit.request for new in plan.new)}
        preempted = self._drawing.keys() & set(plan.preempted)
        if any(slice_.request in preempted for slice_ in plan.slices):
            raise Contradiction("a request is preempted and fed while it draws")
        for request in gone:
            self._drawing.pop(request, None)
        super().apply(plan)

    def _feed(self, slice_: Slice) -> None:
        place = self._drawing.get(slice_.request)
        held = self._held.get(slice_.request)
        if place is None or held is None or held.finish is not None:
            super()._feed(slice_)
        else:
            self._await(slice_, place)

    def _await(self, slice_: Slice, place: int) -> None:
        """Feed the one token that is being drawn."""
        held = self._touch(slice_.request)
        at = held.known
        if slice_.count != 1 or not slice_.start == held.computed == at:
            raise Contradiction(f"request {slice_.request}: more is fed than the token that it draws")
        if at >= self._size.max_model_len or held.history is not None:
            raise Contradiction(f"request {slice_.request}: what it draws decides how it goes on")
        if slice_.new_blocks:
            self._grow_table(held, slice_)
        block_tokens = self._size.block_tokens
        if at >= len(held.table) * block_tokens:
            raise Contradiction(f"request {slice_.request}: its table has no place for its next token")
        self._blocks.check_writable(slice_.request, held.table[at // block_tokens])
        held.computed = at + 1
        draw = Draw(held.submit.sampling, at + 1, guide=held.guide)
        self._rows.append(Row(slice_.request, at, (0,), tuple(held.table), draw, awaits=place))


def came_true(foreseen: Batch, before: Sequence[Outcome], batch: Batch) -> bool:
    """Return whether a batch is what was foreseen once the step before it has had these outcomes.

    Rows of requests that ended there may be missing in it.
    """
    known = {row.request: row for row in foreseen}
    return all(row.request in known and _is_same(known[row.request], before, row) for row in batch)


def _is_same(foreseen: Row, before: Sequence[Outcome], row: Row) -> bool:
    """Return whether two rows compute the same.

    A draw's history and guide are left out: a newcomer's are made with its draft.
    """
    if (foreseen.start, foreseen.table) != (row.start, row.table) or known_ids(foreseen, before) != row.token_ids:
        return False
    if foreseen.scores != row.scores:
        return False
    if foreseen.draw is None or row.draw is None:
        return foreseen.draw is row.draw
    return foreseen.draw.position == row.draw.position and foreseen.draw.sampling == row.draw.sampling
