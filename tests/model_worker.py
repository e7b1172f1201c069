"""A worker made of counters, for tests of the planner: it executes steps in order and notices every wrong content.

Each position of its memory holds a digest of the whole context up to there, as keys and values do. So what a slice
reads back is wrong as soon as one token, one place or one salt before it was another's.
"""

import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.ids import BlockId, RequestId
from shared.paging.block_hash import BlockHash, HashChain
from shared.scheduling.planner import Outcome
from shared.scheduling.step import Slice, Step

KEY = b"of this worker alone"
VOCABULARY = 3
"""So few that different prompts are often continued alike."""


@dataclass(frozen=True, slots=True)
class Submission:
    """What the gateway sends: it generates ``ends_after`` tokens in all, those of earlier attempts included."""

    request: RequestId
    attempt: int
    prompt: tuple[int, ...]
    ends_after: int
    output: tuple[int, ...] = ()
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Published:
    """A step with the submissions of those who are new in it."""

    step: Step
    new: Mapping[RequestId, Submission]


@dataclass(frozen=True, slots=True)
class Row:
    """What one slice came to."""

    outcome: Outcome
    token_ids: tuple[int, ...]


class Held:
    """One request that the worker remembers."""

    def __init__(self, submission: Submission, block_tokens: int) -> None:
        self.submission = submission
        self.table: list[BlockId] = []
        self.computed = 0
        self.tokens: list[int] = []
        self.digests: list[int] = []
        """Of the context up to and including each token."""
        self.ended = False
        self.chain = HashChain(KEY, block_tokens, submission.salt)
        self.learn((*submission.prompt, *submission.output))

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.submission.prompt) :])

    def learn(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            before = self.digests[-1] if self.digests else zlib.crc32(self.submission.salt.encode())
            self.digests.append(zlib.crc32(token.to_bytes(8, "little"), before))
        self.tokens.extend(token_ids)
        self.chain.extend(token_ids)

    def draw(self) -> int:
        """Generate the next token: the same for the same context."""
        token = self.digests[-1] % VOCABULARY
        self.learn([token])
        self.ended = len(self.output) >= self.submission.ends_after
        return token


class ModelWorker:
    """Blocks handed out as new are blank and nameless from that moment on, as DESIGN §2 wants it."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.held: dict[RequestId, Held] = {}
        self.memory: dict[BlockId, list[int]] = {}
        self.names: dict[BlockId, BlockHash] = {}
        self.iterations: dict[RequestId, int] = {}

    def execute(self, published: Published) -> list[Row]:
        step = published.step
        for request in step.released:
            del self.held[request]  # a release of somebody unknown, or a second one, is a KeyError
        for request in step.preempted:
            self.held[request].table, self.held[request].computed = [], 0
        for admission in step.admitted:
            if admission.is_new:
                assert admission.request not in self.held, "it is known already"
                held = self.held[admission.request] = Held(published.new[admission.request], self.block_tokens)
                self._begin(held, admission.blocks, admission.start)
        return [self._run(slice_, self.held[slice_.request]) for slice_ in step.slices]

    def _begin(self, held: Held, blocks: Sequence[BlockId], start: int) -> None:
        """Start a table: what was found is full, the rest is handed out as new."""
        assert start % self.block_tokens == 0, "only full blocks are shared"
        held.table, held.computed = list(blocks), start
        self._hand_out(blocks[start // self.block_tokens :])

    def _hand_out(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self.names.pop(block, None)
            self.memory[block] = [-1] * self.block_tokens

    def _run(self, slice_: Slice, held: Held) -> Row:
        request, attempt = slice_.request, held.submission.attempt
        if not held.table and not held.ended:
            self._begin(held, slice_.new_blocks, slice_.start)
        else:
            self._hand_out(slice_.new_blocks)
            held.table.extend(slice_.new_blocks)
        if held.ended:
            return Row(Outcome(request, attempt, ended=False, computed=False), ())
        end = slice_.start + slice_.count
        assert slice_.start == held.computed, f"{request}: has {held.computed} positions, is fed from {slice_.start}"
        assert end <= len(held.tokens), f"{request}: is fed tokens that nobody knows"
        assert slice_.samples == (end == len(held.tokens))
        self._write(held, end)
        self._read_back(request, held, end)
        self.iterations[request] = self.iterations.get(request, 0) + 1
        token_ids = (held.draw(),) if slice_.samples else ()
        return Row(Outcome(request, attempt, ended=held.ended), token_ids)

    def _write(self, held: Held, end: int) -> None:
        for position in range(held.computed, end):
            index, offset = divmod(position, self.block_tokens)
            block = held.table[index]
            assert block not in self.names, f"block {block} can be found by its content, and is written"
            self.memory[block][offset] = held.digests[position]
            if offset == self.block_tokens - 1:
                self.names[block] = held.chain.hashes[index]
        held.computed = end

    def _read_back(self, request: RequestId, held: Held, end: int) -> None:
        for index in range(-(-end // self.block_tokens)):
            first = index * self.block_tokens
            wanted = held.digests[first : min(end, first + self.block_tokens)]
            found = self.memory[held.table[index]][: len(wanted)]
            assert found == wanted, f"{request} reads another content in block {held.table[index]}, number {index}"


@dataclass
class Host:
    """A model worker with the steps that were sent to it and the results that have not been read."""

    model: ModelWorker
    steps: deque[Published] = field(default_factory=deque)
    results: deque[list[Row]] = field(default_factory=deque)

    def execute(self) -> list[Row]:
        """Run the oldest step."""
        rows = self.model.execute(self.steps.popleft())
        self.results.append(rows)
        return rows
