"""What the leading scheduler believes: who waits, who runs where, which plans have not been answered."""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.ids import RequestId, WorkerId
from shared.paging.pool import BlockPool
from shared.scheduling.orders.port import QueueOrder
from shared.scheduling.request import Phase, Request
from shared.scheduling.step import Step


@dataclass(slots=True, eq=False)
class WorkerView:
    """One worker as the scheduler sees it. ``running`` is in queue order and holds blocks of ``pool``."""

    id: WorkerId
    pool: BlockPool
    max_model_len: int
    running: list[Request] = field(default_factory=list)
    to_release: list[RequestId] = field(default_factory=list)
    """Ended since the last plan: the next one tells the worker to forget them."""
    in_flight: deque[Step] = field(default_factory=deque)
    """Published plans whose results have not been read, oldest first."""
    previous: Step | None = None
    """The plan published last that fed anybody."""

    @property
    def longest(self) -> int:
        """Positions of the longest sequence that this worker could ever hold."""
        return min(self.pool.tokens, self.max_model_len)

    def can_ever_hold(self, request: Request) -> bool:
        """Return whether the request would fit if it were alone here."""
        return request.footprint.most_tokens <= self.longest

    def take_back(self, request: Request) -> None:
        """Take a running request's blocks, the tail of its table first to be given again, and its place."""
        self.running.remove(request)
        self.pool.release(request.blocks)
        request.blocks.clear()


@dataclass(slots=True, eq=False)
class State:
    """The whole pool. ``requests`` has everyone who waits, runs, or whose last result has not been read."""

    line: QueueOrder
    workers: dict[WorkerId, WorkerView] = field(default_factory=dict)
    requests: dict[RequestId, Request] = field(default_factory=dict)
    preemptions: int = 0
    prefix_queries: int = 0
    """Tokens of newcomers that were looked up in the prefix index."""
    prefix_hits: int = 0
    """Tokens of newcomers that were found there."""

    def admit(self, worker: WorkerView, request: Request) -> None:
        """Let a request run on a worker, in its place."""
        request.move(Phase.RUNNING)
        request.worker = worker.id
        insort(worker.running, request, key=self.line.place)

    @property
    def running(self) -> Iterator[Request]:
        """Everyone who runs anywhere."""
        return (request for worker in self.workers.values() for request in worker.running)

    @property
    def length_served(self) -> int:
        """Positions of the longest sequence that any worker could hold; 0 without a worker."""
        return max((worker.longest for worker in self.workers.values()), default=0)
