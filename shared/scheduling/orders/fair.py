"""Fair queue: a virtual token counter for each tenant (VTC, Sheng et al., OSDI'24)."""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from shared.ids import RequestId
from shared.scheduling.orders.port import Place
from shared.scheduling.request import Request

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""What a token of the prompt and one of the answer are charged at: the figures of the paper's own implementation."""
OLDEST_EVERY = 8
"""Each admission of this number goes to who came first, whatever its tenant has had: nobody starves."""
TENANTS_REMEMBERED = 10_000


class Fair:
    """Serve the tenant that has had least; within a tenant first come, first served. Nobody is kept idle.

    Two tenants who always have requests waiting get the same service within a bound that does not grow. A tenant whose
    line was empty returns at no less than what the least served of the others has had, so that idling saves nothing up.
    The counters live as long as this object: a new leader begins with none.

    Ever new tenants could hold an older one up for ever, as each enters level with the least served. Therefore every
    eighth admission goes to who came first of all. It is charged like any other, so that fairness is kept.

    The cost of a plan, and of a request that comes, grows with the number of tenants that have requests waiting.
    """

    takes_places = False

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._lines: dict[str, list[Request]] = {}
        """Who waits, by tenant; a tenant with nobody waiting is not in it."""
        self._floor = 0.0
        """The most that the least served of those who waited has ever had: nobody returns with less."""
        self._last_out = ""
        """Whose line ran empty last."""
        self._until_oldest = OLDEST_EVERY
        self._standing: dict[str, float] = {}
        """What each had when the present step was begun: the order of those who run."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Request]:
        by_arrival, by_service = self._walk(_by_arrival), self._walk(self._by_service)
        yielded: set[RequestId] = set()
        while True:  # charges that come meanwhile count: whose turn it is is asked for each
            order = by_arrival if self._until_oldest == 1 else by_service
            request = next((request for request in order if request.id not in yielded), None)
            if request is None:
                return
            yielded.add(request.id)
            yield request

    def _walk(self, key: Callable[[Request], tuple[object, ...]]) -> Iterator[Request]:
        """Yield the least of all tenants' first requests, then its tenant's next one is among them, and so on."""
        heads = [(key(line[0]), line[0]) for line in self._lines.values()]
        heapify(heads)
        while heads:
            request = heappop(heads)[-1]
            yield request
            line = self._lines.get(request.tenant, [])
            behind = bisect_right(line, _by_arrival(request), key=_by_arrival)  # it may have been removed meanwhile
            if behind < len(line):
                heappush(heads, (key(line[behind]), line[behind]))

    def add(self, request: Request) -> None:
        """Put a request in its place; if its tenant had none here, lift what the tenant has had."""
        line = self._lines.get(request.tenant)
        if line is None:
            line = self._lines[request.tenant] = []
            self._lift(request.tenant)
        insort(line, request, key=_by_arrival)

    def remove(self, request: Request) -> None:
        """Take a request out. Raises ValueError if it is not there."""
        line = self._lines.get(request.tenant, [])
        line.remove(request)
        if not line:
            del self._lines[request.tenant]
            self._last_out = request.tenant

    def place(self, request: Request) -> Place:
        """Return where a request stands among those who run: who has had most gives way first."""
        served = self._standing.get(request.tenant)
        if served is None:  # a newcomer's tenant that did not run when the step was begun
            served = self._served.get(request.tenant, 0.0)
        return served, request.arrival, request.id

    def sort(self, running: list[Request]) -> None:
        """Put those who run in order of what their tenants have had until now."""
        self._standing = {request.tenant: self._served.get(request.tenant, 0.0) for request in running}
        running.sort(key=self.place)

    def charge_prompt(self, request: Request, tokens: int, *, overtakes: bool) -> None:
        """Charge a newcomer's tenant for what must be computed of the prompt.

        The turn of the oldest stands until it is taken: a long prompt may have been passed over in it.
        """
        self._charge(request.tenant, INPUT_WEIGHT * tokens)
        if self._until_oldest > 1 or not overtakes:
            self._until_oldest = self._until_oldest - 1 or OLDEST_EVERY

    def charge_output(self, requests: Sequence[Request]) -> None:
        """Charge one token of output each."""
        for request in requests:
            self._charge(request.tenant, OUTPUT_WEIGHT)

    def _by_service(self, request: Request) -> tuple[float, tuple[int, int], str]:
        return self._served.get(request.tenant, 0.0), request.arrival, request.id

    def _charge(self, tenant: str, cost: float) -> None:
        self._served[tenant] = self._served.get(tenant, 0.0) + cost

    def _lift(self, tenant: str) -> None:
        others = [other for other in self._lines if other != tenant] or [self._last_out]
        self._floor = max(self._floor, min(self._served.get(other, 0.0) for other in others))
        self._served[tenant] = max(self._served.get(tenant, 0.0), self._floor)
        if len(self._served) > TENANTS_REMEMBERED:
            self._forget_idle()

    def _forget_idle(self) -> None:
        """Forget tenants with nobody waiting, those first who lose least: at or below the floor it is nothing."""
        idle = sorted((served, tenant) for tenant, served in self._served.items() if tenant not in self._lines)
        for _, tenant in idle[: len(self._served) - TENANTS_REMEMBERED // 2]:
            del self._served[tenant]


def _by_arrival(request: Request) -> tuple[tuple[int, int], str]:
    return request.arrival, request.id
