"""Tokens on their way to gateways, kept until the gateway has the end of the stream.

The bus delivers at most once, so a stream's tokens stay here until its terminal part is
acknowledged: a gateway that sees a gap asks for them again from an offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode

from services.worker.core.scheduling.gateways import Gone
from shared.errors import BlitzError, NotFound
from shared.messages.common import ErrorInfo
from shared.messages.generation import FinishReason, PromptLogprobs, StreamPart, Submit, TokenLogprobs
from shared.subjects import Process
from shared.telemetry import tracer

TERMINAL_TTL_S = 60.0
"""An unacknowledged stream that ended is forgotten after this long: its gateway is gone."""
MOVED_KEEP_S = 60.0
"""A gateway that has heard nothing of the new owner for so long has given the attempt up."""

Key = tuple[str, int]
"""(request id, attempt)."""


@dataclass(slots=True)
class _Stream:
    gateway: Process
    attempt: int
    start: int
    """Offset of the first kept token."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: list[PromptLogprobs] = field(default_factory=list)
    """Of a prompt, each behind the one before."""
    queued_s: float | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    ended_at_s: float = 0.0


class Streams:
    """One entry per request; a newer attempt replaces an older one. Event loop only."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}

    def open(self, request_id: str, attempt: int, gateway: Process, offset: int) -> bool:
        """A request was accepted; False if this very attempt is known already (a repeated submit)."""
        known = self._streams.get(request_id)
        if known is not None and known.attempt >= attempt:
            return False
        self._streams[request_id] = _Stream(gateway, attempt, offset)
        return True

    def follow(self, request_id: str, attempt: int, token_ids: Sequence[int], *, with_logprobs: bool) -> None:
        """Tokens that another worker has streamed under this attempt, behind those that are here: the gateway may ask
        here for them. ``with_logprobs``: it would want to have theirs, too, which are not here."""
        stream = self._streams.get(request_id)
        if stream is None or stream.attempt != attempt:
            return
        if with_logprobs:
            stream.start += len(stream.token_ids) + len(token_ids)
            stream.token_ids.clear()
        else:
            stream.token_ids.extend(token_ids)

    def attempt_of(self, request_id: str) -> int | None:
        """The attempt that is open here, if any is."""
        known = self._streams.get(request_id)
        return None if known is None else known.attempt

    @property
    def num_open(self) -> int:
        """Those that have not ended."""
        return sum(stream.finish_reason is None for stream in self._streams.values())

    def __len__(self) -> int:
        return len(self._streams)

    def take(self, outputs: Iterable[StreamPart], now_s: float) -> dict[Process, list[StreamPart]]:
        """Keep a step's outputs; the parts to send, by gateway."""
        parts: dict[Process, list[StreamPart]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None or stream.attempt != output.attempt:
                continue  # cancelled or superseded: no gateway listens
            stream.token_ids.extend(output.token_ids)
            if output.logprobs:
                stream.logprobs.extend(output.logprobs)
            if output.queued_s is not None:
                stream.queued_s, stream.cached_tokens = output.queued_s, output.cached_tokens
            if output.finish_reason is not None:
                stream.finish_reason, stream.error, stream.ended_at_s = output.finish_reason, output.error, now_s
            parts.setdefault(stream.gateway, []).append(output)
        return parts

    def take_prompts(self, outputs: Iterable[StreamPart]) -> list[tuple[Process, StreamPart]]:
        """Keep log-probabilities of prompts; the parts to send, each with its gateway."""
        parts = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None and stream.attempt == output.attempt and output.prompt is not None:
                stream.prompt.append(output.prompt)
                parts.append((stream.gateway, output))
        return parts

    def resend_prompt(self, request_id: str, attempt: int, start: int) -> tuple[Process, list[StreamPart]]:
        """(gateway, all log-probabilities of the prompt from position ``start`` on). Raises ``NotFound`` as ``resend``
        does, and if tokens behind the prompt are here, but not those: another worker has computed it."""
        stream = self._stream(request_id, attempt)
        if stream.token_ids and not (stream.prompt and stream.prompt[0].start <= start < stream.prompt[-1].end):
            raise NotFound(f"no log-probabilities of the prompt of {request_id} attempt {attempt} from {start} here")
        lacking = [logprobs for logprobs in stream.prompt if logprobs.end > start]
        return stream.gateway, [
            StreamPart(request_id=request_id, attempt=attempt, offset=stream.start, prompt=logprobs)
            for logprobs in lacking
        ]

    def _stream(self, request_id: str, attempt: int) -> _Stream:
        stream = self._streams.get(request_id)
        if stream is None or stream.attempt != attempt:
            raise NotFound(f"nothing of request {request_id} attempt {attempt} is here")
        return stream

    def resend(self, request_id: str, attempt: int, offset: int) -> tuple[Process, StreamPart]:
        """(gateway, everything from ``offset`` on). Raises ``NotFound`` for an unknown or older stream."""
        stream = self._stream(request_id, attempt)
        if offset < stream.start:
            raise NotFound(f"no tokens of request {request_id} attempt {attempt} from offset {offset} here")
        skip = offset - stream.start
        part = StreamPart(
            request_id=request_id,
            attempt=attempt,
            offset=offset,
            token_ids=tuple(stream.token_ids[skip:]),
            logprobs=tuple(stream.logprobs[skip:]) if stream.logprobs else None,
            finish_reason=stream.finish_reason,
            error=stream.error,
            queued_s=stream.queued_s,
            cached_tokens=stream.cached_tokens,
        )
        return stream.gateway, part

    def forget(self, request_id: str, attempt: int) -> None:
        """The gateway has it all, or wants no more."""
        stream = self._streams.get(request_id)
        if stream is not None and stream.attempt <= attempt:
            del self._streams[request_id]

    def forget_gateway(self, gone: Gone) -> None:
        """Gateways died."""
        self._streams = {key: s for key, s in self._streams.items() if not gone.had(*s.gateway)}

    def expire(self, now_s: float) -> None:
        """Forget streams that ended long ago without an acknowledgement."""
        self._streams = {
            k: v for k, v in self._streams.items() if v.finish_reason is None or now_s - v.ended_at_s <= TERMINAL_TTL_S
        }


class NewOwners:
    """Who owns the requests that another worker took over from this one, under the same attempt (live scaling).

    The gateway learns it from the new owner. Until it has, it sends cancels and questions here.
    """

    def __init__(self) -> None:
        self._owners: dict[Key, tuple[Process, float]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, keys: Iterable[Key], worker: Process, now_s: float) -> None:
        """These are that worker's."""
        for key in keys:
            self._owners[key] = (worker, now_s)

    def owner_of(self, key: Key) -> Process | None:
        """The worker that took a request over, if one did."""
        found = self._owners.get(key)
        return None if found is None else found[0]

    def expire(self, now_s: float) -> None:
        """Forget those of long ago."""
        self._owners = {key: row for key, row in self._owners.items() if now_s - row[1] <= MOVED_KEEP_S}


class RequestSpans:
    """The worker's part in requests' traces: an open span per attempt, from when it is taken until its last token here.
    Event loop only."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._spans: dict[Key, Span] = {}

    def open(self, request: Submit, name: str) -> None:
        """Begin a span, in the current trace."""
        self._spans[request.request_id, request.attempt] = tracer().start_span(
            name,
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": "generate",
                "gen_ai.request.model": request.model,
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
                "blitz.request_id": request.request_id,
                "blitz.attempt": request.attempt,
                "blitz.worker_id": self._worker_id,
                "blitz.instance_id": request.instance_id,
            },
        )

    def of(self, key: Key) -> Span:
        """The open span; one that records nothing if there is none."""
        return self._spans.get(key, INVALID_SPAN)

    def refused(self, key: Key, error: BlitzError) -> None:
        """The request was not taken after all."""
        span = self._spans.pop(key, None)
        if span is not None:
            span.set_status(Status(StatusCode.ERROR, str(error)))
            span.end()

    def moved(self, key: Key, worker_id: str) -> None:
        """Another worker has the request now."""
        span = self._spans.pop(key, None)
        if span is not None:
            span.set_attribute("blitz.moved_to", worker_id)
            span.end()

    def ended(self, output: StreamPart) -> None:
        """This was its last output."""
        span = self._spans.pop((output.request_id, output.attempt), None)
        if span is None:
            return
        if output.queued_s is not None:
            span.set_attribute("blitz.queued_s", output.queued_s)
        span.set_attribute("gen_ai.usage.output_tokens", output.offset + len(output.token_ids))
        span.set_attribute("gen_ai.response.finish_reasons", [output.finish_reason or ""])
        if output.error is not None:
            span.set_status(Status(StatusCode.ERROR, output.error.message))
        span.end()
