"""The body of ``POST /v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from services.gateway.request_bodies.body import read_fields, shown
from services.gateway.request_bodies.chat_request import ChatRequest
from services.gateway.request_bodies.conversation import Conversation
from services.gateway.request_bodies.guided import read_format
from services.gateway.request_bodies.input_items import read_input
from services.gateway.request_bodies.options import (
    Count,
    Options,
    SharedBody,
    read_options,
    refuse_more_choices,
    refuse_unsupported,
)
from services.gateway.request_bodies.thinking import Effort, told_of_effort
from services.gateway.request_bodies.tools import (
    ChatTools,
    FlatNamedTool,
    FunctionBody,
    call_rule,
    tool_of,
    tools_of,
)
from shared.errors import UnsupportedParameter

MAX_METADATA = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_VALUE_CHARACTERS = 512

_REFUSED = {
    "previous_response_id": "responses are not stored; send what was said before as input",
    "conversation": "conversations are not stored; send what was said before as input",
    "background": "responses in the background are not supported",
    "prompt": "stored prompts are not supported",
    "include": "there is nothing more to include",
    "top_logprobs": "log-probabilities are not supported here (they are in /v1/chat/completions)",
    "context_management": "context is not managed; a prompt that is too long is refused",
    "moderation": "moderation is not supported",
}
"""What this system has none of: any value except null, false, empty or zero is refused."""
_LONGEST_HARMLESS_BYTES = 64

Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=MAX_METADATA_KEY_CHARACTERS)],
        Annotated[str, Meta(max_length=MAX_METADATA_VALUE_CHARACTERS)],
    ],
    Meta(
        max_length=MAX_METADATA,
        description=f"an object of at most {MAX_METADATA} strings of at most {MAX_METADATA_VALUE_CHARACTERS} "
        f"characters, with names of at most {MAX_METADATA_KEY_CHARACTERS}",
    ),
]


class TextConfig(msgspec.Struct):
    """How to answer in text."""

    format: Raw = Raw(b"null")


class ReasoningConfig(msgspec.Struct):
    """How much to think."""

    effort: Effort | None = None


class ResponsesBody(SharedBody, kw_only=True):
    """The body as it comes."""

    max_tokens: Count | None = msgspec.field(default=None, name="max_output_tokens")
    input: Raw = Raw(b"null")
    instructions: str | None = None
    tools: Raw = Raw(b"null")
    tool_choice: Raw = Raw(b"null")
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    truncation: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    reasoning: ReasoningConfig | None = None


class FlatTool(FunctionBody):
    """A tool as it comes: a function, beside its type."""

    type: Any = None


def read_responses_request(raw: bytes, body: ResponsesBody, *, vocab_size: int, max_prompt_bytes: int) -> ChatRequest:
    """Raises ``BadRequest``, ``UnsupportedParameter`` and ``PayloadTooLarge``, naming the parameter."""
    refuse_unsupported(raw, body, supported=("tools", "tool_choice"))
    _refuse_unsupported(raw, body)
    refuse_more_choices(body)
    conversation = Conversation()
    if body.instructions:
        conversation.say("system", body.instructions)
    read_input(body.input, conversation, max_prompt_bytes=max_prompt_bytes)
    options = read_options(
        body,
        vocab_size=vocab_size,
        max_tokens=body.max_tokens,
        logprobs=None,
        tools=_read_tools(body),
        guide=read_format(bytes(body.text.format), "text.format") if body.text is not None else None,
    )
    return ChatRequest(
        messages=tuple(conversation.messages),
        add_generation_prompt=True,
        add_special_tokens=False,
        template_arguments=told_of_effort(body.reasoning.effort if body.reasoning is not None else None, {}),
        options=options,
        called_characters=len(bytes(body.input)) if conversation.has_calls else 0,
        repeated=_repeated(body, options),
    )


def _refuse_unsupported(raw: bytes, body: ResponsesBody) -> None:
    for name, value in zip(_REFUSED, read_fields(raw, tuple(_REFUSED)), strict=True):
        if value and (len(value) > _LONGEST_HARMLESS_BYTES or msgspec.json.decode(value)):
            raise UnsupportedParameter(f"{name}: {_REFUSED[name]}", param=name)
    if body.truncation not in (None, "disabled"):
        raise UnsupportedParameter(
            f"truncation: {shown(body.truncation)} is not supported (disabled is)", param="truncation"
        )


def _read_tools(body: ResponsesBody) -> ChatTools | None:
    rule = call_rule(bytes(body.tool_choice), FlatNamedTool)
    return tools_of(body.tools, FlatTool, _tool, rule=rule, parallel=body.parallel_tool_calls is not False)


def _tool(tool: FlatTool, name: str) -> dict[str, Any]:
    if tool.type != "function":
        raise UnsupportedParameter(
            f"{name}.type: tools of type {shown(tool.type)} are not supported (function is)", param=f"{name}.type"
        )
    return tool_of(tool, name)


def _repeated(body: ResponsesBody, options: Options) -> bytes:
    """Fields of the answer, as JSON without the braces around them."""
    fields = {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": options.sampling.temperature,
        "text": {"format": {"type": "text"} if options.sampling.grammar is None or not body.text else body.text.format},
        "tool_choice": "auto" if bytes(body.tool_choice) == b"null" else body.tool_choice,
        "tools": Raw(b"[]") if bytes(body.tools) == b"null" else body.tools,
        "top_logprobs": 0,
        "top_p": options.sampling.top_p,
        "truncation": "disabled",
    }
    return msgspec.json.encode(fields)[1:-1]
