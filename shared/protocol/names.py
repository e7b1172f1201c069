"""Names of streams and keys. Parts are found through the sets of ids, never by searching keys."""

from typing import Literal

from shared.ids import GatewayId, WorkerId

PREFIX = "slipstream:"
Kind = Literal["gateway", "scheduler", "worker"]

DEAD_LETTER = f"{PREFIX}dead-letter"
DEAD_LETTER_ENTRIES = 10_000


def requests(model: str) -> str:
    """Return the waiting line of a model: submissions and cancellations of all gateways in one order."""
    return f"{PREFIX}requests:{model}"


def plans(worker: WorkerId) -> str:
    """Return the stream in which a worker reads claims and plans."""
    return f"{PREFIX}plans:{worker}"


def results(worker: WorkerId) -> str:
    """Return the stream in which a worker answers its leader."""
    return f"{PREFIX}results:{worker}"


def tokens(gateway: GatewayId) -> str:
    """Return the stream in which a gateway reads tokens, refusals and lists of what is held."""
    return f"{PREFIX}tokens:{gateway}"


def members(kind: Kind, model: str) -> str:
    """Return the set of the ids of all parts of a kind that may be alive."""
    return f"{PREFIX}members:{kind}:{model}"


def beat(part: str) -> str:
    """Return the heartbeat key of a part; its value is the part's `Registration`."""
    return f"{PREFIX}beat:{part}"


def dead(part: str) -> str:
    """Return the key that stands once a part has been declared dead."""
    return f"{PREFIX}dead:{part}"


def leader(model: str) -> str:
    """Return the lease of a model's leading scheduler."""
    return f"{PREFIX}leader:{model}"


def tokenizer(content_hash: str) -> str:
    """Return the key of the tokenizer side of a model."""
    return f"{PREFIX}tokenizer:{content_hash}"
