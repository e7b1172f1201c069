"""What a chat asks for beside its messages: tools, how they are to be called, and what its template is told. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec.structs import asdict

from services.gateway.bodies import ChatBody, ChatMessage
from services.gateway.chats import Chat
from services.gateway.grammars import check_schema, fault_of
from services.gateway.nested import check_nested
from services.gateway.tokenizer import ModelTokenizer
from services.gateway.tool_bodies import ChosenTool, Tool, ToolCall, ToolChoice
from services.gateway.tool_calls import Layout
from services.gateway.tool_grammars import may_call, must_call
from shared.errors import InvalidParameter

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "documents",
        "messages",
        "return_assistant_tokens_mask",
        "self",
        "tools",
    }
)
"""Names that a template is told by the gateway itself, beside those of the special tokens."""
_SPECIAL = re.compile(r"(\w+_token|\w*special_tokens)$")
_FAULT_CHARACTERS = 200
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the model may call tools in one request: it does not where this is None."""

    layout: Layout
    tools: Sequence[Tool]
    choice: Literal["auto", "required"] | ChosenTool
    is_parallel: bool

    @property
    def names(self) -> frozenset[str]:
        """Return the functions that may be called."""
        return frozenset(tool.function.name for tool in self._callable)

    @property
    def most(self) -> int | None:
        """Return how many calls there may be at most, if bounded. Who names a function wants one call of it."""
        return None if self.is_parallel and not isinstance(self.choice, ChosenTool) else 1

    @property
    def _callable(self) -> Sequence[Tool]:
        choice = self.choice
        if isinstance(choice, ChosenTool):
            return [tool for tool in self.tools if tool.function.name == choice.function.name]
        return self.tools

    def grammar(self, marker_ids: Mapping[str, int]) -> str:
        """Return the grammar that the answer has to follow, "" if it is free. Raises InvalidParameter for a schema."""
        functions = {tool.function.name: tool.function.parameters for tool in self._callable}
        if self.choice != "auto":
            return self._checked(must_call(self.layout, functions, marker_ids, most=self.most))
        if self.is_parallel and not any(tool.function.strict for tool in self.tools):
            return ""
        strict = {
            tool.function.name: tool.function.parameters if tool.function.strict else {"type": "object"}
            for tool in self.tools
        }
        return self._checked(may_call(self.layout, strict, marker_ids, most=self.most))

    def _checked(self, grammar: str) -> str:
        """Return a grammar that can be followed. Raises InvalidParameter that names the schema that cannot."""
        enforced = [(place, tool) for place, tool in enumerate(self.tools) if tool in self._callable]
        for place, tool in enforced:
            check_schema(tool.function.parameters or {}, f"tools[{place}].function.parameters")
        if not fault_of(grammar):
            return grammar
        for place, tool in enforced:
            param = f"tools[{place}].function.parameters"
            functions = {tool.function.name: tool.function.parameters}
            fault = fault_of(must_call(self.layout, functions, {}, most=1))
            if fault:
                why = fault.rpartition("failed to compile JSON schema: ")[2][:_FAULT_CHARACTERS]
                raise InvalidParameter(f"{param}: it cannot be enforced: {why}", param=param)
        raise InvalidParameter("tools: these functions together cannot be enforced", param="tools")


def check_chat(body: ChatBody) -> None:
    """Raise InvalidParameter for what the types alone do not say of tools and of the template's arguments."""
    check_tools(body.tools)
    _check_choice(body.tools or (), body.tool_choice)
    check_template_kwargs(body.chat_template_kwargs)


def check_tools(tools: Sequence[Tool] | None) -> None:
    """Raise InvalidParameter for a name that is there twice, or for more than is taken."""
    names: set[str] = set()
    for place, tool in enumerate(tools or ()):
        if tool.function.name in names:
            param = f"tools[{place}].function.name"
            raise InvalidParameter(f"{param}: there is another function of that name", param=param)
        names.add(tool.function.name)
        if (tool.function.parameters or {}).get("type", "object") != "object":
            param = f"tools[{place}].function.parameters"
            raise InvalidParameter(f"{param}: its type has to be object", param=param)
    check_nested([[tool.function.description, tool.function.parameters] for tool in tools or ()], "tools")


def _check_choice(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    if choice is None or (isinstance(choice, str) and choice != "required"):
        return
    if not tools:
        raise InvalidParameter("tool_choice: there are no tools to call", param="tool_choice")
    if isinstance(choice, ChosenTool) and all(tool.function.name != choice.function.name for tool in tools):
        raise InvalidParameter("tool_choice: there is no tool of that name", param="tool_choice")


def check_template_kwargs(kwargs: Mapping[str, Any] | None) -> None:
    """Raise InvalidParameter for names that are not the client's to give, or for more than is taken."""
    param = "chat_template_kwargs"
    check_nested(kwargs or {}, param)
    for name in kwargs or {}:
        if not _NAME.fullmatch(name):
            raise InvalidParameter(f"{param}: {name[:64]!r} is no name", param=param)
        if name in RESERVED or _SPECIAL.fullmatch(name):
            raise InvalidParameter(f"{param}: {name} is reserved", param=param)


def tool_use_of(body: object, tokenizer: ModelTokenizer) -> ToolUse | None:
    """Return how tools may be called. With the choice "none" they are told to the model, and what it writes is text."""
    if not isinstance(body, ChatBody) or not body.tools or body.tool_choice == "none":
        return None
    if tokenizer.layout is None:
        raise InvalidParameter("tools: the calls that this model writes cannot be read here", param="tools")
    return ToolUse(tokenizer.layout, body.tools, body.tool_choice or "auto", body.parallel_tool_calls)


def chat_of(
    messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None, kwargs: Mapping[str, Any] | None = None
) -> Chat:
    """Return a chat for the template: content as one string, ``developer`` by its older name, arguments as objects."""
    told = [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    return Chat(told, [_definition(tool) for tool in tools] if tools else None, dict(kwargs or {}))


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    content = message.content or ""
    told: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content if isinstance(content, str) else "\n".join(part.text for part in content),
    }
    if message.name is not None:
        told["name"] = message.name
    if message.tool_calls:
        told["tool_calls"] = [_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(message.tool_calls)]
    if message.tool_call_id is not None:
        told["tool_call_id"] = message.tool_call_id
    return told


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    param = f"{where}.function.arguments"
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidParameter(f"{param}: it is not valid JSON", param=param) from error
    if not isinstance(arguments, dict):
        raise InvalidParameter(f"{param}: it has to be an object", param=param)
    check_nested(arguments, param)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _definition(tool: Tool) -> dict[str, Any]:
    """Return a definition as templates print it; that it is strict is not for the model."""
    known = {name: value for name, value in asdict(tool.function).items() if value is not None and name != "strict"}
    return {"type": "function", "function": known}
