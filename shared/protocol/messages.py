"""Everything that travels between services (DESIGN §6).

Each message is frozen, tagged with a name and a version, an array on the wire. Fields are only appended, with defaults;
a changed meaning is a new tag. Every message may come twice and carries its position: ``(epoch, step)`` between leader
and worker, ``(attempt, first_index)`` between worker and gateway, the entry's own id in ``requests``.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.ids import BlockId, EntryId, GatewayId, RequestId, WorkerId
from shared.paging.block_hash import HASH_BYTES

Place = Annotated[EntryId, Meta(pattern=r"^\d{1,20}-\d{1,20}$")]
"""An entry id that really is one: what is compared by its numbers is checked where it is read."""

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]

Finish = Literal["stop", "length", "error"]
"""Why a request ended in the worker: an end-of-turn token, ``max_tokens``, or a failure of this request alone."""


class Bias(Struct, frozen=True, array_like=True):
    """What is added to the logit of one token id."""

    token_id: Count
    bias: float


class Sampling(Struct, frozen=True, array_like=True):
    """How the next token is drawn. ``temperature`` 0 is greedy, ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one are not drawn."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the output has."""
    frequency_penalty: float = 0.0
    """Taken off the logit of every token, as often as the output has it."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the others, of all tokens that prompt or output have."""
    min_tokens: Count = 0
    """Tokens of the whole answer before which none that ends it is drawn."""
    biases: tuple[Bias, ...] = ()
    stop_token_ids: tuple[Count, ...] = ()
    """Tokens that end the answer beside the model's own, even if those are ignored."""
    logprobs: Count | None = None
    """How many of the likeliest tokens are told, with their logprobs, beside the one drawn; None: nothing is."""
    grammar: str = ""
    """A grammar of llguidance's, as its own JSON, that the text of the answer follows; empty: it is free."""
    prompt_logprobs: Count | None = None
    """The same for each token of the prompt but the first: then all of it is computed, whatever is cached."""


class SubmitRequest(Struct, frozen=True, array_like=True, tag="submit/1"):
    """A request, or a request again: ``attempt`` supersedes lower ones wherever they are known.

    ``output_ids`` are the tokens of earlier attempts that the gateway accepted; ``max_tokens`` counts the whole answer.
    ``arrival`` is the entry id of the first submission, empty in the first one itself.
    """

    request: RequestId
    attempt: Count
    gateway: GatewayId
    prompt_ids: Annotated[tuple[int, ...], Meta(min_length=1)]
    max_tokens: Positive
    sampling: Sampling = Sampling()
    output_ids: tuple[int, ...] = ()
    arrival: Annotated[EntryId, Meta(pattern=r"^(\d{1,20}-\d{1,20})?$")] = EntryId("")
    ignore_eos: bool = False
    priority: int = 0
    suspect: bool = False
    tenant: str = ""
    """Whose request it is, for the ``fair`` order: never a secret."""
    cache_salt: str = ""
    """Requests with different salts share no blocks."""
    shares_with: RequestId = RequestId("")
    """The request whose prompt this one repeats: it waits until that prompt has been computed, and finds it cached."""


class CancelRequest(Struct, frozen=True, array_like=True, tag="cancel/1"):
    """End this attempt of a request and all below it."""

    request: RequestId
    attempt: int


class ClaimWorker(Struct, frozen=True, array_like=True, tag="claim/1"):
    """A leader takes command: raise the epoch by one and answer with a `WorkerState` that repeats the nonce."""

    nonce: str


class NewRequest(Struct, frozen=True, array_like=True):
    """A request that joins this worker: all it needs, once. ``blocks`` starts its table, ``start`` tokens are in it.

    These tokens were found in the prefix cache: the first ``start / block_tokens`` blocks are full and only read.
    """

    submit: SubmitRequest
    arrival: EntryId
    start: int
    blocks: tuple[BlockId, ...]


class Slice(Struct, frozen=True, array_like=True):
    """Feed ``count`` tokens of a request from position ``start``; ``new_blocks`` go to the end of its table first.

    If the slice reaches the last token known, one token is sampled. The first slice of one that was preempted brings
    its whole table, and starts behind the tokens that were found in the prefix cache.
    """

    request: RequestId
    start: int
    count: int
    new_blocks: tuple[BlockId, ...] = ()


class StepPlan(Struct, frozen=True, array_like=True, tag="plan/1"):
    """One iteration of one worker. Applied in the order: released, preempted, new, slices."""

    epoch: int
    step: int
    new: tuple[NewRequest, ...] = ()
    slices: tuple[Slice, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    released: tuple[RequestId, ...] = ()


class Resident(Struct, frozen=True, array_like=True):
    """A request that a worker remembers. ``output_ids`` are all sampled so far, those of earlier attempts included.

    ``computed`` positions hold keys and values in ``table``; both are empty while it is preempted or has ended.
    """

    submit: SubmitRequest
    arrival: EntryId
    output_ids: tuple[int, ...]
    computed: Count
    table: tuple[BlockId, ...]
    finish: Finish | None = None
    preemptions: Count = 0
    """How often plans took its table: the bound on it holds across leaders."""


class WorkerSize(Struct, frozen=True, array_like=True):
    """What a worker can hold: ``blocks`` of ``block_tokens`` positions, sequences up to ``max_model_len``."""

    blocks: Positive
    block_tokens: Positive
    max_model_len: Positive


class NamedBlock(Struct, frozen=True, array_like=True):
    """A full block and the hash of its content (``shared.paging.block_hash``) under the worker's key."""

    block: BlockId
    content: Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]


class WorkerState(Struct, frozen=True, array_like=True, tag="worker-state/1"):
    """The answer to a claim: everything the new leader must know. From here on only plans of ``epoch`` are executed.

    ``hash_key`` is the worker's own, drawn when it registers; ``named`` are all full blocks whose content it knows,
    those in several tables first: of two with the same content a shared one must keep the name.
    """

    worker: WorkerId
    epoch: int
    nonce: str
    size: WorkerSize
    residents: tuple[Resident, ...] = ()
    hash_key: Annotated[bytes, Meta(max_length=64)] = b""
    named: tuple[NamedBlock, ...] = ()


class ResultRow(Struct, frozen=True, array_like=True):
    """What one slice came to. ``skipped``: the request had ended before this step, nothing was computed."""

    request: RequestId
    attempt: int
    token_ids: tuple[int, ...] = ()
    finish: Finish | None = None
    skipped: bool = False


class StepResult(Struct, frozen=True, array_like=True, tag="result/1"):
    """A plan has been executed. One row for each of its slices; ``step_s`` is the time the step took."""

    epoch: int
    step: int
    step_s: float
    rows: tuple[ResultRow, ...] = ()
    waited_s: float | None = None
    """How long the plan had been read when its step began; None if nothing was computed."""


class StepFailed(Struct, frozen=True, array_like=True, tag="step-failed/1"):
    """The step raised: the worker has dropped its KV cache and registers under a new id."""

    epoch: int
    step: int
    error: str


class PlanRefused(Struct, frozen=True, array_like=True, tag="plan-refused/1"):
    """A gap in the steps: nothing is executed until the worker is claimed again."""

    epoch: int
    expected: int
    got: int


class Ranked(Struct, frozen=True, array_like=True):
    """One of the likeliest tokens."""

    token_id: int
    logprob: float


class Logprobs(Struct, frozen=True, array_like=True):
    """How likely the model found a token, and which ones it found likeliest, in that order: before any parameter."""

    logprob: float
    top: tuple[Ranked, ...] = ()


class TokenRow(Struct, frozen=True, array_like=True):
    """New tokens of one request; ``first_index`` is the place of the first in the whole answer.

    ``cached_tokens`` of the prompt were not computed when the request was first admitted to this worker. ``logprobs``
    has one entry for each token, or none at all. ``prompt_logprobs`` are those of tokens of the prompt, from its token
    ``prompt_first`` on: what this step computed of them. They come in order, all of them before the first new token or
    with it, and again when they are computed again.
    """

    request: RequestId
    attempt: int
    first_index: int
    token_ids: tuple[int, ...]
    finish: Finish | None = None
    cached_tokens: int = 0
    logprobs: tuple[Logprobs, ...] = ()
    prompt_first: Count = 1
    prompt_logprobs: tuple[Logprobs, ...] = ()


class TokenBatch(Struct, frozen=True, array_like=True, tag="tokens/1"):
    """All tokens of one step for one gateway."""

    worker: WorkerId
    rows: tuple[TokenRow, ...]


class PoolReport(Struct, frozen=True, array_like=True):
    """The leader's figures. ``length_served`` is 0 until a worker was claimed. ``blocks_used`` are held by requests.

    Of the positions held by requests ``kv_tokens_filled`` hold a token, ``kv_tokens_reserved`` are set aside for tokens
    that may still come, ``kv_tokens_internal`` will never hold one. ``prefix_*`` count tokens of newcomers since this
    leader began.
    """

    workers: int = 0
    length_served: int = 0
    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    preemptions: int = 0
    blocks_cached: int = 0
    kv_tokens_filled: int = 0
    kv_tokens_reserved: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    kv_tokens_internal: int = 0


class HeldRequest(Struct, frozen=True, array_like=True):
    """One request that waits, runs, is preempted, or whose last result has not been read."""

    request: RequestId
    attempt: int


class Held(Struct, frozen=True, array_like=True, tag="held/1"):
    """What the leader holds for one gateway, and how far it has read ``requests`` (None: a sign of life, no more)."""

    read_to: Place | None
    held: tuple[HeldRequest, ...]
    report: PoolReport


class RequestRefused(Struct, frozen=True, array_like=True, tag="refused/1"):
    """The leader will not run an attempt. ``code`` is ``too_long`` or ``no_worker``."""

    request: RequestId
    attempt: int
    code: Literal["too_long", "no_worker"]
    message: str


class Registration(Struct, frozen=True, array_like=True, tag="registration/1"):
    """The value of a heartbeat key: what others may know of a part without asking it."""

    kind: Literal["gateway", "scheduler", "worker"]
    model: str
    host: str
    pid: int
    tokenizer: str = ""
    """Workers: the content hash under which the tokenizer side of the model lies in Redis."""


class TokenizerFiles(Struct, frozen=True, array_like=True, tag="tokenizer/1"):
    """The tokenizer side of a model: all that a gateway needs of it."""

    tokenizer_json: bytes
    chat_template: str | None
    eos_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    """``bos_token``, ``eos_token``, …: what a chat template may name."""
    defaults: Sampling = Sampling()
    """The generation config's own sampling parameters, used where a request names none."""


Message = (
    SubmitRequest
    | CancelRequest
    | ClaimWorker
    | StepPlan
    | WorkerState
    | StepResult
    | StepFailed
    | PlanRefused
    | TokenBatch
    | Held
    | RequestRefused
    | Registration
    | TokenizerFiles
)
