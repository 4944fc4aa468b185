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
    tool_calls: Any = None


class ChatBody(SharedBody, kw_only=True):
    """The body as it comes."""

    messages: Raw = Raw(b"null")
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Raw = Raw(b"null")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked chat request. ``messages`` have their content as one string each."""

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool
    add_special_tokens: bool
    template_arguments: dict[str, Any]
    options: Options

    @property
    def num_characters(self) -> int:
        """About how much there is to render."""
        return sum(MESSAGE_CHARACTERS + len(message["content"]) for message in self.messages)


def read_chat_request(raw: bytes, body: ChatBody, *, vocab_size: int, max_prompt_bytes: int) -> ChatRequest:
    """Raises ``BadRequest``, ``UnsupportedParameter`` and ``PayloadTooLarge``, naming the parameter."""
    refuse_unsupported(raw, body)
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return ChatRequest(
        messages=_messages(body.messages, max_prompt_bytes),
        add_generation_prompt=body.add_generation_prompt is not False,
        add_special_tokens=body.add_special_tokens is True,
        template_arguments=_template_arguments(body.chat_template_kwargs),
        options=read_options(
            body,
            vocab_size=vocab_size,
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ),
    )


def _template_arguments(raw: Raw) -> dict[str, Any]:
    size_bytes = len(bytes(raw))
    if size_bytes > MAX_TEMPLATE_ARGUMENTS_BYTES:
        raise PayloadTooLarge(
            f"chat_template_kwargs has {size_bytes} bytes; at most {MAX_TEMPLATE_ARGUMENTS_BYTES} are allowed",
            param="chat_template_kwargs",
        )
    arguments: dict[str, Any] | None = read_json(raw, dict[str, Any] | None, "chat_template_kwargs")
    return arguments or {}


def _messages(raw: Raw, max_prompt_bytes: int) -> tuple[dict[str, Any], ...]:
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
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _message(message: ChatMessage, name: str) -> dict[str, Any]:
    role = required(message.role, f"{name}.role")
    if message.tool_calls:
        raise UnsupportedParameter(f"{name}.tool_calls: tools are not supported", param=f"{name}.tool_calls")
    result = {"role": role, "content": _content(message.content, f"{name}.content", role)}
    if message.name is not None:
        result["name"] = message.name
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
