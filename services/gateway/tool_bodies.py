"""Tools in the bodies of requests: what may be called, what must be, and calls of earlier turns."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

MAX_TOOLS = 128

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]
"""With a word on the line's end: ``$`` alone lets one newline pass."""


class FunctionDefinition(Struct, forbid_unknown_fields=True):
    """A function that the model may call. No parameters means that it takes none."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether arguments have to follow the schema even where a call is the model's own choice."""


class Tool(Struct, forbid_unknown_fields=True):
    """Something that the model may call: functions are all there is."""

    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(Struct, forbid_unknown_fields=True):
    """The name of a function."""

    name: FunctionName


class ChosenTool(Struct, forbid_unknown_fields=True):
    """The one function that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Literal["none", "auto", "required"] | ChosenTool


class FunctionCall(Struct, forbid_unknown_fields=True):
    """A function and its arguments, an object as JSON text."""

    name: str
    arguments: str


class ToolCall(Struct, forbid_unknown_fields=True):
    """A call that an earlier answer made."""

    id: str
    type: Literal["function"]
    function: FunctionCall
