from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from compose.ports import free_port
from shared.telemetry import exporting
from tests.otlp import OtlpReceiver

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PROGRAM = f"""
from shared.telemetry import *
from tests.traceparents import context_from, current_traceparent
flush = setup_telemetry("planner", "planner-1")
with tracer().start_as_current_span("scale", context=context_from("{TRACEPARENT}"), attributes={{"n": 3}}) as span:
    with tracer().start_as_current_span("plan"):
        print(current_traceparent())
    print(span.is_recording())
flush()
"""


def run(program: str = PROGRAM, **environ: str) -> list[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean | {"PYTHONPATH": os.getcwd()} | environ,
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_spans_reach_the_collector_with_service_parent_and_attributes(otlp_receiver: OtlpReceiver) -> None:
    traceparent, recording = run(OTEL_EXPORTER_OTLP_ENDPOINT=otlp_receiver.endpoint)
    spans = {span.name: span for span in otlp_receiver.wait_for(lambda spans: len(spans) == 2)}
    scale, plan = spans["scale"], spans["plan"]
    assert recording == "True"
    assert (scale.service, scale.instance_id) == ("planner", "planner-1")
    assert (scale.trace_id, scale.parent_span_id) == tuple(TRACEPARENT.split("-")[1:3])
    assert scale.attributes == {"n": 3}
    assert (plan.trace_id, plan.parent_span_id) == (scale.trace_id, scale.span_id)
    assert traceparent == f"00-{plan.trace_id}-{plan.span_id}-01"


@pytest.mark.parametrize("environ", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_nothing_is_recorded_unless_asked_for(otlp_receiver: OtlpReceiver, environ: dict[str, str]) -> None:
    _, recording = run(OTEL_EXPORTER_OTLP_ENDPOINT=otlp_receiver.endpoint, **environ)
    assert recording == "False"
    assert otlp_receiver.spans == []


def test_the_trace_goes_on_through_a_process_that_records_nothing() -> None:
    traceparent, recording = run()
    assert recording == "False"
    assert traceparent.split("-")[1] == TRACEPARENT.split("-")[1]


def test_an_unreachable_collector_does_not_hold_up_the_end() -> None:
    started_s = time.monotonic()
    run(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    assert time.monotonic() - started_s < 50.0  # 5 s of them for the flush


OUTAGES = """
import logging, os, sys
said = []
logging.basicConfig(format="%(message)s", stream=sys.stdout)
class Noted(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger().addHandler(Noted())
from opentelemetry import trace
from shared.telemetry import *
from tests.otlp import OtlpReceiver
flush = setup_telemetry("planner", "planner-1")
def lose(count):
    for _ in range(count):
        with tracer().start_as_current_span("scale"):
            pass
        trace.get_tracer_provider().force_flush()
lose(3)
receiver = OtlpReceiver(int(os.environ["PORT"]))
receiver.start()
while len(said) < 2:
    lose(1)  # on a busy machine it answers too late
receiver.stop()
lose(2)
"""


def test_a_collector_that_is_away_is_said_once_per_outage() -> None:
    port = str(free_port())
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "PORT": port}
    patient = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1", "OTEL_BSP_SCHEDULE_DELAY": "600000"}
    lost, again, lost_again = run(OUTAGES, **environ, **patient)
    assert lost.startswith("traces are lost until the collector answers: ")
    assert again == "the collector takes traces again"
    assert lost_again.startswith("traces are lost")


def test_the_traces_endpoint_alone_is_enough() -> None:
    assert exporting({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"})
    assert not exporting({})
    assert not exporting({"OTEL_EXPORTER_OTLP_ENDPOINT": " "})
