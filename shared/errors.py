"""Every error of ours.

::

    ServingError                  something of ours went wrong, or was refused
    ├─ RequestRejected            the client's fault: an HTTP status, an OpenAI error code, the field
    │  ├─ InvalidParameter        400, a field has a value that we cannot take
    │  ├─ PromptTooLong           400, context_length_exceeded
    │  ├─ UnknownModel            404, model_not_found
    │  ├─ InvalidKey              401, invalid_api_key
    │  └─ BodyTooLarge            413, request_too_large
    ├─ Unavailable                ours; the client may try again after ``retry_after_s``
    │  ├─ Overloaded              429, the waiting line is full
    │  │  └─ KeyLimited           429, rate_limit_exceeded: the line has room, but not for this key
    │  ├─ QueuedTooLong           408, queue_timeout: it has waited for longer than anybody shall
    │  ├─ TimedOut                504, timeout: its own time was over before its answer was whole
    │  └─ NotServing              503, no worker, draining, or no word from the scheduler
    ├─ GenerationFailed           500, this request failed while it ran
    ├─ ProtocolError              a message that we cannot read → dead letter, counted, logged once
    ├─ LeaseLost                  a leader's write found the lease not its own: start over as a standby
    ├─ DeclaredDead               a part finds ``dead:{id}`` written: register under a new id
    ├─ BusUnavailable             Redis does not answer, or is set up so that it would lose work
    └─ StartupError               a part cannot start: one sentence for the person who started it
"""


class ServingError(Exception):
    """Every error of ours. Its text is one sentence that may be shown to a person."""


class RequestRejected(ServingError):
    """The client's fault. Raised before any work is done for the request."""

    status = 400
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidParameter(RequestRejected):
    """A field has a value that we cannot take."""

    code = "invalid_value"


class PromptTooLong(RequestRejected):
    """Prompt and answer together exceed the length served."""

    code = "context_length_exceeded"


class UnknownModel(RequestRejected):
    """No model of that name is served here."""

    status = 404
    code = "model_not_found"


class InvalidKey(RequestRejected):
    """The request brings no key, or one that is not known here. No text of ours ever repeats it."""

    status = 401
    code = "invalid_api_key"


class BodyTooLarge(RequestRejected):
    """The body has more bytes, or more values, than are read."""

    status = 413
    code = "request_too_large"


class Unavailable(ServingError):
    """Ours, and passing: the same request may succeed after ``retry_after_s`` seconds."""

    status = 503
    code = "unavailable"
    retry_after_s = 1.0


class Overloaded(Unavailable):
    """The waiting line is full."""

    status = 429
    code = "queue_full"


class KeyLimited(Overloaded):
    """As much as its key allows is under way or waits already."""

    code = "rate_limit_exceeded"


class QueuedTooLong(Unavailable):
    """The request has waited for its first token for longer than anybody shall, or than its client wants to."""

    status = 408
    code = "queue_timeout"


class TimedOut(Unavailable):
    """The client's own ``timeout`` has passed while the answer was being made."""

    status = 504
    code = "timeout"


class NotServing(Unavailable):
    """No worker, draining, or no word from the scheduler."""

    code = "not_ready"
    retry_after_s = 2.0


class GenerationFailed(ServingError):
    """The request failed while it ran."""

    status = 500
    code = "generation_failed"


class ProtocolError(ServingError):
    """A message that cannot be read."""


class LeaseLost(ServingError):
    """A leader's write found the lease not its own."""


class DeclaredDead(ServingError):
    """The part has been declared dead under the id that it has."""


class BusUnavailable(ServingError):
    """Redis does not answer, or is set up so that it would lose work."""


class StartupError(ServingError):
    """A part cannot start. The text is what the person who started it reads."""
