"""One choice of a response: a dispatcher sink that turns tokens into events, or into a whole text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from services.gateway.core.stream import StreamState
from services.gateway.core.text_output import TextOutput
from services.gateway.http.formats import ChoiceEnd, ChoiceEvents, ChoiceResult, MadeCall, TokenUsage
from services.gateway.http.logprobs import LogprobShape, entry_bytes
from services.gateway.memory import ResponseBuffer
from services.gateway.metrics import ModelMetrics
from shared.errors import BlitzError
from shared.messages.generation import FinishReason, TokenLogprobs

TOKEN_BYTES = 64
"""What a token's text takes in memory, beside its characters."""


class Choice(ABC):
    """Common to streamed and whole choices: text, log-probabilities, metrics."""

    def __init__(
        self,
        buffer: ResponseBuffer,
        events: ChoiceEvents,
        output: TextOutput,
        metrics: ModelMetrics,
        *,
        stream: StreamState,
        arrived_s: float,
        logprobs: LogprobShape | None,
        opening_text: str,
        continuous_usage: bool,
        trace_id: str,
        number: int,
    ) -> None:
        """``trace_id``: of the trace that is kept of the request; empty: none. ``number``: its place among those of its
        prompt."""
        self._buffer = buffer
        self._events = events
        self._output = output
        self._metrics = metrics
        self.logprobs = logprobs
        """What its tokens' become; None: it has none."""
        self._opening_text = opening_text
        self._continuous_usage = continuous_usage
        self._stream = stream
        self._trace_id = trace_id
        self._number = number
        self._last_s = 0.0
        self.arrived_s = arrived_s
        """Monotonic, as all times here."""
        self.first_s = 0.0
        """When its first token came; 0: not yet."""
        self.finish_reason: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Of its prompt."""
        return len(self._stream.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Of its prompt, those that nobody had to compute."""
        return self._stream.cached_tokens

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self._output.num_tokens

    @property
    def num_thought_tokens(self) -> int | None:
        """Of these, those that the model thought with; None: it does not think."""
        return None

    @property
    def counts_prompt(self) -> bool:
        """Whether an answer's usage has its prompt from here: that of one choice of each prompt."""
        return not self._number

    def on_tokens(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        finish_reason: FinishReason | None,
        now_s: float,
    ) -> bool:
        """See ``Sink``."""
        metrics, output = self._metrics, self._output
        if token_ids:
            last_s = self._last_s
            if last_s:
                metrics.itl_s.observe(now_s - last_s)
            else:
                self.first_s = now_s
                self._observe_ttft(now_s - self.arrived_s)
                metrics.queue_s.observe(max(0.0, self._stream.submitted_s - self.arrived_s))
                metrics.prefill_s.observe(now_s - self._stream.submitted_s)
            self._last_s = now_s
            last = len(token_ids) - 1
            for index, token_id in enumerate(token_ids):
                text = output.push(token_id)
                if index == last and finish_reason is not None and not output.stopped:
                    text += output.flush()
                entry = None
                if self.logprobs is not None and logprobs is not None and index < len(logprobs):
                    entry = self.logprobs.entry(token_id, logprobs[index], text)
                metrics.generation_tokens += 1
                if output.stopped:
                    self._end(text, entry, "stop", now_s)
                    return True
                if index == last and finish_reason is not None:
                    self._end(text, entry, finish_reason, now_s)
                    return False
                self._emit(self._open(text), entry)
        elif finish_reason is not None:
            text = output.flush()
            self._end(text, None, "stop" if output.stopped else finish_reason, now_s)
            return False
        self._buffer.wake()
        return False

    def _observe_ttft(self, ttft_s: float) -> None:
        if self._trace_id:
            self._metrics.ttft_s.observe_traced(ttft_s, self._trace_id, self._stream.arrived_at_s + ttft_s)
        else:
            self._metrics.ttft_s.observe(ttft_s)

    def on_error(self, error: BlitzError) -> None:
        """See ``Sink``."""
        self._metrics.finished["error"] += 1
        self.finish_reason = "error"
        self._buffer.fail(error)

    def abort(self) -> None:
        """The client left."""
        if self.finish_reason is None:
            self.finish_reason = "abort"
            self._metrics.finished["abort"] += 1

    def _open(self, text: str) -> str:
        if self._opening_text:
            text, self._opening_text = self._opening_text + text, ""
        return text

    def _reason(self, finish_reason: str) -> str:
        """As the client sees it."""
        return finish_reason

    def _end(self, text: str, entry: Any, finish_reason: str, now_s: float) -> None:
        self.finish_reason = self._reason(finish_reason)
        self._metrics.finished[finish_reason] += 1
        self._metrics.e2e_s.observe(now_s - self.arrived_s)
        self._metrics.request_prompt_tokens.observe(self.num_prompt_tokens)
        self._metrics.request_generation_tokens.observe(self.num_tokens)
        if self.first_s:
            self._metrics.decode_s.observe(now_s - self.first_s)
        self._emit_last(self._open(text), entry, ChoiceEnd(self.finish_reason, self._output.stop_string))
        self._buffer.open_choices -= 1
        self._buffer.wake()

    @abstractmethod
    def keep(self, num_bytes: int) -> None:
        """Count bytes that are kept for its answer."""

    @abstractmethod
    def _emit(self, text: str, entry: Any) -> None:
        """One token's text and its log-probabilities."""

    @abstractmethod
    def _emit_last(self, text: str, entry: Any, finish: ChoiceEnd) -> None:
        """The same for the last token."""


def usage_of(choices: Sequence[Choice]) -> TokenUsage:
    """Of an answer with these choices: each prompt counts once, however many choices it has."""
    of_prompts = [choice for choice in choices if choice.counts_prompt]
    thought = [number for choice in choices if (number := choice.num_thought_tokens) is not None]
    return TokenUsage(
        sum(choice.num_prompt_tokens for choice in of_prompts),
        sum(choice.num_tokens for choice in choices),
        sum(choice.num_cached_tokens for choice in of_prompts),
        sum(thought) if thought else None,
    )


class StreamedChoice(Choice):
    """One event per token, also when a token has no text of its own yet (so events can be counted)."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._unopened = True
        self._plain = self.logprobs is None and not self._continuous_usage

    def keep(self, num_bytes: int) -> None:
        self._buffer.keep(num_bytes)

    def _emit(self, text: str, entry: Any) -> None:
        if self._unopened:
            self._write_opening()
        if self._plain:
            chunk = self._events.chunk(text)
        else:
            chunk = self._events.full_chunk(text, self._joined(entry), None, self._usage())
        self._buffer.write(chunk)

    def _emit_last(self, text: str, entry: Any, finish: ChoiceEnd) -> None:
        if self._unopened:
            self._write_opening()
        chunk = self._events.full_chunk(text, self._joined(entry), finish, self._usage())
        self._buffer.write(chunk)

    def _write_opening(self) -> None:
        self._unopened = False
        self._buffer.write(self._events.opening(TokenUsage(self.num_prompt_tokens, 0, self.num_cached_tokens)))

    def _joined(self, entry: Any) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        if entry is not None:
            return self.logprobs.join([entry])
        return self.logprobs.join([]) if self.logprobs.has_more else None

    def _usage(self) -> TokenUsage | None:
        if not self._continuous_usage:
            return None
        return TokenUsage(self.num_prompt_tokens, self.num_tokens, self.num_cached_tokens)


class WholeChoice(Choice):
    """Collects the text."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._texts: list[str] = []
        self._entries: list[Any] = []
        self.prompt_logprobs: list[Any] | None = None
        """As in ``ChoiceResult``."""

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def thought(self) -> str:
        """What comes before it; empty: nothing."""
        return ""

    @property
    def logprobs_json(self) -> dict[str, Any] | None:
        return self.logprobs.join(self._entries) if self.logprobs is not None else None

    @property
    def calls(self) -> tuple[MadeCall, ...]:
        """Those of its text."""
        return ()

    @property
    def result(self) -> ChoiceResult:
        """Once it has ended."""
        assert self.finish_reason is not None
        finish = ChoiceEnd(self.finish_reason, self._output.stop_string)
        return ChoiceResult(
            *(self.text, self.calls, finish, self.logprobs_json),
            thought=self.thought,
            prompt_logprobs=self.prompt_logprobs,
        )

    def keep(self, num_bytes: int) -> None:
        self._buffer.collect(num_bytes)

    def _emit(self, text: str, entry: Any) -> None:
        self._texts.append(text)
        size_bytes = TOKEN_BYTES + len(text)
        if entry is not None:
            self._entries.append(entry)
            size_bytes += entry_bytes(entry)
        self._buffer.collect(size_bytes)

    def _emit_last(self, text: str, entry: Any, finish: ChoiceEnd) -> None:  # noqa: ARG002 - the other kind's
        self._emit(text, entry)
