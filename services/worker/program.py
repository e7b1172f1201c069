"""A model as a step program: one call of the kernel runs a whole step (`program.c`)."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Any

import numpy as np
import torch
from torch import fx

from services.worker.attention_kernel import KernelStep
from services.worker.attention_path import Int64s, RunningStep, StepView
from services.worker.paged_attention import PagedAttention
from services.worker.program_graph import Graph, called, is_call
from services.worker.program_kernel import Assembler, ProgramStep, Run
from services.worker.program_lowering import Called, Instruction, Lowered, Place, Shown, Step, Taken
from services.worker.program_memory import lay_out
from services.worker.program_patterns import ATTENTION

_ROWS = 16
"""Rows there is room for come in multiples: a matrix tile reads so many."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One step under way: what the kernel is given, and what torch has computed."""

    step: ProgramStep
    known: dict[fx.Node, Any]


class Arena:
    """Memory for the values of a step; grows to the largest step seen."""

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self.capacity = 0
        self.memory = torch.empty(0, dtype=torch.uint8)

    def make_room(self, rows: int) -> None:
        """Have room for so many rows."""
        if rows > self.capacity:
            self.capacity = -(-rows // _ROWS) * _ROWS
            # zeros: rows beyond a step's are read by whole tiles
            self.memory = torch.zeros(max(1, self.capacity * self._row_bytes), dtype=torch.uint8)

    def shown(self, place: Place, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a place as ``[rows, width]``."""
        first = place.value.at * self.capacity // dtype.itemsize + place.column
        whole = self.memory.view(dtype)
        return whole.as_strided((rows, place.width), (place.value.width, 1), first)


class Program:
    """Runs steps. From one thread only: a step's values lie where the last one's lay."""

    def __init__(self, lowered: Lowered, assembler: Assembler, run: Callable[[Any], int], vocabulary: int) -> None:
        self._graph = _needed(lowered)
        self._dtype = lowered.dtype
        self._call = run
        tokens, wanted = lay_out(lowered, self._dtype.itemsize)
        self._arena, self._wanted_arena = Arena(tokens), Arena(wanted)
        self._parts = list(_parts(lowered.steps, assembler))
        self._tail = list(_since(self._parts, first_wanted(lowered)))
        self._ends_in_torch = lowered.ends_in_torch
        self._logits = torch.empty((0, vocabulary), dtype=torch.float32)

    @property
    def torch_calls(self) -> int:
        """Operators of a step that torch computes."""
        return sum(isinstance(part, Called) for part in self._parts)

    def use(self, attention: PagedAttention) -> None:
        """Keep keys and values in its pools from now on; called before the first step."""
        self._attention = attention
        for part in self._parts:
            if isinstance(part, Run):
                part.use(lambda what: attention.pool(what.layer, what.kv_heads, what.dim))

    def __call__(self, view: StepView, running: RunningStep, wanted: Int64s) -> torch.Tensor:
        """Return the logits ``[wanted, vocabulary]`` as float32, good until the next step."""
        return self.begin(view, running)(wanted)

    def begin(self, view: StepView, running: RunningStep) -> Callable[[Int64s], torch.Tensor]:
        """Return what gives the logits at places of a step: what it gave is good until it, or a program, runs again.

        Its first call runs the step, each further one no more than what depends on the places: usually the last
        product alone.
        """
        assert isinstance(running, KernelStep), "a program is made for the kernel's steps"  # noqa: S101 - its maker sees to it
        self._arena.make_room(len(view.token_ids))
        frame = self._frame(view, running.address)
        parts = iter((self._parts,))

        def logits_at(wanted: Int64s) -> torch.Tensor:
            wanted = np.ascontiguousarray(wanted)  # lives as long as the call: the kernel has its address
            self._want(frame, wanted)
            for part in next(parts, self._tail):
                self._do(part, frame)
            if self._ends_in_torch and self._graph is not None:
                logits: torch.Tensor = frame.known[self._graph.logits][0].float()
                return logits
            return self._logits[: len(wanted)]

        return logits_at

    def _frame(self, view: StepView, step_address: int) -> Frame:
        step = ProgramStep()
        step.is_half = self._dtype.itemsize == 2  # noqa: PLR2004 - bytes
        step.arena, step.capacity = self._arena.memory.data_ptr(), self._arena.capacity
        step.step = step_address
        step.token_ids, step.positions = view.token_ids.ctypes.data, view.positions.ctypes.data
        step.tokens = len(view.token_ids)
        known: dict[fx.Node, Any] = {}
        graph = self._graph
        if graph is not None:
            known = dict(graph.weights)
            known[graph.token_ids] = torch.from_numpy(view.token_ids)[None]
            known[graph.positions] = torch.from_numpy(view.positions)[None]
        return Frame(step, known)

    def _want(self, frame: Frame, wanted: Int64s) -> None:
        """Make room for the rows wanted, and tell the step of them."""
        self._wanted_arena.make_room(len(wanted))
        if len(wanted) > len(self._logits):
            self._logits = torch.empty((len(wanted), self._logits.shape[1]), dtype=torch.float32)
        step = frame.step
        step.wanted_arena, step.wanted_capacity = self._wanted_arena.memory.data_ptr(), self._wanted_arena.capacity
        step.wanted, step.wanted_count = wanted.ctypes.data, len(wanted)
        step.logits, step.logits_stride = self._logits.data_ptr(), self._logits.shape[1]
        if self._graph is not None:
            frame.known[self._graph.wanted] = torch.from_numpy(wanted)

    def _do(self, part: Run | Shown | Called | Taken, frame: Frame) -> None:
        match part:
            case Run():
                frame.step.instructions = ctypes.addressof(part.instructions)
                frame.step.count = len(part.instructions)
                if self._call(ctypes.byref(frame.step)):
                    raise MemoryError("no memory for a step")
            case Shown():
                shape = part.node.meta["val"].shape
                rows = self._rows(part.place, frame)
                sizes = [int(size) for size in shape[2:]]
                frame.known[part.node] = self._shown(part.place, frame).reshape(1, rows, *sizes)
            case Called():
                frame.known[part.node] = self._called(part.node, frame)
            case Taken():
                given = frame.known[part.node]
                self._shown(part.place, frame).copy_(given.reshape(given.shape[1], -1))

    def _called(self, node: fx.Node, frame: Frame) -> Any:
        if not is_call(node, ATTENTION):
            return called(node, frame.known)
        # the graph names the instance that it was exported with
        query, key, value, _, *asked = fx.map_arg(node.args, frame.known.__getitem__)
        return ATTENTION(query, key, value, self._attention.number, *asked)

    def _shown(self, place: Place, frame: Frame) -> torch.Tensor:
        arena = self._wanted_arena if place.value.wanted else self._arena
        return arena.shown(place, self._rows(place, frame), self._dtype)

    @staticmethod
    def _rows(place: Place, frame: Frame) -> int:
        rows: int = frame.step.wanted_count if place.value.wanted else frame.step.tokens
        return rows


def _needed(lowered: Lowered) -> Graph | None:
    """Return the graph with no more weights than torch's part needs: the others lie packed, once."""
    nodes = [step.node for step in lowered.steps if isinstance(step, Called)]
    if not nodes or lowered.graph is None:
        return None
    needed = {one for node in nodes for one in node.all_input_nodes}
    weights = {node: tensor for node, tensor in lowered.graph.weights.items() if node in needed}
    return replace(lowered.graph, weights=weights)


def _parts(steps: list[Step], assembler: Assembler) -> Iterator[Run | Shown | Called | Taken]:
    """Yield the steps, instructions that follow each other as one run."""
    for is_ours, group in groupby(steps, lambda step: isinstance(step, Instruction)):
        if is_ours:
            yield assembler.run([step for step in group if isinstance(step, Instruction)])
        else:
            yield from (step for step in group if not isinstance(step, Instruction))


def first_wanted(lowered: Lowered) -> int:
    """Return the first step that depends on the places wanted; 0 if what is computed for all tokens follows it."""
    dependent: set[fx.Node] = set()
    if lowered.graph is not None:
        dependent = {lowered.graph.wanted}
        for node in lowered.graph.nodes:
            if not dependent.isdisjoint(node.all_input_nodes):
                dependent.add(node)
    before = list(takewhile(lambda step: not _is_wanted(step, dependent), lowered.steps))
    after = lowered.steps[len(before) :]
    return 0 if any(_fills(step) for step in after) else len(before)


def _is_wanted(step: Step, dependent: set[fx.Node]) -> bool:
    if isinstance(step, Called):
        return step.node in dependent
    return (step.out if isinstance(step, Instruction) else step.place).value.wanted


def _fills(step: Step) -> bool:
    """Return whether a step writes a row for each token: what lay there is needed no more, and is gone."""
    match step:
        case Instruction():
            return not step.out.value.wanted
        case Taken():
            return not step.place.value.wanted
        case Shown() | Called():
            return False


def _since(parts: list[Run | Shown | Called | Taken], first: int) -> Iterator[Run | Shown | Called | Taken]:
    """Yield the parts from a step on, of a run that it is within no more than the rest."""
    for part in parts:
        steps = len(part.instructions) if isinstance(part, Run) else 1
        if first <= 0:
            yield part
        elif isinstance(part, Run) and first < steps:
            yield part.since(first)
        first -= steps
