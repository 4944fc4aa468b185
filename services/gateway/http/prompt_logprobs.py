"""Log-probabilities of a prompt in an answer: in a field of their own, or of the tokens that a text begins with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from services.gateway.active_requests import Sink
from services.gateway.core.scored_stream import ScoredStream
from services.gateway.http.logprobs import entry_bytes, finite, packed
from services.gateway.tokenizer import ModelTokenizer
from shared.errors import BlitzError
from shared.messages.generation import FinishReason, PromptLogprobs, TokenLogprobs


class PromptToken(NamedTuple):
    """One of a prompt, behind those before it."""

    position: int
    logprob: float
    rank: int
    """1: none is likelier."""
    top: Sequence[tuple[int, float]]
    """Ids and log-probabilities, the likeliest first."""


def tokens_of(logprobs: PromptLogprobs) -> list[PromptToken]:
    """Of arrays that are whole."""
    own = memoryview(logprobs.logprobs).cast("f").tolist()
    ranks = memoryview(logprobs.ranks).cast("i").tolist()
    ids = memoryview(logprobs.top_ids).cast("i").tolist()
    values = memoryview(logprobs.top_logprobs).cast("f").tolist()
    wide = logprobs.num_top
    tokens = []
    for row, (logprob, rank) in enumerate(zip(own, ranks, strict=True)):
        here = slice(row * wide, (row + 1) * wide)
        top = list(zip(ids[here], values[here], strict=True))
        tokens.append(PromptToken(logprobs.start + row, logprob, rank, top))
    return tokens


class PromptTaker(ABC):
    """Makes something of a prompt's tokens."""

    @abstractmethod
    def take(self, tokens: Sequence[PromptToken]) -> int:
        """The next ones. How many bytes it keeps of them."""


class ListedPrompt(PromptTaker):
    """vLLM's ``prompt_logprobs``: of each token, null for the first, an object of ids: the prompt's own, and the
    likeliest."""

    def __init__(self, tokenizer: ModelTokenizer, token_ids: Sequence[int], num_top: int) -> None:
        self._tokenizer, self._token_ids, self._num_top = tokenizer, token_ids, num_top
        self.entries: list[Any] = [None]

    def take(self, tokens: Sequence[PromptToken]) -> int:
        made = [packed(self._entry(token)) for token in tokens]
        self.entries += made
        return sum(map(entry_bytes, made))

    def _entry(self, token: PromptToken) -> dict[str, Any]:
        own = self._token_ids[token.position]
        entry = {str(own): self._alternative(own, token.logprob, token.rank)}
        for place, (token_id, logprob) in enumerate(token.top[: self._num_top], start=1):
            entry[str(token_id)] = self._alternative(token_id, logprob, place)
        return entry

    def _alternative(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}


class ScoredSink:
    """``Sink`` of a stream whose prompt is scored: what comes of the prompt goes to its takers first."""

    def __init__(
        self, sink: Sink, stream: ScoredStream, takers: Sequence[PromptTaker], keep: Callable[[int], None]
    ) -> None:
        """``keep`` counts bytes that the answer keeps."""
        self._sink, self._stream, self._takers, self._keep = sink, stream, takers, keep

    def on_tokens(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        finish_reason: FinishReason | None,
        now_s: float,
    ) -> bool:
        for came in self._stream.take():
            tokens = tokens_of(came)
            self._keep(sum(taker.take(tokens) for taker in self._takers))
        return self._sink.on_tokens(token_ids, logprobs, finish_reason, now_s)

    def on_error(self, error: BlitzError) -> None:
        self._sink.on_error(error)


class NoOutputSink:
    """``Sink`` of an answer that is its prompt: the token behind it is left out."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def on_tokens(
        self,
        token_ids: tuple[int, ...],  # noqa: ARG002 - left out
        logprobs: tuple[TokenLogprobs, ...] | None,  # noqa: ARG002
        finish_reason: FinishReason | None,
        now_s: float,
    ) -> bool:
        return self._sink.on_tokens((), None, None if finish_reason is None else "length", now_s)

    def on_error(self, error: BlitzError) -> None:
        self._sink.on_error(error)
