"""A response's JSON, whole and streamed. Chunks are prebuilt around the text that changes.

What differs between endpoints is said by a ``AnswerFormat`` of each (``http.endpoints``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompts', those that nobody had to compute."""

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def _usage_tail(usage: TokenUsage) -> bytes:
    """What ends an event that has the usage."""
    return b',"usage":' + _encode(usage.as_json()) + b"}\n\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """What all chunks of one response share."""

    response_id: str
    model: str
    created_s: int
    include_usage: bool = False
    """Chunks then carry a ``usage`` field, null but for the last one."""


class AnswerFormat(ABC):
    """Of one response."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    around_text: ClassVar[tuple[bytes, bytes]]
    """In a chunk's choice: what is before and behind its text, which is a JSON string."""
    opening: ClassVar[bytes] = b""
    """In the choice of a chunk that comes before those with text; empty: there is none."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    def head(self, name: str) -> dict[str, Any]:
        reply = self.reply
        return {"id": reply.response_id, "object": name, "created": reply.created_s, "model": reply.model}

    def whole(self, choices: list[dict[str, Any]], usage: TokenUsage) -> bytes:
        """The body of an answer that is not streamed."""
        return _encode({**self.head(self.whole_object), "choices": choices, "usage": usage.as_json()})

    def usage_event(self, usage: TokenUsage) -> bytes:
        """The event behind the last token when usage was asked for."""
        value = {**self.head(self.chunk_object), "choices": [], "usage": usage.as_json()}
        return b"data: " + _encode(value) + b"\n\n"

    @abstractmethod
    def choice_json(self, index: int, text: str, finish_reason: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """One choice of an answer that is not streamed."""


class ChunkFormat:
    """Events of one choice of a streamed answer."""

    def __init__(self, format_: AnswerFormat, index: int) -> None:
        before, behind = format_.around_text
        head = b"data: " + _encode(format_.head(format_.chunk_object))[:-1] + b',"choices":[{"index":%d,' % index
        self._prefix, self._closing = head + before, behind
        self._tail = b',"usage":null}\n\n' if format_.reply.include_usage else b"}\n\n"
        end = b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._plain_end = self._closing + end
        self.opening = head + format_.opening + end if format_.opening else b""
        """The event that opens the choice; empty: there is none."""

    def opening_with(self, usage: TokenUsage) -> bytes:
        """The same with the usage before the first token."""
        return self.opening.removesuffix(self._tail) + _usage_tail(usage) if self.opening else b""

    def chunk(self, text: str) -> bytes:
        """An event with nothing but text: the hot path."""
        return self._prefix + _encode(text) + self._plain_end

    def full_chunk(
        self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None, usage: TokenUsage | None
    ) -> bytes:
        """An event with anything but calls."""
        return self._event(_encode(text), logprobs, finish_reason, usage)

    def call_chunk(
        self,
        calls: list[dict[str, Any]],
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        usage: TokenUsage | None,
    ) -> bytes:
        """An event with parts of calls, and maybe text, of a chat."""
        content = (_encode(text) if text else b"null") + b',"tool_calls":' + _encode(calls)
        return self._event(content, logprobs, finish_reason, usage)

    def _event(
        self, content: bytes, logprobs: dict[str, Any] | None, finish_reason: str | None, usage: TokenUsage | None
    ) -> bytes:
        rest = b',"logprobs":' + _encode(logprobs) + b',"finish_reason":' + _encode(finish_reason) + b"}]"
        tail = _usage_tail(usage) if usage is not None else self._tail
        return self._prefix + content + self._closing + rest + tail
