"""A conversation as chat templates take it, built from the items or blocks of other endpoints' bodies."""

from __future__ import annotations

from typing import Any

from msgspec import Raw

from services.gateway.request_bodies.body import read_json, refuse_many_elements, required
from services.gateway.request_bodies.chat_request import MAX_ELEMENTS, MAX_JSON_PER_BYTE, MAX_MESSAGES, thought_of
from services.gateway.request_bodies.tools import MAX_CALLS, arguments_of
from shared.errors import BadRequest, PayloadTooLarge


class Conversation:
    """Messages one behind the other (``ChatRequest.messages``)."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.has_calls = False
        self._only_thought = False
        """Of the last message, which is the assistant's, there is nothing yet but what it thought."""

    def think(self, thought: str) -> None:
        """The beginning of a message of the assistant's: what it says and calls next is part of it."""
        if self._only_thought:
            thought = f"{self.messages.pop()['reasoning']}\n{thought}"
        self.messages.append({"role": "assistant", "content": "", **thought_of(thought)})
        self._only_thought = True

    def say(self, role: str, content: str) -> None:
        """A message without calls."""
        if self._only_thought and role == "assistant":
            self.messages[-1]["content"] = content
        else:
            self.messages.append({"role": role, "content": content})
        self._only_thought = False

    def call(self, call_id: str, name: str, arguments: str | dict[str, Any] | None, param: str) -> None:
        """A call of the assistant's: part of its message, where that is the last one. ``param``: where the arguments
        are. Raises ``BadRequest``."""
        self.has_calls = True
        self._only_thought = False
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.say("assistant", "")
        calls = self.messages[-1].setdefault("tool_calls", [])
        if len(calls) == MAX_CALLS:
            raise BadRequest(f"{param}: one message has more than {MAX_CALLS} calls", param=param)
        function = {"name": name, "arguments": arguments_of(arguments, param)}
        calls.append({"id": call_id, "type": "function", "function": function})

    def answer(self, call_id: str, content: str) -> None:
        """What a function gave back."""
        self._only_thought = False
        self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})


def read_list(raw: Raw, kind: Any, param: str, *, max_prompt_bytes: int) -> Any:
    """What a conversation came as, of that type: a list may not be empty or long. Raises ``BadRequest``,
    ``PayloadTooLarge``."""
    json = bytes(raw)
    if len(json) > MAX_JSON_PER_BYTE * max_prompt_bytes:
        raise PayloadTooLarge(
            f"{param} has {len(json)} bytes of JSON; a prompt of at most {max_prompt_bytes} bytes is allowed",
            param=param,
        )
    refuse_many_elements(json, MAX_ELEMENTS, param)
    value = required(read_json(json, kind | None, param), param)
    if not value:
        raise BadRequest(f"{param} must not be empty", param=param)
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise BadRequest(f"{param} has {len(value)} items; at most {MAX_MESSAGES} are allowed", param=param)
    return value
