"""The functions that a chat may call, and the calls in its messages, as they come and as templates take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw

from services.gateway.request_bodies.body import read_json, refuse_many_elements, required, shown
from services.gateway.request_bodies.guided import read_schema
from shared.errors import BadRequest, PayloadTooLarge, UnsupportedParameter

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024
"""Of JSON, of all tools together."""
MAX_TOOL_ELEMENTS = 16_384
"""Fields and items in all tools together."""
MAX_CALLS = 128
"""Of one message."""
_LONGEST_CHOICE_BYTES = 256
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


class NamedFunction(msgspec.Struct):
    """Which function."""

    name: FunctionName | None = None


class NamedTool(msgspec.Struct):
    """A choice of one function, as chats have it."""

    type: Literal["function"] | None = None
    function: NamedFunction | None = None

    @property
    def chosen(self) -> str | None:
        return self.function.name if self.function is not None else None


class FlatNamedTool(msgspec.Struct):
    """The same as responses have it."""

    type: Literal["function"] | None = None
    name: FunctionName | None = None

    @property
    def chosen(self) -> str | None:
        return self.name


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
    forced: Mapping[str, Any] = field(default_factory=dict)
    """The schemas of arguments, by name, of the functions of which one must be called; empty: none need be."""
    is_named: bool = False
    """It is the caller's choice which one."""


@dataclass(frozen=True, slots=True)
class CallRule:
    """What a ``tool_choice`` says."""

    allowed: bool = True
    forced: bool = False
    name: str | None = None
    """Of the function that must be called; None: any."""


NEVER, FORCED = CallRule(allowed=False), CallRule(forced=True)


def read_tools(tools: Raw, choice: Raw, *, parallel: bool) -> ChatTools | None:
    """The functions that a request may call; None: none. Raises ``BadRequest``, ``UnsupportedParameter`` and
    ``PayloadTooLarge``, naming the parameter."""
    rule = call_rule(bytes(choice), NamedTool)
    return tools_of(tools, ToolBody, _tool, rule=rule, parallel=parallel) if rule.allowed else None


def tools_of(
    tools: Raw,
    kind: type[ToolKind],
    read: Callable[[ToolKind, str], dict[str, Any]],
    *,
    rule: CallRule,
    parallel: bool,
) -> ChatTools | None:
    """The functions in ``tools``; None: there is none, or none may be called. ``read`` gives one as a template takes
    it, by its body and name. Raises as ``read_tools``."""
    json = bytes(tools)
    if len(json) > MAX_TOOLS_BYTES:
        raise PayloadTooLarge(
            f"tools has {len(json)} bytes of JSON; at most {MAX_TOOLS_BYTES} are allowed", param="tools"
        )
    refuse_many_elements(json, MAX_TOOL_ELEMENTS, "tools")
    bodies: list[ToolKind] | None = read_json(json, list[kind] | None, "tools")  # type: ignore[valid-type]
    if not bodies:
        if rule.forced:
            raise BadRequest("tool_choice: there are no tools to choose from", param="tool_choice")
        return None
    if len(bodies) > MAX_TOOLS:
        raise BadRequest(f"tools has {len(bodies)} tools; at most {MAX_TOOLS} are allowed", param="tools")
    for_template = tuple(read(tool, f"tools[{index}]") for index, tool in enumerate(bodies))
    names = frozenset(tool["function"]["name"] for tool in for_template)
    if not rule.allowed:
        return None
    made = ChatTools(names, for_template, parallel, len(json))
    return replace(made, forced=_forced(made, rule), is_named=rule.name is not None) if rule.forced else made


def _forced(tools: ChatTools, rule: CallRule) -> dict[str, Any]:
    if rule.name is not None and rule.name not in tools.names:
        raise BadRequest(f"tool_choice: there is no function {shown(rule.name)} among the tools", param="tool_choice")
    schemas: dict[str, Any] = {}
    for index, tool in enumerate(tools.for_template):
        function = tool["function"]
        if rule.name in (None, function["name"]):
            at = f"tools[{index}].parameters"
            schemas[function["name"]] = read_schema({"type": "object", **function.get("parameters", {})}, at)
    return schemas


def call_rule(choice: bytes, named: type[NamedTool] | type[FlatNamedTool]) -> CallRule:
    """What a ``tool_choice`` says: auto, none, required, or an object that names a function. Raises ``BadRequest``,
    ``UnsupportedParameter``."""
    value = read_json(choice, Any, "tool_choice") if len(choice) <= _LONGEST_CHOICE_BYTES else None
    if isinstance(value, dict):
        return CallRule(forced=True, name=required(read_json(choice, named, "tool_choice").chosen, "tool_choice.name"))
    match value if len(choice) <= _LONGEST_CHOICE_BYTES else choice:
        case None | "auto":
            return CallRule()
        case "none":
            return NEVER
        case "required":
            return FORCED
    raise UnsupportedParameter(
        f"tool_choice: {shown(value)} is not supported (auto, none, required and a function are)", param="tool_choice"
    )


def _tool(tool: ToolBody, name: str) -> dict[str, Any]:
    if tool.type != "function":
        raise UnsupportedParameter(
            f"{name}.type: tools of type {shown(tool.type)} are not supported (function is)", param=f"{name}.type"
        )
    return tool_of(required(tool.function, f"{name}.function"), f"{name}.function")


def tool_of(body: FunctionBody, name: str) -> dict[str, Any]:
    """A function as a template takes it (``ChatTools``). Raises ``BadRequest``, ``UnsupportedParameter``."""
    function: dict[str, Any] = {"name": required(body.name, f"{name}.name")}
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
