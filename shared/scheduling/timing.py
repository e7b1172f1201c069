"""When to make the next plan: the last one as late as is safe, so that a newcomer joins the very next iteration."""

from shared.scheduling.state import WorkerView
from shared.scheduling.step import Step

MARGIN_S = 0.005
"""How long before the running step ends the next plan is made, until it has been learnt: ten round trips of Redis."""
ENOUGH_S = 0.003
"""A plan that lay at the worker for so long before its step began was there in time to be laid out."""
_LATER_S = 0.00002
_SOONER_S = 0.001
"""One plan in fifty may come late: where as many are late as that, the two ways to move the margin cancel out."""
_MUCH_S, _BACK_S = 0.02, 0.0002
"""What a bad second has added is taken off ten times as fast while plans lie there for so long."""
_MOST_S = 0.05
_WEIGHT_OF_THE_NEWEST = 0.25


class StepTimes:
    """Learnt duration of steps by their number of tokens, in powers of two; and how far ahead plans have to be made."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self.longest_s = 0.0
        self.margin_s = MARGIN_S

    def learn(self, step: Step, seconds: float) -> None:
        """Take note of how long a step took."""
        size = step.tokens.bit_length()
        known = self._seconds.get(size, seconds)
        self._seconds[size] = known + _WEIGHT_OF_THE_NEWEST * (seconds - known)
        self.longest_s = max(self.longest_s, seconds)

    def learn_margin(self, waited_s: float) -> None:
        """Take note of how long a plan made ahead lay at its worker before its step began."""
        if waited_s < ENOUGH_S:
            moved_s = self.margin_s + _SOONER_S
        else:
            moved_s = self.margin_s - (_BACK_S if waited_s > _MUCH_S else _LATER_S)
        self.margin_s = min(max(moved_s, ENOUGH_S), _MOST_S)

    def predict(self, step: Step) -> float:
        """Return the expected seconds of a step: those of its size, else of the next smaller one known, else 0."""
        size = step.tokens.bit_length()
        while size >= 0:
            if size in self._seconds:
                return self._seconds[size]
            size -= 1
        return 0.0


def plan_at(worker: WorkerView, depth: int, times: StepTimes, running_since_s: float) -> float | None:
    """Return the moment at which a worker's next plan should be made; None while ``depth`` plans are in flight.

    ``running_since_s`` is when its oldest plan in flight began to run. All but the last plan are made at once, the last
    one ``margin_s`` before the steps in flight are expected to end. What is too early costs a newcomer an iteration,
    what is too late costs the worker a round trip: on two cores that the step's own threads keep busy one of 5 ms.
    """
    in_flight = len(worker.in_flight)
    if in_flight >= depth:
        return None
    if in_flight < depth - 1 or not in_flight:
        return running_since_s
    return running_since_s + sum(times.predict(step) for step in worker.in_flight) - times.margin_s
