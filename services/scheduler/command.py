"""How one worker is commanded: claims, epochs, steps, and what it has not answered (DESIGN §4)."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.ids import EntryId, WorkerId
from shared.protocol.messages import CancelRequest, PlanRefused, StepFailed, StepResult, WorkerState
from shared.scheduling.timing import StepTimes

FromWorker = WorkerState | StepResult | StepFailed | PlanRefused
UNANSWERED_S = 30.0
FIRST_STEP_S = 300.0
"""For a step that nothing is known about yet: on a starved machine it has been seen to take most of a minute."""
_LONGEST_STEPS = 20


class Published(NamedTuple):
    """A plan in flight: when it was published, and whether another one was running then."""

    at_s: float
    is_ahead: bool


@dataclass(slots=True)
class Command:
    """The leader's side of one worker. ``nonce`` stands while a claim is unanswered; nothing is planned meanwhile."""

    worker: WorkerId
    nonce: str | None
    asked_s: float
    """When the claim was published."""
    epoch: int = 0
    step: int = 0
    published: deque[Published] = field(default_factory=deque)
    """The plans in flight, oldest first."""
    running_since_s: float = 0.0
    """When the oldest plan in flight began to run."""
    is_idle: bool = False
    """The last attempt to plan found nothing to do; there is no other before an event."""
    cancels: list[tuple[EntryId, CancelRequest]] = field(default_factory=list)
    """Cancellations that the next plan carries: their entries go with it."""
    times: StepTimes = field(default_factory=StepTimes)

    @property
    def is_claimed(self) -> bool:
        """True once the claim has been answered."""
        return self.nonce is None

    def claimed(self, epoch: int, now_s: float) -> None:
        """Begin to plan in a new epoch."""
        self.nonce, self.epoch, self.step, self.running_since_s = None, epoch, 0, now_s
        self.published.clear()

    def reclaim(self, nonce: str, now_s: float) -> None:
        """Ask again who the worker is and what it holds."""
        self.nonce, self.asked_s, self.is_idle = nonce, now_s, False
        self.published.clear()

    def next_number(self, now_s: float) -> int:
        """Count a plan as published and return its step."""
        is_ahead = bool(self.published)
        if not is_ahead:
            self.running_since_s = now_s
        self.published.append(Published(now_s, is_ahead))
        self.step += 1
        return self.step

    def awaits(self, message: FromWorker) -> bool:
        """Return whether a message answers what this leader asked last: its claim, or its oldest plan in flight."""
        if isinstance(message, WorkerState):
            return message.nonce == self.nonce
        if not self.is_claimed or message.epoch != self.epoch:
            return False
        if isinstance(message, StepResult):
            return bool(self.published) and message.step == self.step - len(self.published) + 1
        return True

    def answered(self, result: StepResult, now_s: float) -> None:
        """Count the oldest plan in flight as answered: the next one runs from now."""
        plan = self.published.popleft()
        if plan.is_ahead and result.waited_s is not None:
            self.times.learn_margin(result.waited_s)
        self.running_since_s = now_s

    def is_overdue(self, now_s: float) -> bool:
        """Return whether a claim or a plan has been unanswered for so long that the worker must be dead."""
        since_s = self.asked_s if self.nonce is not None else min((plan.at_s for plan in self.published), default=now_s)
        return now_s - max(since_s, self.running_since_s) > self._patience_s

    @property
    def _patience_s(self) -> float:
        if self.is_claimed and not self.times.longest_s:
            return FIRST_STEP_S
        return max(UNANSWERED_S, _LONGEST_STEPS * self.times.longest_s)
