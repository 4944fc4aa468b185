"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.gateway.http.fields import Fields, kind_of, shown
from services.gateway.http.options import MAX_LOGPROBS, Options, read_options, refuse_unsupported
from shared.errors import BadRequest, UnsupportedParameter

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
MAX_MESSAGES = 4096
MESSAGE_CHARACTERS = 128
"""What rendering a message costs, however short it is, in characters."""


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


def read_chat_request(body: dict[str, Any], *, vocab_size: int) -> ChatRequest:
    """Raises ``BadRequest`` and ``UnsupportedParameter`` naming the parameter."""
    fields = Fields(body)
    refuse_unsupported(fields)
    wants_logprobs = fields.flag("logprobs", False)
    top = fields.optional_integer("top_logprobs", low=0, high=MAX_LOGPROBS)
    if top is not None and top > 0 and not wants_logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    limit = fields.optional_integer("max_completion_tokens", low=1, high=2**31)
    if limit is None:
        limit = fields.optional_integer("max_tokens", low=1, high=2**31)
    arguments = fields.raw("chat_template_kwargs")
    if arguments is not None and not isinstance(arguments, dict):
        raise fields.wrong("chat_template_kwargs", "an object")
    return ChatRequest(
        messages=_messages(fields),
        add_generation_prompt=fields.flag("add_generation_prompt", True),
        add_special_tokens=fields.flag("add_special_tokens", False),
        template_arguments=arguments or {},
        options=read_options(
            fields, vocab_size=vocab_size, max_tokens=limit, logprobs=(top or 0) if wants_logprobs else None
        ),
    )


def _messages(fields: Fields) -> tuple[dict[str, Any], ...]:
    value = fields.raw("messages")
    if value is None:
        raise BadRequest("messages is required", param="messages")
    if not isinstance(value, list) or not value:
        raise fields.wrong("messages", "a non-empty array of messages")
    if len(value) > MAX_MESSAGES:
        raise BadRequest(f"messages has {len(value)} messages; at most {MAX_MESSAGES} are taken", param="messages")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(value))


def _message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRequest(f"{name} must be an object, not {kind_of(message)}", param=name)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(
            f"{name}.role must be one of {', '.join(sorted(ROLES))}, not {shown(role)}", param=f"{name}.role"
        )
    if message.get("tool_calls"):
        raise UnsupportedParameter(f"{name}.tool_calls: tools are not supported", param=f"{name}.tool_calls")
    result = {"role": role, "content": _content(message.get("content"), f"{name}.content", role)}
    speaker = message.get("name")
    if speaker is not None:
        if not isinstance(speaker, str):
            raise BadRequest(f"{name}.name must be a string, not {kind_of(speaker)}", param=f"{name}.name")
        result["name"] = speaker
    return result


def _content(content: Any, name: str, role: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise BadRequest(f"{name} must be a string or an array of parts, not {kind_of(content)}", param=name)
    texts = []
    for index, part in enumerate(content):
        where = f"{name}[{index}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise BadRequest(f"{where} must be an object, not {kind_of(part)}", param=where)
        if part.get("type") != "text":
            raise UnsupportedParameter(
                f"{where}: parts of type {shown(part.get('type'))} are not supported (text is)", param=where
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise BadRequest(f"{where}.text must be a string, not {kind_of(text)}", param=f"{where}.text")
        texts.append(text)
    return "\n".join(texts)
