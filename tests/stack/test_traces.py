"""One trace per request across gateway and worker; one per scale operation across the control plane."""

from __future__ import annotations

from pathlib import Path

import pytest

from compose.stack import Stack
from tests.otlp import OtlpReceiver, ReceivedSpan
from tests.stack.client import complete, openai_client
from tests.stack.conftest import MODEL, READY_S, mock_config

pytestmark = [pytest.mark.stack, pytest.mark.ucx]


def _named(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return [s for s in spans if s.name == name]


def _ancestors(spans: list[ReceivedSpan], span: ReceivedSpan) -> list[str]:
    """Names from the span's parent up to the root."""
    by_id = {s.span_id: s for s in spans}
    names = []
    while span.parent_span_id and span.parent_span_id in by_id:
        span = by_id[span.parent_span_id]
        names.append(f"{span.service}:{span.name}")
    return names


def _is_whole(spans: list[ReceivedSpan], root: str) -> bool:
    """Whether both trees have arrived: services export on their own time."""
    requests, loads = _named(spans, "worker.request"), _named(spans, "worker.load")
    leases = [s for s in _named(spans, "pool.lease") if loads and s.trace_id == loads[0].trace_id]
    tops = [_ancestors(spans, found[0])[-1:] if found else [] for found in (requests, loads, leases)]
    return tops == [[root], ["monitor:monitor.demand"], ["monitor:monitor.demand"]]


async def test_the_two_span_trees(tmp_path: Path, otlp_receiver: OtlpReceiver) -> None:
    config = mock_config(
        tmp_path,
        workers=2,
        OTEL_EXPORTER_OTLP_ENDPOINT=otlp_receiver.endpoint,
        OTEL_BSP_SCHEDULE_DELAY="200",
        BLITZ_MONITOR_RUNNING_LIMIT="2",
    )
    async with Stack(config) as stack:
        await stack.wait_ready(READY_S)
        async with openai_client(stack) as client:
            await complete(client, MODEL)
        root = f"gateway:text_completion {MODEL}"
        spans = otlp_receiver.wait_for(lambda s: _is_whole(s, root))

    (request,) = _named(spans, "worker.request")
    assert _ancestors(spans, request)[-1] == root
    (gateway,) = [s for s in spans if f"{s.service}:{s.name}" == root]
    assert gateway.trace_id == request.trace_id
    assert gateway.attributes["gen_ai.request.model"] == MODEL
    assert gateway.attributes["gen_ai.usage.output_tokens"] == 24
    assert gateway.attributes["gen_ai.usage.input_tokens"] == 7

    load = _named(spans, "worker.load")[0]
    ancestors = _ancestors(spans, load)
    assert ancestors[-1] == "monitor:monitor.demand"
    assert "planner:planner.plan" in ancestors
    lease = [s for s in _named(spans, "pool.lease") if s.trace_id == load.trace_id]
    assert lease
    assert "planner:planner.plan" in _ancestors(spans, lease[0])
