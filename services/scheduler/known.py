"""Every request that the leader holds: message, arrival, and its entry in ``requests`` until that is settled."""

from collections.abc import Iterator
from dataclasses import dataclass

from shared.ids import EntryId, GatewayId, RequestId
from shared.paging.block_hash import TokenPrefix
from shared.protocol.messages import SubmitRequest


@dataclass(slots=True)
class Known:
    """One held request. ``entry`` is its submission in ``requests``, None once that is settled, or not read yet."""

    submit: SubmitRequest
    arrival: EntryId
    entry: EntryId | None
    prefix: TokenPrefix | None
    """Its tokens as far as results have told them, for the prefix cache; None if it shares nothing."""
    noticed: int
    """Position in the order in which this leader learnt of requests."""
    is_settled: bool = False


class KnownRequests:
    """Requests by id. What one says of its entry is what is still to be deleted."""

    def __init__(self) -> None:
        self._known: dict[RequestId, Known] = {}
        self.noticed = 0

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Known]:
        return iter(self._known.values())

    def get(self, request: RequestId) -> Known | None:
        """Return a held request, if it is held."""
        return self._known.get(request)

    def add(
        self, submit: SubmitRequest, arrival: EntryId, entry: EntryId | None, prefix: TokenPrefix | None = None
    ) -> None:
        """Hold a request from now on."""
        self.noticed += 1
        self._known[submit.request] = Known(submit, arrival, entry, prefix, self.noticed)

    def message(self, request: RequestId) -> tuple[SubmitRequest, EntryId]:
        """Return message and arrival of a held request. Raises KeyError for any other."""
        known = self._known[request]
        return known.submit, known.arrival

    def settled(self, request: RequestId, attempt: int) -> tuple[EntryId, ...]:
        """Take the entry of this attempt for deletion, if it still stands: news of older ones settle nothing."""
        known = self._known.get(request)
        if known is None or known.entry is None or known.submit.attempt != attempt:
            return ()
        entry, known.entry, known.is_settled = known.entry, None, True
        return (entry,)

    def append(self, request: RequestId, attempt: int, token_ids: tuple[int, ...]) -> None:
        """Note what a result says was generated."""
        known = self._known.get(request)
        if known is not None and known.prefix is not None and known.submit.attempt == attempt:
            known.prefix.append(token_ids)

    def was_read(self, submit: SubmitRequest) -> None:
        """Note that the submission of a request that a worker remembered has been read, and settled."""
        known = self._known.get(submit.request)
        if known is not None and known.submit.attempt == submit.attempt:
            known.is_settled = True

    def forget(self, request: RequestId) -> tuple[EntryId, ...]:
        """Hold a request no longer; return its entry for deletion, if it still stands."""
        known = self._known.pop(request, None)
        return () if known is None or known.entry is None else (known.entry,)

    def of_gateways(self) -> dict[GatewayId, list[Known]]:
        """Return all that is held, by gateway."""
        by_gateway: dict[GatewayId, list[Known]] = {}
        for known in self._known.values():
            by_gateway.setdefault(known.submit.gateway, []).append(known)
        return by_gateway
