"""What waits for its first token: how many tokens of prompts, in all and of each client. Pure."""

from collections import Counter
from dataclasses import dataclass

from services.gateway.tenants import Tenant
from shared.errors import KeyLimited, Overloaded
from shared.ids import RequestId


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request that has no token yet."""

    tenant: str
    tokens: int
    since_s: float


class Queued:
    """The requests of this gateway that wait, from their submission to their first token or their end."""

    def __init__(self) -> None:
        self.tokens = 0
        self._waiting: dict[RequestId, Waiting] = {}
        self._tokens_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def check_room(self, tenant: Tenant, tokens: int, max_tokens: int) -> None:
        """Raise Overloaded if so many tokens more would be too many, in all or for this client.

        Who finds nobody waiting is let through however long its prompt: it would never have room.
        """
        if self.tokens and self.tokens + tokens > max_tokens:
            raise Overloaded(f"the waiting line has {self.tokens} tokens, and no room for {tokens} more: try again")
        own = self._tokens_of[tenant.name]
        if tenant.max_queued_tokens is not None and own and own + tokens > tenant.max_queued_tokens:
            raise KeyLimited(f"{own} tokens of this key wait, and it has no room for {tokens} more: try again")

    def join(self, request: RequestId, waiting: Waiting) -> None:
        """Begin to count a request."""
        self._waiting[request] = waiting
        self.tokens += waiting.tokens
        self._tokens_of[waiting.tenant] += waiting.tokens

    def leave(self, request: RequestId) -> None:
        """Count a request no longer; nothing happens if it was not counted."""
        waiting = self._waiting.pop(request, None)
        if waiting is None:
            return
        self.tokens -= waiting.tokens
        self._tokens_of[waiting.tenant] -= waiting.tokens
        if not self._tokens_of[waiting.tenant]:
            del self._tokens_of[waiting.tenant]  # or whoever once sent a key would be remembered for ever

    def since_before(self, moment_s: float) -> list[RequestId]:
        """Return who has waited since before that moment."""
        return [request for request, waiting in self._waiting.items() if waiting.since_s < moment_s]
