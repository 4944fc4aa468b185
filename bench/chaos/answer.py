"""What came back for a question: whole, or put together from events, each with its time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from bench.openai_events import DONE, ErrorBody, Usage

_LOGPROB_TOLERANCE = 1e-3
"""Of a token's log-probability: sums of other batches are added up in another order."""


class _Logprobs(msgspec.Struct, frozen=True):
    tokens: tuple[str, ...] = ()
    token_logprobs: tuple[float | None, ...] = ()


class _Choice(msgspec.Struct, frozen=True):
    text: str = ""
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct, frozen=True):
    """A whole answer, or an event of one."""

    id: str = ""
    choices: tuple[_Choice, ...] = ()
    usage: Usage | None = None
    error: ErrorBody | None = None


_decoder = msgspec.json.Decoder(_Completion)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer: ``http_<status>``, ``error_event``, ``timeout``, ``connect``, ``disconnected``,
    ``protocol`` or ``cut``."""

    kind: str
    detail: str
    code: str = ""
    """The server's, if it named one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer, however it came."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    tokens: tuple[str, ...] = ()
    """With logprobs."""
    logprobs: tuple[float, ...] = ()

    def wrong(self, got: Answer) -> str:
        """See ``Expectation``: it is expected to be this one."""
        return got.difference(self)

    def difference(self, other: Answer) -> str:
        """What is not the same, with the place; empty: nothing."""
        if self.text != other.text:
            at = next((i for i, (a, b) in enumerate(zip(self.text, other.text, strict=False)) if a != b), None)
            at = min(len(self.text), len(other.text)) if at is None else at
            here, there = self.text[at : at + 24], other.text[at : at + 24]
            return f"text from character {at} of {len(other.text)}: {here!r} instead of {there!r}"
        for name in ("finish_reason", "prompt_tokens", "completion_tokens", "tokens"):
            if getattr(self, name) != getattr(other, name):
                return f"{name}: {getattr(self, name)!r} instead of {getattr(other, name)!r}"
        if len(self.logprobs) != len(other.logprobs):
            return f"{len(self.logprobs)} log-probabilities instead of {len(other.logprobs)}"
        for index, (a, b) in enumerate(zip(self.logprobs, other.logprobs, strict=True)):
            if not math.isclose(a, b, rel_tol=_LOGPROB_TOLERANCE, abs_tol=_LOGPROB_TOLERANCE):
                return f"log-probability of token {index}: {a:.6f} instead of {b:.6f}"
        return ""


class Expectation(Protocol):
    """What an answer must be."""

    def wrong(self, got: Answer) -> str:
        """What is not so; empty: nothing."""


@dataclass(slots=True)
class Reader:
    """Takes one answer apart."""

    response_id: str = ""
    token_times_s: list[float] = field(default_factory=list)
    """When each event with text came (``time.perf_counter``); none of a whole answer."""
    _text: list[str] = field(default_factory=list)
    _tokens: list[str] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _finish_reason: str | None = None
    _usage: Usage | None = None
    _failure: Failure | None = None
    _done: bool = False

    def on_event(self, data: bytes, now_s: float) -> None:
        """The data of one server-sent event."""
        if data == DONE:
            self._done = True
            return
        event = self._take(data)
        if event is not None and any(choice.text for choice in event.choices):
            self.token_times_s.append(now_s)

    def end(self, status: int, body: bytes, *, stream: bool) -> Answer | Failure:
        """What it was, once the server has ended it."""
        if status != 200:
            refused = self._refusal(body)
            return Failure(f"http_{status}", body[:300].decode(errors="replace"), refused)
        if not stream:
            self._take(body)
            self._done = True
        if self._failure is not None:
            return self._failure
        if not self._done:
            return Failure("cut", "the stream ended without [DONE]")
        if self._usage is None or self._finish_reason is None:
            return Failure("protocol", "an answer without usage or finish_reason")
        return Answer(
            "".join(self._text),
            self._finish_reason,
            self._usage.prompt_tokens,
            self._usage.completion_tokens,
            tuple(self._tokens),
            tuple(self._logprobs),
        )

    def _take(self, data: bytes) -> _Completion | None:
        try:
            part = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            self._failure = self._failure or Failure("protocol", f"{error} in {data[:200]!r}")
            return None
        self.response_id = part.id or self.response_id
        if part.error is not None:
            self._failure = Failure("error_event", part.error.message, str(part.error.code or ""))
        self._usage = part.usage or self._usage
        for choice in part.choices:
            self._text.append(choice.text)
            self._finish_reason = choice.finish_reason or self._finish_reason
            if choice.logprobs is not None:
                self._tokens += choice.logprobs.tokens
                self._logprobs += [math.nan if value is None else value for value in choice.logprobs.token_logprobs]
        return part

    @staticmethod
    def _refusal(body: bytes) -> str:
        try:
            error: Any = _decoder.decode(body).error
        except msgspec.MsgspecError:
            return ""
        return str(error.code or "") if error is not None else ""
