"""An answer's JSON, whole and streamed: what any endpoint's is (``AnswerFormat``, ``ChoiceEvents``).

What differs between endpoints is said by an ``AnswerFormat`` of each (``http.endpoints``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from services.gateway.core.tools.deltas import CallDelta
from shared.errors import BlitzError


class TokenUsage(NamedTuple):
    """Token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompts', those that nobody had to compute."""
    reasoning_tokens: int | None = None
    """Of the completion's, those that the model thought with; None: it does not think."""


class ChoiceEnd(NamedTuple):
    """What a choice ended with."""

    reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    stop_string: str | None
    """The stop string that was found, if that ended it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What all parts of one response share."""

    response_id: str
    model: str
    created_s: int
    include_usage: bool = False
    """Chunks then carry a ``usage`` field, null but for the last one."""
    continuous_usage: bool = False
    """And all of them the usage so far."""
    repeated: bytes = b""
    """What the answer repeats of its request: ``GenerationRequest.repeated``."""
    call_is_named: bool = False
    """The caller said which function it calls."""


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A call of an answer, whole."""

    call_id: str
    name: str
    arguments: str
    """JSON, as far as the model wrote it."""
    text_before: int
    """Characters of the answer's text that come before it."""


@dataclass(frozen=True, slots=True)
class MadeThought:
    """What the model thought before an answer, whole."""

    text: str


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """One choice of an answer that is not streamed."""

    text: str
    calls: tuple[MadeCall, ...]
    finish: ChoiceEnd
    logprobs: dict[str, Any] | None
    thought: str = ""
    """What comes before all else; empty: there is none."""
    prompt_logprobs: list[Any] | None = None
    """Of each token of its prompt, where the answer has them."""

    def parts(self) -> list[MadeThought | str | MadeCall]:
        """Its thought; its text, cut where calls come between, and the calls."""
        parts: list[MadeThought | str | MadeCall] = [MadeThought(self.thought)] if self.thought else []
        at = 0
        for call in self.calls:
            parts += [self.text[at : call.text_before], call]
            at = call.text_before
        parts.append(self.text[at:])
        return [part for part in parts if part]


class ChoiceEvents(ABC):
    """Events of one choice of a streamed answer, each ready to be sent; empty where there is none."""

    @abstractmethod
    def opening(self, usage: TokenUsage) -> bytes:
        """Those before the first token. Called once, and first."""

    @abstractmethod
    def chunk(self, text: str) -> bytes:
        """Of a token with nothing but text: the hot path."""

    @abstractmethod
    def full_chunk(
        self, text: str, logprobs: dict[str, Any] | None, finish: ChoiceEnd | None, usage: TokenUsage | None
    ) -> bytes:
        """Of a token with anything but calls. ``finish``: it was the last one."""

    @abstractmethod
    def call_chunk(
        self,
        calls: Sequence[CallDelta],
        text: str,
        logprobs: dict[str, Any] | None,
        finish: ChoiceEnd | None,
        usage: TokenUsage | None,
    ) -> bytes:
        """Of a token with parts of calls, at least one, and maybe text."""

    @abstractmethod
    def thought_chunk(self, thought: str, logprobs: dict[str, Any] | None, usage: TokenUsage | None) -> bytes:
        """Of a token of the thought, before those of all else."""


Keep = Callable[[int], None]
"""Counts bytes that events keep until the end of the stream."""


class AnswerFormat(ABC):
    """Of one response."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    @abstractmethod
    def whole(self, results: Sequence[ChoiceResult], usage: TokenUsage) -> bytes:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def events(self, index: int, keep: Keep) -> ChoiceEvents:
        """Of choice number ``index`` of a streamed answer."""

    @abstractmethod
    def closing(self, usage: TokenUsage) -> bytes:
        """What ends a stream behind the last events of all choices."""

    @abstractmethod
    def failure(self, error: BlitzError) -> bytes:
        """What ends a stream that cannot go on, instead of ``closing``."""


def in_order(calls: Sequence[CallDelta], text: str) -> list[str | CallDelta]:
    """What one token brought, in the order in which the model wrote it: what is left of a call that has begun, text,
    calls that begin."""
    begin = next((at for at, delta in enumerate(calls) if delta.name), len(calls))
    return [*calls[:begin], *([text] if text else []), *calls[begin:]]
