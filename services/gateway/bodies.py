"""Bodies of requests as types, and what else OpenAI's and vLLM's clients may name as long as it asks for nothing.

A field that we do not know, or that asks for what we do not have, is refused by its name. What only labels a request
(``user``, ``metadata``, ``service_tier``, …) is taken and changes nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from services.gateway.tool_bodies import MAX_TOOLS, Tool, ToolCall, ToolChoice
from shared.errors import InvalidParameter

MAX_NAME_CHARACTERS = 64
MAX_CHOICES = 128
"""Answers to one request, whether to one prompt or to several."""
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

Tokens = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Priority = Annotated[int, Meta(ge=-100, le=100)]
MAX_TIMEOUT_S = 3600.0
Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
Salt = Annotated[str, Meta(min_length=1, max_length=256)]


class UnsupportedParameter(InvalidParameter):
    """A field asks for something that is not served here."""

    code = "unsupported_parameter"


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream also carries. Obfuscation is OpenAI's own: taken, and nothing is hidden."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Struct, forbid_unknown_fields=True):
    """The schema of an answer. It is always kept to, ``strict`` or not; name and description are labels."""

    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """What the text of an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What both ways to generate take."""

    model: str
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    """As in vLLM and transformers: 1 is off. The bounds keep logits finite."""
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] = 0
    stop_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    priority: Priority = 0
    """Smaller is more urgent, as in vLLM. Taken whatever the pool's queue order: only ``priority`` heeds it."""
    cache_salt: Salt | None = None
    """Only requests with the same salt share blocks of the prefix cache."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    timeout: Timeout | None = None
    """Seconds from the arrival of the request after which nobody waits for its answer any more."""
    response_format: ResponseFormat | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class TextPart(Struct, forbid_unknown_fields=True):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(Struct, forbid_unknown_fields=True):
    """One turn of a chat. All have content but an assistant that called tools; their results name the call."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        """Check what depends on the role. Raises ValueError, in msgspec's own words, which name the field."""
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("Object contains unknown field `tool_calls`")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("Object contains unknown field `tool_call_id`")
        if self.content is None and not self.tool_calls:
            raise ValueError("Object missing required field `content`")
        if self.tool_call_id is None and self.role == "tool":
            raise ValueError("Object missing required field `tool_call_id`")


class ChatBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    """What the model's chat template is told beside the chat."""


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/completions. The prompt is checked by hand: its types cannot be told apart by a schema."""

    prompt: str | list[Any]
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool = False
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """0 only with ``echo``: then the prompt is all that is answered."""


NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that are known but not served, and the values of them that ask for nothing; ``null`` always does."""

_Body = TypeVar("_Body", bound=Struct)


def read_body(kind: type[_Body], data: bytes | bytearray) -> _Body:
    """Return the body. Raises InvalidParameter that names the field."""
    try:
        plain = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidParameter(f"the body is not valid JSON: {error}") from error
    if not isinstance(plain, dict):
        raise InvalidParameter(f"the body must be a JSON object, not {_json_type(plain)}")
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    wanted = {name: _without_nulls(value) for name, value in plain.items() if _is_wanted(name, value, known)}
    try:
        return msgspec.convert(wanted, kind)
    except msgspec.ValidationError as error:
        raise _named(error) from error


def _is_wanted(name: str, value: object, known: set[str]) -> bool:
    """Say whether a field has to be read; False if it asks for nothing. Raises if it asks for what we do not have."""
    if name in known:
        return value is not None
    if name not in NEUTRAL:
        raise UnsupportedParameter(f"unknown field {_short(name)}", param=_short(name))
    if value is None or any(value == neutral and type(value) in _types_of(neutral) for neutral in NEUTRAL[name]):
        return False
    raise UnsupportedParameter(f"{name} is not supported here with this value", param=name)


def _types_of(neutral: object) -> tuple[type, ...]:
    """Return the JSON types that may stand for a value: 0 and 0.0 are the same number, False is none."""
    is_number = isinstance(neutral, int) and not isinstance(neutral, bool)
    return (int, float) if is_number else (type(neutral),)


def _without_nulls(value: object) -> object:
    """Drop null fields of objects at any depth of a list: null means the default."""
    if isinstance(value, dict):
        return {name: inner for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) if isinstance(inner, dict) else inner for inner in value]
    return value


def _named(error: msgspec.ValidationError) -> InvalidParameter:
    """Return msgspec's sentence with the field that it speaks of."""
    sentence, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").lstrip(".").removesuffix("[...]")  # a value of an object, whose key is not told
    if "`" in sentence and (sentence.startswith(("Object missing required", "Object contains unknown"))):
        field = f"{field}.{sentence.split('`')[1]}".lstrip(".")
    sentence = sentence.replace(" | null`", "`")
    return InvalidParameter(f"{field}: {sentence}" if field else sentence, param=field or None)


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARACTERS else f"{name[:MAX_NAME_CHARACTERS]}…"
