"""All requests that a leader holds, from reading their submission to their last result, and what is said of them."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import structlog

from services.scheduler.known import KnownRequests
from services.scheduler.outbox import Outbox
from services.scheduler.report import no_worker, report_of, too_long
from services.scheduler.wire import request_of, request_of_resident
from shared.ids import EntryId, GatewayId, RequestId
from shared.paging.block_hash import TokenPrefix
from shared.protocol import names
from shared.protocol.messages import CancelRequest, Held, HeldRequest, Resident, SubmitRequest
from shared.scheduling.planner import Planner
from shared.scheduling.state import WorkerView

ENDED_REMEMBERED = 4096
"""More than end in the seconds before a new leader reads the line; who is forgotten runs once more, to nobody."""

log = structlog.get_logger()


@dataclass(slots=True)
class Line:
    """Applies submissions and cancellations, and settles their entries when what they asked for is published."""

    planner: Planner
    outbox: Outbox
    max_model_len: int | None
    """The longest sequence that is served, whatever the workers could hold."""
    shares_prefixes: bool = True
    """Whether requests may begin with blocks that others have computed."""
    known: KnownRequests = field(default_factory=KnownRequests)
    length_served: int = 0
    """Stays as it was while there is no worker; 0 before the first."""
    _ended: dict[RequestId, int] = field(default_factory=dict)
    """Attempts that ended before their submission was read, as after a change of leader: it will be old news."""

    def read_submission(self, entry: EntryId, submit: SubmitRequest) -> None:
        """Let a request wait, unless it is a copy, superseded, ended, or longer than anything that is served."""
        if self._is_old_news(submit):
            self.outbox.settle([entry])
            self.known.was_read(submit)
            return
        if self.known.get(submit.request) is not None:
            self.end(submit.request)
        if self._is_too_long(submit):
            self.outbox.say(names.tokens(submit.gateway), too_long(submit, self.length_served))
            self.outbox.settle([entry])
            return
        arrival = submit.arrival or entry
        prefix = self._prefix(submit, submit.output_ids)
        self.known.add(submit, arrival, entry, prefix)
        self.planner.submit(request_of(submit, arrival, prefix))
        log.debug("submitted", request=submit.request, attempt=submit.attempt)

    def read_cancellation(self, entry: EntryId, cancel: CancelRequest) -> WorkerView | None:
        """End this attempt of a request and those below.

        Returns the worker that the next plan must tell: the entry is settled with that plan. None: it is settled.
        """
        known = self.known.get(cancel.request)
        if known is None or known.submit.attempt > cancel.attempt:
            self.outbox.settle([entry])
            return None
        worker = self.planner.state.requests[cancel.request].worker
        self.end(cancel.request)
        log.debug("cancelled", request=cancel.request, attempt=cancel.attempt)
        view = self.planner.state.workers.get(worker) if worker else None
        if view is None or cancel.request not in view.to_release:
            self.outbox.settle([entry])
            return None
        return view

    def adopt(self, view: WorkerView, resident: Resident) -> None:
        """Take over what a claimed worker remembers; it is told to forget what has ended, or is held elsewhere."""
        request, attempt = resident.submit.request, resident.submit.attempt
        if resident.finish is not None:
            self._note_ended(resident.submit)
            view.to_release.append(request)
            return
        known = self.known.get(request)
        if known is not None:
            is_twin = known.submit.attempt == attempt and self.planner.state.requests[request].worker is not None
            if known.submit.attempt > attempt or is_twin:
                view.to_release.append(request)
                return
            self.end(request)
        prefix = self._prefix(resident.submit, resident.output_ids)
        try:
            self.planner.adopt(view, request_of_resident(resident, prefix))
        except ValueError as error:
            log.warning("resident_not_adopted", worker=view.id, request=request, error=str(error))
            view.to_release.append(request)
            return
        self.known.add(resident.submit, resident.arrival, None, prefix)

    def measure(self) -> None:
        """Note the length served by the workers there are, and refuse who is longer; without a worker it stays."""
        longest = self.planner.state.length_served
        if not longest:
            return
        self.length_served = min(longest, self.max_model_len or longest)
        for known in list(self.known):
            waits = self.planner.state.requests[known.submit.request].worker is None
            if waits and self._is_too_long(known.submit):
                self.outbox.say(names.tokens(known.submit.gateway), too_long(known.submit, self.length_served))
                self.end(known.submit.request)

    def lose_gateways(self, living: Collection[str], noticed: int) -> bool:
        """End what belongs to gateways that are gone, as of ``noticed`` requests; return whether there was any."""
        gone = {
            known.submit.gateway
            for known in self.known
            if known.noticed <= noticed and known.submit.gateway not in living
        }
        for known in [known for known in self.known if known.submit.gateway in gone]:
            self.end(known.submit.request)
        for gateway in sorted(gone):
            self.outbox.declare_dead(gateway)
            log.warning("gateway_lost", gateway=gateway)
        return bool(gone)

    def refuse_all(self) -> None:
        """Refuse everyone: there has been no worker for too long."""
        for known in list(self.known):
            self.outbox.say(names.tokens(known.submit.gateway), no_worker(known.submit))
            self.end(known.submit.request)

    def finish(self, requests: Iterable[RequestId]) -> None:
        """Hold requests no longer whose answer is whole."""
        for request in requests:
            known = self.known.get(request)
            if known is not None and known.entry is None and not known.is_settled:
                self._note_ended(known.submit)
            self.outbox.settle(self.known.forget(request))

    def _note_ended(self, submit: SubmitRequest) -> None:
        self._ended[submit.request] = submit.attempt
        if len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def end(self, request: RequestId) -> None:
        """End a request, whatever it does, and settle its submission."""
        self.planner.end(request)
        self.forget([request])

    def forget(self, requests: Iterable[RequestId]) -> None:
        """Hold requests no longer that the planner has ended or lost; settle their submissions."""
        for request in requests:
            self.outbox.settle(self.known.forget(request))

    def say_held(self, gateways: Collection[str], read_to: EntryId | None) -> None:
        """Tell each living gateway what is held for it, and how far ``requests`` has been read."""
        held = self.known.of_gateways()
        report = report_of(self.planner.state, self.length_served)
        for gateway in map(GatewayId, gateways):
            rows = tuple(HeldRequest(k.submit.request, k.submit.attempt) for k in held.get(gateway, ()))
            self.outbox.say(names.tokens(gateway), Held(read_to, rows, report))

    def _prefix(self, submit: SubmitRequest, output_ids: tuple[int, ...]) -> TokenPrefix | None:
        return TokenPrefix((*submit.prompt_ids, *output_ids), submit.cache_salt) if self.shares_prefixes else None

    def _is_old_news(self, submit: SubmitRequest) -> bool:
        if self._ended.pop(submit.request, -1) >= submit.attempt:
            return True
        known = self.known.get(submit.request)
        return known is not None and known.submit.attempt >= submit.attempt

    def _is_too_long(self, submit: SubmitRequest) -> bool:
        most = len(submit.prompt_ids) + max(submit.max_tokens, len(submit.output_ids) + 1)
        return 0 < self.length_served < most
