"""The body of ``POST /v1/messages``, and of ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from services.gateway.request_bodies.body import read_fields, required, shown
from services.gateway.request_bodies.chat_request import ChatRequest
from services.gateway.request_bodies.conversation import Conversation
from services.gateway.request_bodies.guided import read_format
from services.gateway.request_bodies.message_blocks import Texts, read_texts, read_turns
from services.gateway.request_bodies.options import (
    MAX_STOP_STRINGS,
    Count,
    SharedBody,
    StopString,
    read_options,
    refuse_more_choices,
    refuse_unsupported,
)
from services.gateway.request_bodies.thinking import switched
from services.gateway.request_bodies.tools import (
    FORCED,
    NEVER,
    CallRule,
    ChatTools,
    FunctionBody,
    FunctionName,
    tool_of,
    tools_of,
)
from shared.errors import UnsupportedParameter

_REFUSED = {
    "container": "containers are not supported",
    "context_management": "context is not managed; a prompt that is too long is refused",
    "mcp_servers": "MCP servers are not supported",
    "output_format": "use output_config.format",
}
"""What this system has none of: any value except null, false, empty or zero is refused."""
_LONGEST_HARMLESS_BYTES = 64
_THINKS = {"enabled": True, "adaptive": True, "disabled": False}

StopSequences = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]


class ThinkingConfig(msgspec.Struct):
    """Whether the model is to think first."""

    type: Any = None
    budget_tokens: Count | None = None
    """Taken, and not kept to."""


class OutputConfig(msgspec.Struct):
    """What the answer is to be."""

    format: Raw = Raw(b"null")


class CallChoice(msgspec.Struct):
    """Whether the model may call functions."""

    type: Any = None
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesBody(SharedBody, kw_only=True):
    """The body as it comes."""

    stop: StopSequences | None = msgspec.field(default=None, name="stop_sequences")
    system: Texts | None = None
    messages: Raw = Raw(b"null")
    tools: Raw = Raw(b"null")
    tool_choice: CallChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class SchemaTool(msgspec.Struct):
    """A tool as it comes."""

    type: Any = None
    name: FunctionName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


def read_messages_request(
    raw: bytes, body: MessagesBody, *, vocab_size: int, max_prompt_bytes: int, answered: bool = True
) -> ChatRequest:
    """Raises ``BadRequest``, ``UnsupportedParameter`` and ``PayloadTooLarge``, naming the parameter. ``answered``: the
    length of an answer must be given."""
    refuse_unsupported(raw, body, supported=("tools", "tool_choice"))
    _refuse_unsupported(raw)
    refuse_more_choices(body)
    if answered:
        required(body.max_tokens, "max_tokens")
    config = body.output_config
    conversation = Conversation()
    system = read_texts(body.system or "", "system")
    if system:
        conversation.say("system", system)
    read_turns(body.messages, conversation, max_prompt_bytes=max_prompt_bytes)
    return ChatRequest(
        messages=tuple(conversation.messages),
        add_generation_prompt=True,
        add_special_tokens=False,
        template_arguments=_template_arguments(body.thinking),
        options=read_options(
            body,
            vocab_size=vocab_size,
            # Anthropic's clients ask for as much as its own models hold: it is cut to what the context leaves.
            max_tokens=None,
            default_max_tokens=body.max_tokens,
            logprobs=None,
            tools=_read_tools(body),
            guide=read_format(bytes(config.format), "output_config.format") if config is not None else None,
        ),
        called_characters=len(bytes(body.messages)) if conversation.has_calls else 0,
    )


def _refuse_unsupported(raw: bytes) -> None:
    for name, value in zip(_REFUSED, read_fields(raw, tuple(_REFUSED)), strict=True):
        if value and (len(value) > _LONGEST_HARMLESS_BYTES or msgspec.json.decode(value)):
            raise UnsupportedParameter(f"{name}: {_REFUSED[name]}", param=name)


def _template_arguments(thinking: ThinkingConfig | None) -> dict[str, Any]:
    if thinking is None:
        return {}
    on = _THINKS.get(thinking.type) if isinstance(thinking.type, str) else None
    if on is None:
        raise UnsupportedParameter(
            f"thinking.type: {shown(thinking.type)} is not supported ({', '.join(_THINKS)} are)", param="thinking.type"
        )
    return switched(on)


def _read_tools(body: MessagesBody) -> ChatTools | None:
    choice = body.tool_choice or CallChoice("auto")
    match choice.type:
        case "auto":
            rule = CallRule()
        case "none":
            rule = NEVER
        case "any":
            rule = FORCED
        case "tool":
            rule = CallRule(forced=True, name=required(choice.name, "tool_choice.name"))
        case _:
            raise UnsupportedParameter(
                f"tool_choice: {shown(choice.type)} is not supported (auto, none, any and tool are)",
                param="tool_choice",
            )
    parallel = choice.disable_parallel_tool_use is not True
    return tools_of(body.tools, SchemaTool, _tool, rule=rule, parallel=parallel)


def _tool(tool: SchemaTool, name: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise UnsupportedParameter(
            f"{name}.type: tools of type {shown(tool.type)} are not supported (custom is)", param=f"{name}.type"
        )
    schema = required(tool.input_schema, f"{name}.input_schema")
    return tool_of(FunctionBody(tool.name, tool.description, schema, tool.strict), name)
