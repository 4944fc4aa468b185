"""The ``input`` of ``POST /v1/responses``: a text, or messages, calls and what functions gave back."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from services.gateway.request_bodies.body import read_json, refuse_many_elements, required, shown
from services.gateway.request_bodies.chat_request import MAX_ELEMENTS, MAX_PARTS
from services.gateway.request_bodies.conversation import Conversation, read_list
from services.gateway.request_bodies.tools import FunctionName
from shared.errors import BadRequest, UnsupportedParameter

PARAM = "input"

_Role = Literal["assistant", "developer", "system", "user"]


class InputPart(msgspec.Struct):
    """A part of a message, or of what a function gave back."""

    type: Any = None
    text: str | None = None


class InputItem(msgspec.Struct):
    """An item as it comes. What else it has depends on ``type``."""

    type: Any = None
    role: Raw = Raw(b"null")
    content: Raw = Raw(b"null")
    call_id: Raw = Raw(b"null")
    name: Raw = Raw(b"null")
    arguments: Raw = Raw(b"null")
    output: Raw = Raw(b"null")
    summary: Raw = Raw(b"null")


_ROLE = Annotated[_Role, Meta(description="one of assistant, developer, system, user")]


def read_input(raw: Raw, conversation: Conversation, *, max_prompt_bytes: int) -> None:
    """Behind what the conversation has. Raises ``BadRequest``, ``UnsupportedParameter``, ``PayloadTooLarge``."""
    value = read_list(raw, str | list[InputItem], PARAM, max_prompt_bytes=max_prompt_bytes)
    if isinstance(value, str):
        conversation.say("user", value)
        return
    _refuse_many_arguments(value)
    for index, item in enumerate(value):
        _read_item(item, f"{PARAM}[{index}]", conversation)


def _refuse_many_arguments(items: list[InputItem]) -> None:
    """Those of all calls together: JSON inside of strings, of which nothing was counted."""
    texts = [
        read_json(item.arguments, str | None, f"{PARAM}[{index}].arguments") or ""
        for index, item in enumerate(items)
        if item.type == "function_call"
    ]
    refuse_many_elements(",".join(texts).encode(errors="surrogatepass"), MAX_ELEMENTS, PARAM)


def _read_item(item: InputItem, name: str, conversation: Conversation) -> None:
    read = _READERS.get("message" if item.type is None else item.type) if isinstance(item.type, str | None) else None
    if read is None:
        raise UnsupportedParameter(
            f"{name}.type: items of type {shown(item.type)} are not supported ({', '.join(_READERS)} are)",
            param=f"{name}.type",
        )
    read(item, name, conversation)


def _read_message(item: InputItem, name: str, conversation: Conversation) -> None:
    role: str = _field(item.role, _ROLE, f"{name}.role")
    conversation.say(role, _content(item.content, f"{name}.content"))


def _read_call(item: InputItem, name: str, conversation: Conversation) -> None:
    function: str = _field(item.name, FunctionName, f"{name}.name")
    call_id: str = _field(item.call_id, str, f"{name}.call_id")
    arguments: str = _field(item.arguments, str, f"{name}.arguments")
    conversation.call(call_id, function, arguments, f"{name}.arguments")


def _read_output(item: InputItem, name: str, conversation: Conversation) -> None:
    call_id: str = _field(item.call_id, str, f"{name}.call_id")
    conversation.answer(call_id, _content(item.output, f"{name}.output"))


def _read_thought(item: InputItem, name: str, conversation: Conversation) -> None:
    """The thought itself, else a summary of it. Of another system's there may be neither that can be read."""
    for field, raw, kind in (("content", item.content, "reasoning_text"), ("summary", item.summary, "summary_text")):
        parts: list[InputPart] = read_json(raw, list[InputPart] | None, f"{name}.{field}") or []
        if parts:
            conversation.think(_joined(parts, f"{name}.{field}", (kind,)))
            return


_READERS = {
    "message": _read_message,
    "reasoning": _read_thought,
    "function_call": _read_call,
    "function_call_output": _read_output,
}


def _field(raw: Raw, kind: Any, name: str) -> Any:
    return required(read_json(raw, kind | None, name), name)


def _content(raw: Raw, name: str) -> str:
    content: str | list[InputPart] = _field(raw, str | list[InputPart], name)
    if isinstance(content, str):
        return content
    return _joined(content, name, ("input_text", "output_text"))


def _joined(parts: list[InputPart], name: str, kinds: tuple[str, ...]) -> str:
    if len(parts) > MAX_PARTS:
        raise BadRequest(f"{name} has {len(parts)} parts; at most {MAX_PARTS} are allowed", param=name)
    return "\n".join(_part_text(part, f"{name}[{index}]", kinds) for index, part in enumerate(parts))


def _part_text(part: InputPart, name: str, kinds: tuple[str, ...]) -> str:
    if part.type not in kinds:
        raise UnsupportedParameter(
            f"{name}.type: parts of type {shown(part.type)} are not supported here (only {' and '.join(kinds)})",
            param=f"{name}.type",
        )
    return required(part.text, f"{name}.text")
