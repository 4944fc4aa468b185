"""The functions that a chat may call, and the calls in its messages, as they come and as templates take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw

from services.gateway.request_bodies.body import read_json, refuse_many_elements, required, shown
from shared.errors import BadRequest, PayloadTooLarge, UnsupportedParameter

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024
"""Of JSON, of all tools together."""
MAX_TOOL_ELEMENTS = 16_384
"""Fields and items in all tools together."""
MAX_CALLS = 128
"""Of one message."""
_LONGEST_CHOICE_BYTES = 64
"""No accepted value is longer."""

FunctionName = Annotated[
    str,
    Meta(
        pattern=r"^[a-zA-Z0-9_.-]{1,64}\Z",
        description="a string of 1 to 64 letters, digits, underscores, dashes and dots",
    ),
]


class FunctionBody(msgspec.Struct):
    """A function as it comes."""

    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct):
    """A tool as it comes."""

    type: Any = None
    function: FunctionBody | None = None


class CalledFunction(msgspec.Struct):
    """What a message says was called. ``arguments``: JSON in a string, as answers have it, or an object."""

    name: FunctionName | None = None
    arguments: Annotated[str | dict[str, Any], Meta(description="a string of JSON, or an object")] | None = None


class MessageCall(msgspec.Struct):
    """A call in an assistant's message, as it comes."""

    id: str | None = None
    type: Any = None
    function: CalledFunction | None = None


ToolKind = TypeVar("ToolKind")


@dataclass(frozen=True, slots=True)
class ChatTools:
    """What may be called, at least one function."""

    names: frozenset[str]
    for_template: tuple[dict[str, Any], ...]
    """``{"type": "function", "function": {"name", "description", "parameters"}}``, of which what is absent is not
    there."""
    parallel: bool
    """More than one call in an answer."""
    num_characters: int
    """About how much there is to render."""


def read_tools(tools: Raw, choice: Raw, *, parallel: bool) -> ChatTools | None:
    """The functions that a request may call; None: none. Raises ``BadRequest``, ``UnsupportedParameter`` and
    ``PayloadTooLarge``, naming the parameter."""
    return tools_of(tools, ToolBody, _tool, parallel=parallel) if may_call(bytes(choice)) else None


def tools_of(
    tools: Raw, kind: type[ToolKind], read: Callable[[ToolKind, str], dict[str, Any]], *, parallel: bool
) -> ChatTools | None:
    """The functions in ``tools``; None: there is none. ``read`` gives one as a template takes it, by its body and name.
    Raises as ``read_tools``."""
    json = bytes(tools)
    if len(json) > MAX_TOOLS_BYTES:
        raise PayloadTooLarge(
            f"tools has {len(json)} bytes of JSON; at most {MAX_TOOLS_BYTES} are allowed", param="tools"
        )
    refuse_many_elements(json, MAX_TOOL_ELEMENTS, "tools")
    bodies: list[ToolKind] | None = read_json(json, list[kind] | None, "tools")  # type: ignore[valid-type]
    if not bodies:
        return None
    if len(bodies) > MAX_TOOLS:
        raise BadRequest(f"tools has {len(bodies)} tools; at most {MAX_TOOLS} are allowed", param="tools")
    for_template = tuple(read(tool, f"tools[{index}]") for index, tool in enumerate(bodies))
    names = frozenset(tool["function"]["name"] for tool in for_template)
    return ChatTools(names, for_template, parallel, len(json))


def may_call(choice: bytes) -> bool:
    """Whether a ``tool_choice`` lets functions be called. Raises ``UnsupportedParameter`` for one that forces it."""
    value = read_json(choice, Any, "tool_choice") if len(choice) <= _LONGEST_CHOICE_BYTES else choice
    if value not in (None, "none", "auto"):
        raise UnsupportedParameter(
            "tool_choice: calls that must be made are not supported (auto and none are)", param="tool_choice"
        )
    return bool(value != "none")


def _tool(tool: ToolBody, name: str) -> dict[str, Any]:
    if tool.type != "function":
        raise UnsupportedParameter(
            f"{name}.type: tools of type {shown(tool.type)} are not supported (function is)", param=f"{name}.type"
        )
    return tool_of(required(tool.function, f"{name}.function"), f"{name}.function")


def tool_of(body: FunctionBody, name: str) -> dict[str, Any]:
    """A function as a template takes it (``ChatTools``). Raises ``BadRequest``, ``UnsupportedParameter``."""
    function: dict[str, Any] = {"name": required(body.name, f"{name}.name")}
    if body.strict:
        raise UnsupportedParameter(f"{name}.strict: guided decoding is not supported", param=f"{name}.strict")
    if body.description is not None:
        function["description"] = body.description
    if body.parameters is not None:
        function["parameters"] = body.parameters
    return {"type": "function", "function": function}


def called(calls: Sequence[MessageCall], name: str) -> list[dict[str, Any]]:
    """The calls of a message as templates take them: arguments are objects. Raises ``BadRequest``,
    ``UnsupportedParameter``."""
    if len(calls) > MAX_CALLS:
        raise BadRequest(f"{name} has {len(calls)} calls; at most {MAX_CALLS} are allowed", param=name)
    return [_called(call, f"{name}[{index}]") for index, call in enumerate(calls)]


def _called(call: MessageCall, name: str) -> dict[str, Any]:
    if call.type not in (None, "function"):
        raise UnsupportedParameter(
            f"{name}.type: calls of type {shown(call.type)} are not supported (function is)", param=f"{name}.type"
        )
    body = required(call.function, f"{name}.function")
    function = {
        "name": required(body.name, f"{name}.function.name"),
        "arguments": arguments_of(body.arguments, f"{name}.function.arguments"),
    }
    result: dict[str, Any] = {"type": "function", "function": function}
    return result if call.id is None else {"id": call.id, **result}


def arguments_of(arguments: str | dict[str, Any] | None, name: str) -> dict[str, Any]:
    """Arguments of a call as templates take them. Raises ``BadRequest``."""
    if isinstance(arguments, dict):
        return arguments
    if not arguments:
        return {}
    value: dict[str, Any] = read_json(arguments.encode(errors="surrogatepass"), dict[str, Any], name)
    return value


def refuse_many_arguments(calls: Sequence[MessageCall], limit: int) -> None:
    """Raises ``BadRequest`` for more than ``limit`` fields and items in the strings of JSON of all calls together."""
    functions = [call.function for call in calls if call.function is not None]
    texts = [function.arguments for function in functions if isinstance(function.arguments, str)]
    refuse_many_elements(",".join(texts).encode(errors="surrogatepass"), limit, "messages")
