"""The JSON of answers, whole and streamed. Streamed chunks are prebuilt around the text that changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from services.gateway.errors import error_body
from shared.errors import BlitzError

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a response."""

    prompt_tokens: int
    completion_tokens: int

    def as_json(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """What all chunks of one response share."""

    kind: Literal["chat", "completion"]
    response_id: str
    model: str
    created_s: int
    include_usage: bool = False
    """Chunks then carry a ``usage`` field, null but for the last one."""

    def _head(self, chunk: bool) -> dict[str, Any]:
        chat = "chat.completion.chunk" if chunk else "chat.completion"
        name = chat if self.kind == "chat" else "text_completion"
        return {"id": self.response_id, "object": name, "created": self.created_s, "model": self.model}

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        return _encode({**self._head(False), "choices": choices, "usage": usage.as_json()})

    def usage_event(self, usage: Usage) -> bytes:
        """The event behind the last token when usage was asked for."""
        return event({**self._head(True), "choices": [], "usage": usage.as_json()})

    def choice_json(self, index: int, text: str, finish_reason: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """One choice of an answer that is not streamed."""
        if self.kind == "chat":
            message = {"role": "assistant", "content": text, "refusal": None}
            return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class ChunkFormat:
    """Events of one choice of a streamed answer."""

    __slots__ = ("_head", "_kind", "_prefix", "_tail")

    def __init__(self, reply: Reply, index: int) -> None:
        self._kind = reply.kind
        head = _encode(reply._head(True))[:-1]
        self._head = b"data: " + head + b',"choices":[{"index":' + str(index).encode() + b","
        self._prefix = self._head + (b'"delta":{"content":' if reply.kind == "chat" else b'"text":')
        self._tail = b',"usage":null}\n\n' if reply.include_usage else b"}\n\n"

    def role(self) -> bytes:
        """The event that opens a chat choice; empty for text completions."""
        if self._kind != "chat":
            return b""
        return (
            self._head
            + b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            + self._tail
        )

    def chunk(self, text: str) -> bytes:
        """An event with nothing but text: the hot path."""
        if self._kind == "chat":
            return self._prefix + _encode(text) + b'},"logprobs":null,"finish_reason":null}]' + self._tail
        return self._prefix + _encode(text) + b',"logprobs":null,"finish_reason":null}]' + self._tail

    def full_chunk(
        self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None, usage: Usage | None
    ) -> bytes:
        """An event with anything."""
        closing = b"}" if self._kind == "chat" else b""
        rest = b',"logprobs":' + _encode(logprobs) + b',"finish_reason":' + _encode(finish_reason) + b"}]"
        tail = b',"usage":' + _encode(usage.as_json()) + b"}\n\n" if usage is not None else self._tail
        return self._prefix + _encode(text) + closing + rest + tail


def event(value: dict[str, Any]) -> bytes:
    """Any object as a server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


def error_events(error: BlitzError) -> bytes:
    """The end of a stream that has begun and cannot continue."""
    return b"data: " + error_body(error) + b"\n\n" + DONE
