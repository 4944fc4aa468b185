"""One server span per request, with OpenTelemetry's ``gen_ai`` attributes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.trace import Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.gateway.http.choice import Choice
from services.gateway.request_bodies.options import SharedBody
from shared.telemetry import tracer

_propagator = TraceContextTextMapPropagator()
_PARAMETERS = ("max_tokens", "temperature", "top_p")


@contextmanager
def request_span(operation: str, model: str, body: SharedBody, traceparent: str) -> Iterator[Span]:
    """A span like ``chat <model>``, child of the caller's ``traceparent`` if it sent one."""
    context = _propagator.extract({"traceparent": traceparent}) if traceparent else None
    with tracer().start_as_current_span(f"{operation} {model}", context=context, kind=SpanKind.SERVER) as span:
        if span.is_recording():
            span.set_attribute("gen_ai.operation.name", operation)
            span.set_attribute("gen_ai.system", "blitzscale")
            span.set_attribute("gen_ai.provider.name", "blitzscale")
            span.set_attribute("gen_ai.request.model", model)
            for name in _PARAMETERS:
                value = getattr(body, name)
                if value is not None:
                    span.set_attribute(f"gen_ai.request.{name}", value)
        yield span


def set_response_attributes(span: Span, response_id: str, choices: Sequence[Choice]) -> None:
    """What came of it."""
    if span.is_recording():
        span.set_attribute("gen_ai.response.id", response_id)
        span.set_attribute("gen_ai.usage.input_tokens", sum(c.num_prompt_tokens for c in choices))
        span.set_attribute("gen_ai.usage.output_tokens", sum(c.num_tokens for c in choices))
        span.set_attribute("gen_ai.response.finish_reasons", [c.finish_reason or "unknown" for c in choices])
