"""The worker's part in a request's trace: one span per attempt, from when it is taken until its last token here."""

from __future__ import annotations

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode

from shared.errors import BlitzError
from shared.messages.generation import StreamPart, Submit
from shared.telemetry import tracer

Key = tuple[str, int]
"""(request id, attempt)."""


class RequestSpans:
    """Open spans. Event loop only."""

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
