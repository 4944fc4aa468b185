"""Tracing: one set-up for every process, configured by the standard OTEL_* variables."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import Tracer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_log = logging.getLogger(__name__)

_FLUSH_TIMEOUT_S = 5.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

_SAY_EACH_TRY = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")
"""Loggers of the SDK: each try to reach the collector and each span that is lost is a line."""


class _OncePerOutage(logging.Filter):
    """Lets the first line through, and no other until the collector takes spans again."""

    _away = False

    def filter(self, record: logging.LogRecord) -> bool:
        is_first, self._away = not self._away, True
        if is_first:
            record.msg, record.args = "traces are lost until the collector answers: %s", (record.getMessage(),)
        return is_first

    def over(self) -> None:
        """Spans were taken."""
        if self._away:
            self._away = False
            _log.warning("the collector takes traces again")


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
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

    once = _OncePerOutage()
    for name in _SAY_EACH_TRY:
        logging.getLogger(name).addFilter(once)

    class Exporter(OTLPSpanExporter):
        """Knows when an outage is over."""

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = super().export(spans)
            if result is SpanExportResult.SUCCESS:
                once.over()
            return result

    attributes = {SERVICE_NAME: service_name}
    if instance_id:
        attributes[SERVICE_INSTANCE_ID] = instance_id
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Exporter()))
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
