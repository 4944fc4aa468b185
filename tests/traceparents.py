"""Spans as W3C ``traceparent`` headers."""

from __future__ import annotations

from opentelemetry import context, propagate, trace
from opentelemetry.context import Context

from shared.bus.wire import TRACEPARENT


def current_traceparent() -> str:
    """Of the current span, empty if there is none."""
    if not trace.get_current_span().get_span_context().is_valid:
        return ""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get(TRACEPARENT, "")


def context_from(traceparent: str) -> Context:
    """A context whose current span is the one named."""
    return propagate.extract({TRACEPARENT: traceparent}, context=context.Context())
