"""A plan applied to copies of what it touches, so that a plan that contradicts the ledger leaves no trace."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from services.worker.executor import Batch, Draw, Row
from shared.ids import BlockId, EntryId, RequestId
from shared.protocol.messages import Finish, NewRequest, Slice, StepPlan, SubmitRequest, WorkerSize


class Contradiction(Exception):
    """A plan names something that cannot be so: a bug of its writer, or not meant for this worker.

    It never leaves the ledger: there it becomes a refusal with this text.
    """


@dataclass(slots=True)
class Held:
    """One request as the worker remembers it; ``computed`` positions have keys and values in ``table``."""

    submit: SubmitRequest
    arrival: EntryId
    output_ids: list[int]
    computed: int
    table: list[BlockId]
    finish: Finish | None = None
    usable: bool = True

    @property
    def known(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.submit.prompt_ids) + len(self.output_ids)

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Return the ids at positions ``start`` to ``end`` of prompt + output."""
        of_prompt = len(self.submit.prompt_ids)
        prompt = self.submit.prompt_ids[start:end]
        output = self.output_ids[max(start - of_prompt, 0) : max(end - of_prompt, 0)]
        return (*prompt, *output)

    def drop_table(self) -> None:
        """Forget where keys and values lie: others may be given these blocks."""
        self.table = []
        self.computed = 0

    def end(self, finish: Finish) -> None:
        """Remember that and why the request ended; a plan will release it."""
        self.finish = finish
        self.drop_table()


@dataclass(frozen=True, slots=True)
class Fed:
    """What happens to one slice: it draws a token, only feeds, or nothing is computed for it."""

    request: RequestId
    state: Literal["draws", "fed", "ended", "unusable"]


class Draft:
    """One plan, checked and applied in the order released, preempted, new, slices."""

    def __init__(self, held: dict[RequestId, Held], size: WorkerSize, vocabulary: int) -> None:
        self._held = dict(held)
        self._size = size
        self._vocabulary = vocabulary
        self._rows: list[Row] = []
        self._fed: list[Fed] = []
        self._written: set[tuple[BlockId, int]] = set()

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan. Raises Contradiction, after which the draft is of no use."""
        for request in plan.released:
            self._held.pop(request, None)  # what is not there has been released already
        for request in plan.preempted:
            self._touch(request).drop_table()
        for new in plan.new:
            self._admit(new)
        for slice_ in plan.slices:
            self._feed(slice_)
        if len({fed.request for fed in self._fed}) != len(self._fed):
            raise Contradiction("two slices for one request")

    def held(self) -> dict[RequestId, Held]:
        """Return what is remembered once the plan is entered."""
        return self._held

    def batch(self) -> Batch:
        """Return what is to be executed."""
        return tuple(self._rows)

    def fed(self) -> tuple[Fed, ...]:
        """Return one entry for each slice of the plan, in its order."""
        return tuple(self._fed)

    def _touch(self, request: RequestId) -> Held:
        held = self._held.get(request)
        if held is None:
            raise Contradiction(f"request {request} is not known here")
        copy = replace(held, table=list(held.table))
        self._held[request] = copy
        return copy

    def _admit(self, new: NewRequest) -> None:
        submit = new.submit
        known = self._held.get(submit.request)
        if known is not None and known.submit.attempt >= submit.attempt:
            raise Contradiction(f"request {submit.request} is known already at attempt {known.submit.attempt}")
        ids = (*submit.prompt_ids, *submit.output_ids)
        if not 0 <= new.start < len(ids) <= self._size.max_model_len:
            raise Contradiction(f"request {submit.request} starts at {new.start} of {len(ids)} tokens")
        if new.start > len(new.blocks) * self._size.block_tokens:
            raise Contradiction(f"request {submit.request} starts at {new.start}, beyond its blocks")
        self._check_blocks(submit.request, new.blocks)
        usable = min(ids) >= 0 and max(ids) < self._vocabulary
        self._held[submit.request] = Held(
            submit, new.arrival, list(submit.output_ids), new.start, list(new.blocks), usable=usable
        )

    def _feed(self, slice_: Slice) -> None:
        held = self._touch(slice_.request)
        if held.finish is not None:
            self._fed.append(Fed(slice_.request, "ended"))
            return
        if not held.usable:
            self._fed.append(Fed(slice_.request, "unusable"))
            return
        self._check_blocks(slice_.request, slice_.new_blocks)
        held.table.extend(slice_.new_blocks)
        self._check_slice(held, slice_)
        end = slice_.start + slice_.count
        draw = Draw(held.submit.sampling, end) if end == held.known else None
        ids = held.token_ids(slice_.start, end)
        self._rows.append(Row(slice_.request, slice_.start, ids, tuple(held.table), draw))
        self._fed.append(Fed(slice_.request, "draws" if draw else "fed"))
        held.computed = end

    def _check_slice(self, held: Held, slice_: Slice) -> None:
        where = f"request {slice_.request}: slice of {slice_.count} from {slice_.start}"
        end = slice_.start + slice_.count
        if slice_.start != held.computed or slice_.count < 1:
            raise Contradiction(f"{where} does not continue at {held.computed}")
        if end > held.known:
            raise Contradiction(f"{where} goes beyond the {held.known} tokens known")
        if end > len(held.table) * self._size.block_tokens:
            raise Contradiction(f"{where} does not fit into a table of {len(held.table)} blocks")
        for position in range(slice_.start, end):
            slot = (held.table[position // self._size.block_tokens], position % self._size.block_tokens)
            if slot in self._written:
                raise Contradiction(f"{where} writes where another slice of this plan writes")
            self._written.add(slot)

    def _check_blocks(self, request: RequestId, blocks: Sequence[BlockId]) -> None:
        if any(not 0 <= block < self._size.blocks for block in blocks):
            raise Contradiction(f"request {request}: a block beyond the {self._size.blocks} there are")
