"""The ``system`` and ``messages`` of ``POST /v1/messages``: texts, calls, and what functions gave back."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from services.gateway.request_bodies.body import read_json, required, shown
from services.gateway.request_bodies.chat_request import MAX_PARTS
from services.gateway.request_bodies.conversation import Conversation, read_list
from services.gateway.request_bodies.tools import FunctionName
from shared.errors import BadRequest, UnsupportedParameter

PARAM = "messages"
_NO_TEXTS = ("tool_use", "thinking", "redacted_thinking")
"""Blocks of the assistant's. What is redacted nobody here can read: it is passed over."""


class TextBlock(msgspec.Struct):
    """A block where only text may be."""

    type: Any = None
    text: str | None = None


class MessageBlock(msgspec.Struct):
    """A block as it comes. What else it has depends on ``type``."""

    type: Any = None
    text: str | None = None
    id: Raw = Raw(b"null")
    name: Raw = Raw(b"null")
    input: Raw = Raw(b"null")
    tool_use_id: Raw = Raw(b"null")
    thinking: Raw = Raw(b"null")
    content: Raw = Raw(b"null")


Texts = str | list[TextBlock]


class TurnBody(msgspec.Struct):
    """A message as it comes."""

    role: Annotated[Literal["assistant", "user"], Meta(description="user or assistant")] | None = None
    content: str | list[MessageBlock] | None = None


def read_turns(raw: Raw, conversation: Conversation, *, max_prompt_bytes: int) -> None:
    """Behind what the conversation has. Raises ``BadRequest``, ``UnsupportedParameter``, ``PayloadTooLarge``."""
    turns: list[TurnBody] = read_list(raw, list[TurnBody], PARAM, max_prompt_bytes=max_prompt_bytes)
    for index, turn in enumerate(turns):
        name = f"{PARAM}[{index}]"
        role = required(turn.role, f"{name}.role")
        content = turn.content
        required(content, f"{name}.content")
        assert content is not None
        if isinstance(content, str):
            conversation.say(role, content)
            continue
        _refuse_many_blocks(content, f"{name}.content")
        read = _read_assistant if role == "assistant" else _read_user
        read(content, f"{name}.content", conversation)
    if turns[-1].role == "assistant":
        raise UnsupportedParameter(
            f"{PARAM}[{len(turns) - 1}]: continuing a last message of the assistant is not supported",
            param=f"{PARAM}[{len(turns) - 1}]",
        )


def read_texts(value: str | list[TextBlock], name: str) -> str:
    """Texts as one. Raises ``BadRequest``, ``UnsupportedParameter``."""
    if isinstance(value, str):
        return value
    _refuse_many_blocks(value, name)
    return "\n".join(_text(block, f"{name}[{index}]", "text") for index, block in enumerate(value))


def _refuse_many_blocks(blocks: list[Any], name: str) -> None:
    if len(blocks) > MAX_PARTS:
        raise BadRequest(f"{name} has {len(blocks)} blocks; at most {MAX_PARTS} are allowed", param=name)


def _read_assistant(blocks: list[MessageBlock], name: str, conversation: Conversation) -> None:
    """One message, whatever the order of its thoughts, texts and calls."""
    called = [(index, block) for index, block in enumerate(blocks) if block.type == "tool_use"]
    thoughts = [
        str(_field(block.thinking, str, f"{name}[{index}].thinking"))
        for index, block in enumerate(blocks)
        if block.type == "thinking"
    ]
    texts = [
        _text(block, f"{name}[{index}]", "text, thinking and tool_use")
        for index, block in enumerate(blocks)
        if block.type not in _NO_TEXTS
    ]
    if any(thoughts):
        conversation.think("\n".join(thoughts))
    conversation.say("assistant", "\n".join(texts))
    for index, block in called:
        where = f"{name}[{index}]"
        call_id: str = _field(block.id, str, f"{where}.id")
        function: str = _field(block.name, FunctionName, f"{where}.name")
        arguments: dict[str, Any] = _field(block.input, dict[str, Any], f"{where}.input")
        conversation.call(call_id, function, arguments, f"{where}.input")


def _read_user(blocks: list[MessageBlock], name: str, conversation: Conversation) -> None:
    """What functions gave back, each a message, and the texts around it."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        where = f"{name}[{index}]"
        if block.type != "tool_result":
            texts.append(_text(block, where, "text and tool_result"))
            continue
        if texts:
            conversation.say("user", "\n".join(texts))
            texts = []
        call_id: str = _field(block.tool_use_id, str, f"{where}.tool_use_id")
        content: str | list[TextBlock] | None = read_json(block.content, Texts | None, f"{where}.content")
        conversation.answer(call_id, read_texts(content or "", f"{where}.content"))
    if texts or not blocks:
        conversation.say("user", "\n".join(texts))


def _text(block: TextBlock | MessageBlock, name: str, supported: str) -> str:
    if block.type != "text":
        raise UnsupportedParameter(
            f"{name}.type: blocks of type {shown(block.type)} are not supported here (only {supported})",
            param=f"{name}.type",
        )
    return required(block.text, f"{name}.text")


def _field(raw: Raw, kind: Any, name: str) -> Any:
    return required(read_json(raw, kind | None, name), name)
