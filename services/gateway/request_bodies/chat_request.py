"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from services.gateway.request_bodies.body import read_json, refuse_many_elements, required, shown
from services.gateway.request_bodies.options import (
    MAX_LOGPROBS,
    Count,
    Options,
    SharedBody,
    read_options,
    refuse_unsupported,
)
from services.gateway.request_bodies.thinking import Effort, told_of_effort
from services.gateway.request_bodies.tools import MessageCall, called, read_tools, refuse_many_arguments
from shared.errors import BadRequest, PayloadTooLarge, UnsupportedParameter

Role = Literal["assistant", "developer", "function", "system", "tool", "user"]
MAX_MESSAGES = 4096
MAX_PARTS = 1024
"""Of one message's content."""
MAX_ELEMENTS = 65_536
"""Fields and items in all messages together."""
MAX_JSON_PER_BYTE = 4
"""Bytes of JSON that one byte of a prompt may take: escapes, names, brackets."""
MAX_TEMPLATE_ARGUMENTS_BYTES = 65_536
_RESERVED = {
    "messages": "give messages beside it",
    "tools": "give tools beside it",
    "add_generation_prompt": "give add_generation_prompt beside it",
    "chat_template": "a chat template from the caller is not supported",
    "tokenize": "a prompt is always tokenized",
}
"""What of a template's arguments is not the caller's."""
MESSAGE_CHARACTERS = 128
"""What rendering a message costs, however short it is, in characters."""


class ContentPart(msgspec.Struct):
    """A part of a message's content."""

    type: Any = None
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message as it comes."""

    role: Annotated[Role, Meta(description="one of assistant, developer, function, system, tool, user")] | None = None
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same, as others call it."""


class ChatBody(SharedBody, kw_only=True):
    """The body as it comes."""

    messages: Raw = Raw(b"null")
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Raw = Raw(b"null")
    tools: Raw = Raw(b"null")
    tool_choice: Raw = Raw(b"null")
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked chat request. ``messages`` have their content as one string each."""

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool
    add_special_tokens: bool
    template_arguments: dict[str, Any]
    options: Options
    called_characters: int
    """Of the calls in its messages."""
    repeated: bytes = b""
    """What the answer repeats of the request."""

    @property
    def num_characters(self) -> int:
        """About how much there is to render."""
        tools = self.options.tools
        listed = tools.num_characters if tools is not None else 0
        said = sum(MESSAGE_CHARACTERS + len(m["content"]) + len(m.get("reasoning", "")) for m in self.messages)
        return listed + self.called_characters + said


def read_chat_request(raw: bytes, body: ChatBody, *, vocab_size: int, max_prompt_bytes: int) -> ChatRequest:
    """Raises ``BadRequest``, ``UnsupportedParameter`` and ``PayloadTooLarge``, naming the parameter."""
    refuse_unsupported(raw, body, supported=("tools", "tool_choice", "prompt_logprobs"))
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    messages, called_characters = _messages(body.messages, max_prompt_bytes)
    return ChatRequest(
        messages=messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        add_special_tokens=body.add_special_tokens is True,
        template_arguments=told_of_effort(body.reasoning_effort, _template_arguments(body.chat_template_kwargs)),
        options=read_options(
            body,
            vocab_size=vocab_size,
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            tools=read_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls is not False),
        ),
        called_characters=called_characters,
    )


def _template_arguments(raw: Raw) -> dict[str, Any]:
    size_bytes = len(bytes(raw))
    if size_bytes > MAX_TEMPLATE_ARGUMENTS_BYTES:
        raise PayloadTooLarge(
            f"chat_template_kwargs has {size_bytes} bytes; at most {MAX_TEMPLATE_ARGUMENTS_BYTES} are allowed",
            param="chat_template_kwargs",
        )
    arguments: dict[str, Any] | None = read_json(raw, dict[str, Any] | None, "chat_template_kwargs")
    reserved = next((name for name in _RESERVED if name in arguments), None) if arguments else None
    if reserved is not None:
        raise BadRequest(
            f"chat_template_kwargs.{reserved}: {_RESERVED[reserved]}", param=f"chat_template_kwargs.{reserved}"
        )
    return arguments or {}


def thought_of(thought: str) -> dict[str, str]:
    """Of a message of the assistant, as templates read it."""
    return {"reasoning_content": thought, "reasoning": thought}


def _messages(raw: Raw, max_prompt_bytes: int) -> tuple[tuple[dict[str, Any], ...], int]:
    """The messages, and about how many characters their calls have."""
    json = bytes(raw)
    if len(json) > MAX_JSON_PER_BYTE * max_prompt_bytes:
        raise PayloadTooLarge(
            f"messages has {len(json)} bytes of JSON; a prompt of at most {max_prompt_bytes} bytes is allowed",
            param="messages",
        )
    refuse_many_elements(json, MAX_ELEMENTS, "messages")
    messages: list[ChatMessage] | None = read_json(json, list[ChatMessage] | None, "messages")
    if not required(messages, "messages"):
        raise BadRequest("messages must be a non-empty array of messages, not an array of 0", param="messages")
    assert messages is not None
    if len(messages) > MAX_MESSAGES:
        raise BadRequest(f"messages has {len(messages)} messages; at most {MAX_MESSAGES} are allowed", param="messages")
    calls = [call for message in messages for call in message.tool_calls or ()]
    refuse_many_arguments(calls, MAX_ELEMENTS)
    read = tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))
    return read, len(json) if calls else 0


def _message(message: ChatMessage, name: str) -> dict[str, Any]:
    role = required(message.role, f"{name}.role")
    result: dict[str, Any] = {"role": role, "content": _content(message.content, f"{name}.content", role)}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_calls:
        if role != "assistant":
            raise BadRequest(
                f"{name}.tool_calls: only messages of the assistant have calls, not of {role}",
                param=f"{name}.tool_calls",
            )
        result["tool_calls"] = called(message.tool_calls, f"{name}.tool_calls")
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if thought and role == "assistant":
        result |= thought_of(thought)
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    return result


def _content(content: str | list[str | ContentPart] | None, name: str, role: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return ""
        raise BadRequest(f"{name} must be a string or an array of parts, not null", param=name)
    if len(content) > MAX_PARTS:
        raise BadRequest(f"{name} has {len(content)} parts; at most {MAX_PARTS} are allowed", param=name)
    return "\n".join(_text(part, f"{name}[{index}]") for index, part in enumerate(content))


def _text(part: str | ContentPart, name: str) -> str:
    if isinstance(part, str):
        return part
    if part.type != "text":
        raise UnsupportedParameter(f"{name}: parts of type {shown(part.type)} are not supported (text is)", param=name)
    return required(part.text, f"{name}.text")
