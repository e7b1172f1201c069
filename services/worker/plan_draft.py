"""A plan applied to copies of what it touches, so that a plan that contradicts the ledger leaves no trace."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.worker.blocks import Blocks, BlocksDraft, Contradiction
from services.worker.executor import Batch, Draw, Row, Scores
from services.worker.guide import Guide, guide_of
from services.worker.history import History, history_of
from shared.ids import BlockId, EntryId, RequestId
from shared.paging.block_hash import BlockHash, HashChain
from shared.protocol.messages import Finish, NewRequest, Slice, StepPlan, SubmitRequest, WorkerSize


@dataclass(frozen=True, slots=True)
class Model:
    """What the ledger must know of the model: which ids end an answer, and how many ids there are."""

    eos_ids: frozenset[int]
    vocabulary: int


@dataclass(slots=True)
class Held:
    """One request as the worker remembers it; ``computed`` positions have keys and values in ``table``."""

    submit: SubmitRequest
    arrival: EntryId
    output_ids: list[int]
    chain: HashChain
    """Names of its full blocks. Depends on its tokens alone, so copies share it."""
    computed: int = 0
    table: list[BlockId] = field(default_factory=list)
    finish: Finish | None = None
    usable: bool = True
    cached_tokens: int = 0
    """Tokens of the prompt that it found computed when it was admitted first."""
    preemptions: int = 0
    history: History | None = None
    """Shared by copies: it reads the output, which they share as well."""
    guide: Guide | None = None
    """Likewise."""

    def copy(self) -> "Held":
        """Return a copy whose table is its own."""
        return Held(
            self.submit,
            self.arrival,
            self.output_ids,
            self.chain,
            self.computed,
            self.table.copy(),
            self.finish,
            self.usable,
            self.cached_tokens,
            self.preemptions,
            self.history,
            self.guide,
        )

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

    def names(self, first: int, end: int, block_tokens: int) -> Sequence[BlockHash]:
        """Return the names of its full blocks ``first`` to ``end``; each block is hashed once."""
        if self.chain.tokens < end * block_tokens:
            self.chain.extend(self.token_ids(self.chain.tokens, end * block_tokens))
        return self.chain.hashes[first:end]

    def drop_table(self) -> list[BlockId]:
        """Forget where keys and values lie, and return where they lay: others may be given these blocks."""
        dropped, self.table = self.table, []
        self.computed = 0
        return dropped

    def end(self, finish: Finish) -> list[BlockId]:
        """Remember that and why the request ended, and return its table; a plan will release it."""
        self.finish = finish
        return self.drop_table()


@dataclass(frozen=True, slots=True)
class Fed:
    """What happens to one slice: it draws a token, only feeds, or nothing is computed for it."""

    request: RequestId
    state: Literal["draws", "fed", "ended", "unusable"]
    first_filled: int = 0
    """Place in its table of the first of the blocks that it fills up."""
    filled: tuple[BlockId, ...] = ()
    scores_from: int | None = None
    """Place in the prompt of the first token that it tells the logprobs of, if it tells any."""


class Draft:
    """One plan, checked and applied in the order released, preempted, new, slices. `enter` what it does to blocks."""

    def __init__(self, held: dict[RequestId, Held], blocks: Blocks, size: WorkerSize, model: Model) -> None:
        self._held = dict(held)
        self._new_chain = blocks.chain
        self._blocks = BlocksDraft(blocks)
        self._size = size
        self._model = model
        self._rows: list[Row] = []
        self._fed: list[Fed] = []

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan. Raises Contradiction, after which the draft is of no use."""
        for request in plan.released:
            released = self._held.pop(request, None)
            if released is not None:  # else it has been released already
                self._blocks.leave(released.table)
        for request in plan.preempted:
            held = self._touch(request)
            held.preemptions += 1
            self._blocks.leave(held.drop_table())
        for new in plan.new:
            self._admit(new)
        for slice_ in plan.slices:
            self._feed(slice_)
        if len({fed.request for fed in self._fed}) != len(self._fed):
            raise Contradiction("two slices for one request")

    def enter(self) -> dict[RequestId, Held]:
        """Make what the plan does to blocks so, and return what is remembered of requests from now on."""
        self._blocks.enter()
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
        copy = held.copy()
        self._held[request] = copy
        return copy

    def _admit(self, new: NewRequest) -> None:
        submit = new.submit
        known = self._held.get(submit.request)
        if known is not None:
            if known.submit.attempt >= submit.attempt:
                raise Contradiction(f"request {submit.request} is known already at attempt {known.submit.attempt}")
            self._blocks.leave(known.table)
        ids = (*submit.prompt_ids, *submit.output_ids)
        if len(ids) > self._size.max_model_len:
            raise Contradiction(f"request {submit.request} has {len(ids)} tokens")
        held = Held(submit, new.arrival, list(submit.output_ids), self._new_chain(submit.cache_salt))
        named = (*ids, *(bias.token_id for bias in submit.sampling.biases))
        held.usable = min(named, default=0) >= 0 and max(named, default=0) < self._model.vocabulary
        held.history = history_of(submit, held.output_ids, self._model.eos_ids)
        held.guide = guide_of(submit, held.output_ids)
        held.cached_tokens = min(new.start, len(submit.prompt_ids))
        self._begin_table(held, new.start, new.blocks)
        self._held[submit.request] = held

    def _begin_table(self, held: Held, start: int, blocks: Sequence[BlockId]) -> None:
        """Give a request its first blocks; ``start`` tokens must be in them already, computed for whomever."""
        request = held.submit.request
        full, rest = divmod(start, self._size.block_tokens)
        if rest or not 0 <= start < held.known:
            raise Contradiction(f"request {request} starts at {start} of {held.known} tokens")
        if full > len(blocks):
            raise Contradiction(f"request {request} starts at {start}, beyond its blocks")
        if full:
            self._blocks.share(request, blocks[:full], held.names(0, full, self._size.block_tokens))
        self._blocks.hand_out(request, blocks[full:])
        self._blocks.join(blocks)
        held.table = list(blocks)
        held.computed = start

    def _feed(self, slice_: Slice) -> None:
        held = self._touch(slice_.request)
        if held.finish is not None or not held.usable:
            self._blocks.hand_out(slice_.request, slice_.new_blocks)  # nothing is written: but the leader forgets them
            self._fed.append(Fed(slice_.request, "unusable" if held.finish is None else "ended"))
            return
        if slice_.new_blocks:
            self._grow_table(held, slice_)
        self._check_slice(held, slice_)
        end = slice_.start + slice_.count
        draw = Draw(held.submit.sampling, end, held.history, held.guide) if end == held.known else None
        ids = held.token_ids(slice_.start, end)
        scores = _scores_of(held, slice_.start, end)
        self._rows.append(Row(slice_.request, slice_.start, ids, tuple(held.table), draw, scores=scores))
        first, full = slice_.start // self._size.block_tokens, end // self._size.block_tokens
        filled, scores_from = tuple(held.table[first:full]), scores.first if scores else None
        self._fed.append(Fed(slice_.request, "draws" if draw else "fed", first, filled, scores_from))
        held.computed = end

    def _grow_table(self, held: Held, slice_: Slice) -> None:
        if slice_.start and not held.table:  # it was preempted, and part of what it had is still there
            self._begin_table(held, slice_.start, slice_.new_blocks)
            return
        self._blocks.hand_out(slice_.request, slice_.new_blocks)
        self._blocks.join(slice_.new_blocks)
        held.table.extend(slice_.new_blocks)

    def _check_slice(self, held: Held, slice_: Slice) -> None:
        where = f"request {slice_.request}: slice of {slice_.count} from {slice_.start}"
        end = slice_.start + slice_.count
        if slice_.start != held.computed or slice_.count < 1:
            raise Contradiction(f"{where} does not continue at {held.computed}")
        if end > held.known:
            raise Contradiction(f"{where} goes beyond the {held.known} tokens known")
        block_tokens = self._size.block_tokens
        if end > len(held.table) * block_tokens:
            raise Contradiction(f"{where} does not fit into a table of {len(held.table)} blocks")
        for index in range(slice_.start // block_tokens, (end - 1) // block_tokens + 1):
            self._blocks.check_writable(slice_.request, held.table[index])


def _scores_of(held: Held, start: int, end: int) -> Scores | None:
    """Return what is to be told of the prompt when these positions are fed; nothing more once there is a token."""
    most = held.submit.sampling.prompt_logprobs
    followers = held.submit.prompt_ids[start + 1 : end + 1]
    if most is None or held.output_ids or not followers:
        return None
    return Scores(start + 1, followers, most)
