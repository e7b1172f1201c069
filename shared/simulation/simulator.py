"""The leader and its workers in virtual time: events in a heap, the planner of the live service in the middle.

Nothing here decides who runs. The order of things is that of ``services.scheduler``: what has happened is applied,
then every worker whose next plan is due is planned, the least busy first, and again until none is due. A result is
read `Setup.one_way_s` after its step has ended, a plan begins no sooner than that after it was made.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import assert_never

from shared.scheduling.planner import Outcome
from shared.scheduling.step import Step
from shared.simulation import core
from shared.simulation.records import Arrival, Crash, KvUse, RequestRecord, Result, Setup, StepRecord, Totals
from shared.simulation.worker import Executed, Host, Pipeline, Rectangle, Track


@dataclass(frozen=True, slots=True)
class _PlanDue:
    host: Host


@dataclass(frozen=True, slots=True)
class _ResultRead:
    host: Host
    step: Step
    executed: Executed
    record: StepRecord | None
    begun_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class _Noticed:
    """The leader finds a worker dead."""

    host: Host


@dataclass(frozen=True, slots=True)
class _Joins:
    """An empty worker takes the place of one that died."""


_Event = _PlanDue | _ResultRead | Crash | _Noticed | _Joins

Watch = Callable[[StepRecord, Host], None]
"""Called when the result of a step that fed somebody has been applied."""


def simulate(
    setup: Setup, arrivals: Sequence[Arrival], *, crashes: Sequence[Crash] = (), watch: Watch | None = None
) -> Result:
    """Serve the arrivals and return what everyone saw. The same input gives the same result, to the last bit.

    Raises ValueError for a setup that names what does not exist.
    """
    return _Simulation(setup, arrivals, crashes, watch).run()


class _Simulation:
    def __init__(
        self, setup: Setup, arrivals: Sequence[Arrival], crashes: Sequence[Crash], watch: Watch | None
    ) -> None:
        self._setup = setup
        self._watch = watch
        self._planner = core.planner_of(setup)
        in_order = sorted(arrivals, key=lambda arrival: arrival.at_s)
        self._tracks = [_track(index, arrival) for index, arrival in enumerate(in_order)]
        self._by_id = {track.id: track for track in self._tracks}
        self._arrived = 0
        self._hosts: list[Host] = []
        self._heap: list[tuple[float, int, _Event]] = []
        self._events = 0
        self._due: set[int] = set()
        """Numbers of those whose next plan may be due now."""
        self._stuck: set[int] = set()
        """Plans in flight, but the next one would have been empty: any event may change that."""
        self._empty: list[int] = []
        """Numbers of those that hold nobody and have nothing in flight: only a newcomer can change that."""
        self._steps = self._tokens = self._padding = self._reread = 0
        if setup.padded and crashes:
            raise ValueError("padded batches are a cost, not a machine: they do not crash")
        for _ in range(setup.workers):
            self._join(0.0)
        for crash in crashes:
            self._push(crash.at_s, crash)

    def run(self) -> Result:
        while (now_s := self._next_moment()) is not None:
            has_news = self._let_arrive(now_s)
            while self._heap and self._heap[0][0] <= now_s:
                event = heappop(self._heap)[2]
                has_news |= not isinstance(event, _PlanDue)
                self._apply(event, now_s)
            if has_news:
                self._wake()
            self._make_plans(now_s)
        return self._result()

    # -- events -------------------------------------------------------------------------------------------------

    def _next_moment(self) -> float | None:
        moments = [self._heap[0][0]] if self._heap else []
        if self._arrived < len(self._tracks):
            moments.append(self._tracks[self._arrived].arrival.at_s)
        return min(moments, default=None)

    def _push(self, at_s: float, event: _Event) -> None:
        self._events += 1
        heappush(self._heap, (at_s, self._events, event))

    def _let_arrive(self, now_s: float) -> bool:
        before = self._arrived
        while self._arrived < len(self._tracks) and self._tracks[self._arrived].arrival.at_s <= now_s:
            self._submit(self._tracks[self._arrived])
            self._arrived += 1
        return self._arrived > before

    def _submit(self, track: Track) -> None:
        if core.is_too_long(self._planner, track.arrival):
            track.refused = True
            return
        self._planner.submit(
            core.request_of(self._setup, track.index, track.arrival, attempt=track.attempt, output_tokens=track.drawn)
        )

    def _apply(self, event: _Event, now_s: float) -> None:
        match event:
            case _PlanDue():
                if not (event.host.is_dropped or event.host.is_idle):
                    self._due.add(event.host.number)
            case _ResultRead():
                self._read_result(event, now_s)
            case Crash():
                self._crash(event, now_s)
            case _Noticed():
                self._lose(event.host, now_s)
            case _Joins():
                self._join(now_s)
            case _:
                assert_never(event)

    def _read_result(self, event: _ResultRead, now_s: float) -> None:
        host = event.host
        if host.is_dropped or (host.died_s is not None and event.ended_s > host.died_s):
            return
        host.count_blocks(now_s)
        for track in event.executed.sampled:
            track.token_times_s.append(now_s)
        host.times.learn(host.view.in_flight[0], event.ended_s - event.begun_s)
        host.running_since_s = now_s
        self._planner.settle(host.view.id, event.executed.outcomes)
        for track in event.executed.ended:
            track.end_s = now_s
        self._due.add(host.number)
        if not event.step.slices:
            return
        self._count(event.executed)
        if self._watch is not None and event.record is not None:
            self._watch(event.record, host)

    def _count(self, executed: Executed) -> None:
        self._steps += 1
        self._tokens += executed.load.tokens
        self._padding += executed.padding_tokens
        self._reread += executed.load.prefill_read_tokens

    # -- workers that die ---------------------------------------------------------------------------------------

    def _join(self, now_s: float) -> None:
        number = len(self._hosts)
        view = core.view_of(number, self._setup)
        pipeline = Pipeline(self._setup.stages)
        host = Host(number, view, pipeline, is_idle=True, counted_s=now_s, running_since_s=now_s)
        if self._setup.padded:
            host.rectangle = Rectangle()
        self._hosts.append(host)
        self._planner.add_worker(view)
        insort(self._empty, number)

    def _crash(self, crash: Crash, now_s: float) -> None:
        if not 0 <= crash.worker < len(self._hosts) or self._hosts[crash.worker].died_s is not None:
            raise ValueError(f"there is no living worker {crash.worker} at {now_s} s that could die")
        host = self._hosts[crash.worker]
        host.died_s = now_s
        self._push(now_s + crash.noticed_after_s, _Noticed(host))
        if crash.back_after_s is not None:
            self._push(now_s + crash.back_after_s, _Joins())

    def _lose(self, host: Host, now_s: float) -> None:
        host.count_blocks(now_s)
        host.is_dropped = True
        self._due.discard(host.number)
        self._stuck.discard(host.number)
        if host.number in self._empty:
            self._empty.remove(host.number)
        for request in self._planner.drop_worker(host.view.id):
            track = self._by_id[request]
            track.lose()
            self._submit(track)

    # -- plans --------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Let those be planned again for whom something may have changed.

        Of the empty ones no more than could find somebody: each that does takes at least one who waits, and they are
        all alike, so one that finds nobody speaks for the rest.
        """
        count = min(core.waiting(self._planner), len(self._empty))
        woken = [*self._stuck, *self._empty[:count]]
        self._stuck.clear()
        del self._empty[:count]
        for number in woken:
            self._hosts[number].is_idle = False
        self._due.update(woken)

    def _make_plans(self, now_s: float) -> None:
        while ready := self._ready(now_s):
            for _, _, host in ready:
                self._plan(host, now_s)

    def _ready(self, now_s: float) -> list[tuple[int, int, Host]]:
        """Return whose next plan is due now, the least busy first; let the others be called when theirs is."""
        ready = []
        for host in (self._hosts[number] for number in sorted(self._due)):
            moment_s = core.due_at(host.view, self._setup, host.times, host.running_since_s)
            if moment_s is None:
                continue
            if moment_s <= now_s:
                ready.append((len(host.view.running), host.number, host))
            else:
                self._push(moment_s, _PlanDue(host))
        self._due.clear()
        ready.sort(key=_by_load)
        return ready

    def _plan(self, host: Host, now_s: float) -> None:
        view = host.view
        host.count_blocks(now_s)
        step = self._planner.next_step(view.id)
        if step.is_empty:
            self._let_rest(host)
            return
        if len(view.in_flight) == 1:
            host.running_since_s = now_s
        self._due.add(host.number)
        self._note_requests(step, now_s)
        if host.died_s is not None:
            return  # nobody executes it; the leader does not know yet
        executed, seconds = host.execute(step, self._by_id, self._setup.model)
        begun_s, ended_s = host.pipeline.run(now_s + self._setup.one_way_s, seconds)
        record = self._record(host, executed, (now_s, begun_s, ended_s)) if self._watch else None
        result = _ResultRead(host, step, executed, record, begun_s, ended_s)
        self._push(ended_s + self._setup.one_way_s, result)

    def _let_rest(self, host: Host) -> None:
        host.is_idle = True
        if host.view.running or host.view.in_flight:
            self._stuck.add(host.number)
        else:
            insort(self._empty, host.number)

    def _note_requests(self, step: Step, now_s: float) -> None:
        for request in step.preempted:
            self._by_id[request].preemptions += 1
        if not step.admitted:
            return
        for admission in step.admitted:
            track = self._by_id[admission.request]
            if admission.is_new:
                track.cached_tokens += admission.start
            if track.first_scheduled_s is None:
                track.first_scheduled_s = now_s

    def _record(self, host: Host, executed: Executed, moments_s: tuple[float, float, float]) -> StepRecord:
        planned_s, begun_s, ended_s = moments_s
        return StepRecord(
            worker=host.number,
            planned_s=planned_s,
            begun_s=begun_s,
            ended_s=ended_s,
            tokens=executed.load.tokens,
            padding_tokens=executed.padding_tokens,
            decode_rows=executed.load.decode_rows,
            requests=len(executed.outcomes),
            running=len(host.view.running),
            waiting=core.waiting(self._planner),
            blocks_used=host.view.pool.used,
            ended=len(executed.ended),
        )

    # -- the end ------------------------------------------------------------------------------------------------

    def _result(self) -> Result:
        requests = tuple(_record_of(track) for track in self._tracks)
        begun_s = self._tracks[0].arrival.at_s if self._tracks else 0.0
        ended_s = max((track.end_s for track in self._tracks if track.end_s is not None), default=begun_s)
        totals = Totals(
            self._steps,
            self._tokens,
            self._padding,
            self._reread,
            sum(track.preemptions for track in self._tracks),
        )
        return Result(requests, totals, self._kv_use(ended_s - begun_s), ended_s - begun_s)

    def _kv_use(self, span_s: float) -> KvUse:
        blocks = self._setup.kv_tokens // self._setup.block_tokens
        held = sum(host.block_seconds for host in self._hosts)
        mean = held / (blocks * span_s * self._setup.workers) if span_s > 0 else 0.0
        return KvUse(mean, max(host.most_blocks for host in self._hosts) / blocks)


def _by_load(ready: tuple[int, int, Host]) -> tuple[int, int]:
    load, number, _ = ready
    return load, number


def _track(index: int, arrival: Arrival) -> Track:
    request = core.request_id_of(index)
    return Track(request, index, arrival, Outcome(request, 1, ended=False))


def _record_of(track: Track) -> RequestRecord:
    return RequestRecord(
        arrival=track.arrival,
        first_scheduled_s=track.first_scheduled_s,
        token_times_s=track.token_times_s,
        end_s=track.end_s,
        attempts=track.attempt,
        preemptions=track.preemptions,
        cached_tokens=track.cached_tokens,
        refused=track.refused,
    )
