"""Tracing: one set-up for every process, configured by the standard OTEL_* variables."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping

from opentelemetry import trace
from opentelemetry.trace import Tracer

_FLUSH_TIMEOUT_S = 5.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def exporting(environ: Mapping[str, str]) -> bool:
    """Whether the OTEL_* variables ask for traces to be sent."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none":
        return False
    return any(environ.get(key, "").strip() for key in _ENDPOINTS)


def setup_telemetry(service_name: str, instance_id: str = "") -> Callable[[], None]:
    """Send this process's spans by OTLP/HTTP if the environment asks for it; otherwise spans cost nothing.

    Returns a function that flushes and shuts down, waiting 5 s at most. Call both once per process.
    """
    if not exporting(os.environ):
        return _nothing
    # Only here: the SDK and its exporter take 0.2 s to import.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    attributes = {SERVICE_NAME: service_name}
    if instance_id:
        attributes[SERVICE_INSTANCE_ID] = instance_id
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)

    def flush() -> None:
        # A thread, because an exporter that cannot reach its collector retries for longer than asked.
        ending = threading.Thread(target=provider.shutdown, name="telemetry", daemon=True)
        ending.start()
        ending.join(_FLUSH_TIMEOUT_S)

    return flush


def _nothing() -> None:
    """No exporter runs."""


def tracer() -> Tracer:
    """The tracer of this system."""
    return trace.get_tracer("blitzscale")
