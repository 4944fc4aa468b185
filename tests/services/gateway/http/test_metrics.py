from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.http.prompts import PromptMaker
from services.gateway.metrics import GatewayMetrics, Histogram
from shared import subjects
from shared.messages.load import LoadReport
from tests.processes import INCARNATION, process
from tests.services.gateway.cluster import FakeWorker, say
from tests.services.gateway.conftest import Stack, StackFactory


async def scrape(stack: Stack) -> dict[str, float]:
    text = (await stack.http.get("/metrics")).text
    return {m[1]: float(m[2]) for m in re.finditer(r"^([^#\s]+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)}


async def test_requests_show_up_under_vllms_names(stack: Stack) -> None:
    stack.workers[0].script = say("abcd")
    await stack.openai.completions.create(model="tiny", prompt="xy", max_tokens=10)
    await stack.openai.completions.create(model="tiny", prompt="xy", max_tokens=2)
    values = await scrape(stack)
    label = '{model_name="tiny"}'
    assert values["vllm:prompt_tokens_total" + label] == 6
    assert values["vllm:generation_tokens_total" + label] == 6
    assert values['vllm:request_success_total{finished_reason="stop",model_name="tiny"}'] == 1
    assert values['vllm:request_success_total{finished_reason="length",model_name="tiny"}'] == 1
    assert values["vllm:time_to_first_token_seconds_count" + label] == 2
    assert values["vllm:inter_token_latency_seconds_count" + label] == 4
    assert values["vllm:e2e_request_latency_seconds_count" + label] == 2
    assert values['blitz_gateway_http_responses_total{route="/v1/completions",status="200"}'] == 2


async def test_each_gateway_shows_its_own_requests_whatever_the_instances_have_of_others(
    make_stack: StackFactory,
) -> None:
    stack = await make_stack(1)
    worker = stack.workers[0]
    worker.max_running, worker.pause_after = 2, 1
    await stack.gateway.refresh()
    report = LoadReport(
        worker_id="w0", incarnation=INCARNATION,
        instance_id="w0-i", model="tiny", state="serving", role="colocated",
        queued_requests=20, queued_tokens=9, running_requests=30, running_tokens=30, prefill_tokens_total=0,
        decode_tokens_total=0, busy_s_total=0.0, kv_blocks_total=10, kv_blocks_used=4, kv_block_tokens=16,
    )  # fmt: skip
    await worker.bus.publish(subjects.load(), report)
    await stack.until(lambda: len(stack.gateway.load_gauges))

    async def gauges() -> dict[str, float]:
        values = await scrape(stack)
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "blitz_gateway_queued_requests")
        return {name: values[name + '{model_name="tiny"}'] for name in names}

    def ask() -> asyncio.Task[Any]:
        return asyncio.create_task(stack.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"}))

    assert list((await gauges()).values()) == [0, 0, 0]
    asking = [ask()]
    await stack.until(lambda: worker.submits)
    await stack.received(1)
    worker.pause_after = 0
    asking += [ask(), ask()]
    await stack.until(lambda: len(worker.submits) == 2 and stack.gateway.dispatcher.num_active == 3)
    # One has a token, one waits for its first at the instance, and one here.
    assert list((await gauges()).values()) == [1, 2, 1]
    assert await waiting(stack) == {"full": 1, "at_instance": 1}
    worker.resume.set()
    await asyncio.gather(*asking)
    assert list((await gauges()).values()) == [0, 0, 0]


async def waiting(stack: Stack) -> dict[str, float]:
    """By reason; they add up, whatever they are."""
    values = await scrape(stack)
    series = re.compile(r'blitz_gateway_waiting_requests\{model_name="tiny",reason="(\w+)"\}')
    found = {match[1]: value for name, value in values.items() if (match := series.fullmatch(name))}
    assert sum(found.values()) == values['vllm:num_requests_waiting{model_name="tiny"}']
    return {reason: number for reason, number in found.items() if number}


async def test_why_requests_wait_is_shown(make_stack: StackFactory) -> None:
    stack = await make_stack(0)
    pool = stack.pool

    async def reason() -> dict[str, float]:
        await stack.gateway.refresh()
        return await waiting(stack)

    asking = asyncio.create_task(stack.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"}))
    await stack.until(lambda: stack.gateway.dispatcher.num_active)
    assert await reason() == {"no_instance": 1}
    pool.workers.append(FakeWorker(stack.broker, "w9", state="loading", arena_bytes=1 << 40, kv_bytes=1 << 40))
    assert await reason() == {"starting": 1}
    pool.models = []
    await stack.gateway.refresh()
    assert (await asking).status_code == 404


async def test_openmetrics_is_for_those_who_accept_it_and_names_traces_that_are_kept(stack: Stack) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    for kept in ("01", "00"):
        other = trace_id if kept == "01" else trace_id[::-1]
        headers = {"traceparent": f"00-{other}-b7ad6b7169203331-{kept}"}
        ask = {"model": "tiny", "prompt": "xy", "max_tokens": 2}
        assert (await stack.http.post("/v1/completions", json=ask, headers=headers)).status_code == 200
    plain = await stack.http.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    assert "trace_id" not in plain.text
    assert "EOF" not in plain.text
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    answer = await stack.http.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in openmetrics_families(answer.text)}
    names = {sample.name for family in families.values() for sample in family.samples}
    assert {sample.name for family in text_string_to_metric_families(plain.text) for sample in family.samples} == names
    for name in ("vllm:time_to_first_token_seconds", "blitz_gateway_time_to_first_token_seconds"):
        [exemplar] = [sample.exemplar for sample in families[name].samples if sample.exemplar]
        assert exemplar.labels == {"trace_id": trace_id}
        assert 0 < exemplar.value < float(exemplar.timestamp)


async def test_what_was_counted_of_a_model_goes_with_it_and_not_before_its_last_request_ended(stack: Stack) -> None:
    worker = stack.workers[0]
    worker.pause_after = 1
    running = asyncio.create_task(stack.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"}))
    await stack.until(lambda: worker.submits)
    await stack.received(1)
    assert any('model_name="tiny"' in series for series in await scrape(stack))
    assert (await stack.http.delete("/admin/models/tiny")).status_code == 200
    assert not any('model_name="tiny"' in series for series in await scrape(stack))
    worker.resume.set()
    assert (await running).status_code == 200
    await worker.send(process("gw-test"), worker.part(worker.submits[0], 0, [1]))
    assert not any('model_name="tiny"' in series for series in await scrape(stack))


async def test_a_model_whose_weights_changed_keeps_its_counters(stack: Stack) -> None:
    ask = {"model": "tiny", "prompt": "xy"}
    assert (await stack.http.post("/v1/completions", json=ask)).status_code == 200
    stack.pool.models[0] = msgspec.structs.replace(stack.pool.models[0], model_hash="other")
    await stack.gateway.refresh()
    assert (await stack.http.post("/v1/completions", json=ask)).status_code == 200
    assert (await scrape(stack))['vllm:prompt_tokens_total{model_name="tiny"}'] == 6


async def test_refused_requests_are_neither_prompt_tokens_nor_aborts(make_stack: StackFactory) -> None:
    stack = await make_stack(1, max_queued_requests=1)
    worker = stack.workers[0]
    worker.max_running = 1
    worker.pause_after = 1
    await stack.gateway.refresh()
    one = {"model": "tiny", "prompt": [1, 2, 3]}
    # The queue has room for one of these three.
    three = {"model": "tiny", "prompt": [[1, 2, 3, 4]] * 3}
    running = asyncio.create_task(stack.http.post("/v1/completions", json=one))
    await stack.until(lambda: worker.submits)
    assert (await stack.http.post("/v1/completions", json=three)).status_code == 429
    assert stack.gateway.dispatcher.num_active == 1
    worker.resume.set()
    assert (await running).status_code == 200
    values = await scrape(stack)
    assert values['vllm:prompt_tokens_total{model_name="tiny"}'] == 3
    finished = {key: value for key, value in values.items() if key.startswith("vllm:request_success_total")}
    assert finished == {'vllm:request_success_total{finished_reason="stop",model_name="tiny"}': 1}


async def test_a_model_removed_while_its_prompt_is_tokenized_is_404_and_not_counted(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = PromptMaker.encode

    async def slow(*arguments: Any, **keywords: Any) -> list[tuple[int, ...]]:
        stack.pool.models = []
        await stack.gateway.refresh()
        return await encode(*arguments, **keywords)

    monkeypatch.setattr(PromptMaker, "encode", slow)
    response = await stack.http.post("/v1/completions", json={"model": "tiny", "prompt": "xy"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    values = await scrape(stack)
    assert not any(key.startswith("vllm:request_success_total") for key in values)
    assert not values.get('vllm:prompt_tokens_total{model_name="tiny"}')


async def test_raw_paths_never_become_labels(stack: Stack) -> None:
    await stack.http.get("/secret-path")
    await stack.http.get("/v1/models/tiny")
    text = (await stack.http.get("/metrics")).text
    assert "secret-path" not in text
    assert 'route="unmatched",status="404"' in text
    assert "models/tiny" not in text


def test_histogram_buckets_are_cumulative_and_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == ([("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)], 12.0)


async def test_scrapes_at_once_share_their_rendering_and_see_what_was_before_them(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[bool] = []
    families = GatewayMetrics.families

    def noted(self: GatewayMetrics, gauges: Any) -> Any:
        rendered.append(threading.current_thread() is threading.main_thread())
        return families(self, gauges)

    monkeypatch.setattr(GatewayMetrics, "families", noted)

    async def scrape_after(number: int) -> float:
        stack.gateway.metrics.count_cut("test")
        before = stack.gateway.metrics.cuts["test"]
        return (await scrape(stack))['blitz_gateway_cut_off_total{reason="test"}'] - before

    assert min(await asyncio.gather(*(scrape_after(number) for number in range(20)))) >= 0
    assert not any(rendered)
    assert len(rendered) < 20


async def test_what_is_scraped_is_prometheus_text(stack: Stack) -> None:
    odd_name = 'a"b\\c\nd'
    stack.gateway.routes.models[odd_name] = stack.gateway.routes.models["tiny"]
    stack.gateway.metrics.of('a"b\\c\nd').ttft_s.observe(0.002)
    await stack.openai.completions.create(model="tiny", prompt="xy", max_tokens=2)
    text = (await stack.http.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    histogram = families["vllm:time_to_first_token_seconds"]
    assert (histogram.type, histogram.documentation) == ("histogram", "Arrival to first token.")
    odd = [sample for sample in histogram.samples if sample.labels["model_name"] == 'a"b\\c\nd']
    assert [sample.value for sample in odd if sample.labels.get("le") in ("0.001", "0.0025", "+Inf")] == [0, 1, 1]
    assert [sample.value for sample in odd if sample.name.endswith(("_count", "_sum"))] == [1, 0.002]
