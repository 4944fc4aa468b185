from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared import subjects
from shared.messages.common import Ack
from shared.messages.generation import Submit
from tests.processes import process
from tests.services.gateway.conftest import Stack, StackFactory

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


async def test_one_span_per_request_joins_the_callers_trace_and_reaches_the_worker(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("services.gateway.http.generation.tracer", lambda: provider.get_tracer("test"))
    worker = stack.workers[0]
    parents: list[trace.SpanContext] = []

    async def on_submit(submit: Submit) -> Ack:
        parents.append(trace.get_current_span().get_span_context())
        return await worker.on_submit(submit)

    await worker.stop()
    await worker.bus.respond(subjects.worker_submit(process("w0")), Submit, on_submit)
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "my secret"}],
        "temperature": 0.5,
        "max_tokens": 9,
    }
    body |= {"seed": 7, "top_k": 40}
    headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
    answer = await stack.http.post("/v1/chat/completions", json=body, headers=headers)
    [span] = exporter.get_finished_spans()
    assert span.name == "chat tiny"
    assert span.kind is trace.SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert span.attributes is not None
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.seed": 7,
        "gen_ai.request.top_k": 40.0,
        "gen_ai.system": "blitzscale",
        "gen_ai.provider.name": "blitzscale",
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.model": "tiny",
        "gen_ai.usage.input_tokens": answer.json()["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("stop",),
        "server.address": "127.0.0.1",
        "server.port": int(stack.url.rpartition(":")[2]),
    }
    assert dict(span.attributes) == expected, "and no text of anybody's"
    assert [(p.trace_id, p.span_id) for p in parents] == [(span.context.trace_id, span.context.span_id)]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_that_fails_says_so_in_its_span(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("services.gateway.http.generation.tracer", lambda: provider.get_tracer("test"))
    stack = await make_stack(1, max_attempts=1)
    stack.workers[0].end_reason = "error"
    body = {"model": "tiny", "prompt": "a", "max_tokens": 16, "stream": streamed}
    await stack.http.post("/v1/completions", json=body)
    [span] = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["error.type"] == "unavailable"
    assert span.status.status_code is trace.StatusCode.ERROR


async def test_probes_and_listings_are_no_spans_and_what_an_operator_does_is_one(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    for path in ("/health", "/live", "/metrics", "/v1/models", "/admin/models", "/nowhere"):
        await stack.http.get(path)
    assert exporter.get_finished_spans() == ()
    assert (await stack.http.delete("/admin/models/tiny")).status_code == 200
    assert [span.name for span in exporter.get_finished_spans()] == ["DELETE /admin/models/{name}"]


async def test_a_number_that_no_span_can_carry_is_refused_before_there_is_one(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("services.gateway.http.generation.tracer", lambda: provider.get_tracer("test"))
    body = {"model": "tiny", "prompt": "a", "max_tokens": 10**399, "temperature": 0.5}
    assert (await stack.http.post("/v1/completions", json=body)).status_code == 400
    assert exporter.get_finished_spans() == ()
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2**31, "temperature": 0.5}
    assert (await stack.http.post("/v1/completions", json=body)).status_code == 400
    [span] = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["gen_ai.request.max_tokens"] == 2**31
