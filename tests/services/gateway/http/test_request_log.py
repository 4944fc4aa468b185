"""One line per request, and the id by which it is found."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadRequest, Overloaded
from tests.services.gateway.cluster import say
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.http.test_metrics import scrape
from tests.services.gateway.http.test_rate_limits import key, keys_file
from tests.services.gateway.http.test_refusals import CHAT, MESSAGES, TEXT

BODY: dict[str, Any] = {"model": "tiny", "prompt": [97, 98, 99], "max_tokens": 5}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[dict[str, Any]]]:
    """The fields of the lines so far."""
    found: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if hasattr(record, "fields"):
                found.append(record.fields)

    caplog.set_level(logging.INFO)
    handler = Keep()
    logging.getLogger().addHandler(handler)
    yield found
    logging.getLogger().removeHandler(handler)


async def test_a_request_is_one_line_that_says_who_asked_for_what_and_what_it_took(
    make_stack: StackFactory, tmp_path: Path, lines: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    stack = await make_stack(1, keys_file=keys_file(tmp_path, key("a")))
    headers = {"Authorization": "Bearer sk-a", "x-request-id": "mine-1"}
    answer = await stack.http.post(TEXT, json=BODY, headers=headers)
    assert answer.headers["x-request-id"] == "mine-1"
    [line] = lines
    assert 0 <= line.pop("ttft_s") <= line.pop("took_s")
    assert line == {
        "request_id": "mine-1",
        "method": "POST",
        "route": TEXT,
        "status": 200,
        "response_id": answer.json()["id"],
        "key": "a",
        "model": "tiny",
        "instances": ["w0-i"],
        "prompt_tokens": 3,
        "output_tokens": 5,
        "finish": ["length"],
    }
    assert f"request_id=mine-1 method=POST route={TEXT} status=200" in caplog.text
    assert "sk-a" not in caplog.text


async def test_all_instances_that_had_a_request_are_in_its_line(
    make_stack: StackFactory, lines: list[dict[str, Any]]
) -> None:
    stack = await make_stack(2)
    stack.workers[0].refuse_with = Overloaded("full")
    assert (await stack.http.post(TEXT, json=BODY)).status_code == 200
    assert lines[-1]["instances"] == ["w0-i", "w1-i"]


async def test_early_refusals_have_an_id_and_a_line_too(make_stack: StackFactory, lines: list[dict[str, Any]]) -> None:
    stack = await make_stack(1, api_keys=("k",))
    bearer = {"Authorization": "Bearer k"}
    refused = [
        (await stack.http.post(TEXT, content=b"{"), 401, "unauthorized"),
        (await stack.http.post(TEXT, content=b"{", headers=bearer), 400, "bad_request"),
        (
            await stack.http.post(CHAT, json={"model": "x", "messages": MESSAGES}, headers=bearer),
            404,
            "model_not_found",
        ),
        (await stack.http.get("/nowhere", headers=bearer), 404, None),
    ]
    for (answer, status, code), line in zip(refused, lines, strict=True):
        assert (answer.status_code, line["status"], line.get("error")) == (status, status, code)
        assert line["request_id"] == answer.headers["x-request-id"]
        assert line["request_id"].startswith("req-")
    given = await stack.http.post(TEXT, content=b"{", headers={**bearer, "x-request-id": "a/b:c"})
    assert given.headers["x-request-id"] == "a/b:c"


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", "a\tb", "\xe4", '"', "a,b"])
async def test_an_id_that_cannot_be_shown_is_replaced(stack: Stack, given: str) -> None:
    answer = await stack.http.post(TEXT, json=BODY, headers={b"x-request-id": given.encode("latin-1")})
    assert answer.headers["x-request-id"] == answer.json()["id"]


async def test_probes_and_scrapes_are_no_lines(stack: Stack, lines: list[dict[str, Any]]) -> None:
    for path in ("/health", "/ready", "/live", "/metrics"):
        assert "x-request-id" in (await stack.http.get(path)).headers
    assert lines == []


async def test_who_polls_the_status_leaves_no_line_unless_refused(
    make_stack: StackFactory, lines: list[dict[str, Any]]
) -> None:
    stack = await make_stack(1, admin_keys=("a",))
    assert (await stack.http.get("/admin/status", headers={"Authorization": "Bearer a"})).status_code == 200
    assert lines == []
    assert (await stack.http.get("/admin/status")).status_code == 401
    assert [line["status"] for line in lines] == [401]


async def test_a_client_that_left_before_its_answer_is_499(stack: Stack, lines: list[dict[str, Any]]) -> None:
    stack.workers[0].pause_after = 0
    leaving = asyncio.create_task(stack.http.post(TEXT, json=BODY))
    await stack.until(lambda: stack.workers[0].submits)
    leaving.cancel()
    await stack.until(lambda: lines)
    assert (lines[0]["status"], lines[0]["finish"], lines[0]["output_tokens"]) == (499, ["abort"], 0)
    values = await scrape(stack)
    assert values[f'blitz_gateway_http_responses_total{{route="{TEXT}",status="499"}}'] == 1
    assert not any('status="0"' in name for name in values)


async def test_an_error_of_the_instance_is_in_the_line(stack: Stack, lines: list[dict[str, Any]]) -> None:
    stack.workers[0].refuse_with = BadRequest("the worker knows better")
    answer = await stack.http.post(TEXT, json=BODY)
    assert (answer.status_code, lines[0]["error"], lines[0]["instances"]) == (400, "bad_request", ["w0-i"])
    assert lines[0]["response_id"] == answer.headers["x-request-id"]


async def test_where_a_requests_time_went_is_exported_under_vllms_names(stack: Stack) -> None:
    stack.workers[0].script = say("abcd")
    await stack.http.post(TEXT, json={**BODY, "max_tokens": 10})
    await stack.http.post(TEXT, json={**BODY, "max_tokens": 2})
    values = await scrape(stack)
    label = '{model_name="tiny"}'
    assert values["vllm:request_prompt_tokens_sum" + label] == 6
    assert values["vllm:request_generation_tokens_sum" + label] == 6
    assert values['vllm:request_generation_tokens_bucket{le="2.0",model_name="tiny"}'] == 1
    parts = 0.0
    for name in ("queue", "prefill", "decode"):
        assert values[f"vllm:request_{name}_time_seconds_count" + label] == 2
        assert values[f"vllm:request_{name}_time_seconds_sum" + label] >= 0
        parts += values[f"vllm:request_{name}_time_seconds_sum" + label]
    assert parts == pytest.approx(values["vllm:e2e_request_latency_seconds_sum" + label])
