"""API keys with limits: what clients see, what is counted, and how gateways share them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from services.gateway import watched_file
from services.gateway.api_keys import ApiKeys, shown_duration
from shared.settings import SettingsError
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.http.test_metrics import scrape

BODY: dict[str, Any] = {"model": "tiny", "prompt": [97, 98, 99], "max_tokens": 5}


def rewrite(path: str, text: str | None) -> None:
    if text is None:
        Path(path).unlink()
    else:
        Path(path).write_text(text)


def keys_file(folder: Path, *entries: dict[str, Any]) -> str:
    path = folder / "keys.json"
    path.write_text(json.dumps({"keys": entries}))
    return str(path)


def key(name: str, **limits: Any) -> dict[str, Any]:
    return {"name": name, "key": f"sk-{name}", **limits}


async def post(stack: Stack, name: str, body: dict[str, Any] = BODY, route: str = "completions") -> httpx.Response:
    return await stack.http.post(f"/v1/{route}", json=body, headers={"Authorization": f"Bearer sk-{name}"})


def stand_still(monkeypatch: pytest.MonkeyPatch, stack: Stack) -> None:
    """Time, for keys: nothing is replenished meanwhile."""
    now_s = time.monotonic()
    monkeypatch.setattr(stack.gateway.api_keys, "_clock", lambda: now_s)


def remaining(response: httpx.Response) -> tuple[str, str]:
    headers = response.headers
    return headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens"]


async def test_a_key_over_its_requests_gets_429_with_a_time_that_means_something(
    make_stack: StackFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = keys_file(tmp_path, key("a", requests_per_minute=2, tokens_per_minute=1000), key("b"))
    stack = await make_stack(1, keys_file=path)
    stand_still(monkeypatch, stack)
    first, second, third = [await post(stack, "a") for _ in range(3)]
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    assert remaining(first) == ("1", "992")
    assert remaining(second)[0] == "0"
    assert third.json()["error"]["code"] == "rate_limit_exceeded"
    assert third.json()["error"]["type"] == "rate_limit_error"
    assert "'a'" in third.json()["error"]["message"]
    assert "sk-a" not in third.text
    assert 28 <= int(third.headers["retry-after"]) <= 30
    assert third.headers["x-ratelimit-remaining-requests"] == "0"
    unlimited = await post(stack, "b")
    assert unlimited.status_code == 200
    assert "x-ratelimit-limit-requests" not in unlimited.headers


async def test_tokens_are_charged_with_max_tokens_and_corrected_by_what_was_used(
    make_stack: StackFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await make_stack(1, keys_file=keys_file(tmp_path, key("a", tokens_per_minute=100)))
    stand_still(monkeypatch, stack)
    stack.workers[0].pause_after = 1
    running = asyncio.create_task(post(stack, "a", {**BODY, "max_tokens": 90}))
    await stack.until(lambda: stack.workers[0].submits)
    refused = await post(stack, "a", {**BODY, "max_tokens": 50})
    assert refused.status_code == 429
    assert refused.headers["x-ratelimit-remaining-tokens"] == "7"
    stack.workers[0].resume.set()
    assert (await running).status_code == 200
    # Three tokens and "hello" took 8.
    assert (await post(stack, "a", {**BODY, "max_tokens": 85})).status_code == 200


async def test_requests_at_a_time_are_bounded_and_a_client_that_leaves_frees_its_place(
    make_stack: StackFactory, tmp_path: Path
) -> None:
    stack = await make_stack(1, keys_file=keys_file(tmp_path, key("a", max_concurrent_requests=2)))
    assert (await post(stack, "a", {**BODY, "prompt": ["a"] * 3})).status_code == 400
    stack.workers[0].pause_after = 1
    running = [asyncio.create_task(post(stack, "a")) for _ in range(2)]
    await stack.until(lambda: len(stack.workers[0].submits) == 2)
    refused = await post(stack, "a")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    running[0].cancel()
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 1)
    stack.workers[0].resume.set()
    assert (await post(stack, "a")).status_code == 200
    assert (await running[1]).status_code == 200


async def test_a_key_sees_and_uses_its_models_only(make_stack: StackFactory, tmp_path: Path) -> None:
    path = keys_file(tmp_path, key("a", models=["other"]), key("b", models=["tiny"]))
    stack = await make_stack(1, keys_file=path)
    refused = await post(stack, "a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert (await post(stack, "b")).status_code == 200
    for name, listed in (("a", []), ("b", ["tiny"])):
        headers = {"Authorization": f"Bearer sk-{name}"}
        models = (await stack.http.get("/v1/models", headers=headers)).json()["data"]
        assert [model["id"] for model in models] == listed
    assert (await stack.http.get("/v1/models/tiny", headers={"Authorization": "Bearer sk-a"})).status_code == 403


async def test_without_a_key_of_the_file_or_the_environment_nobody_comes_in(
    make_stack: StackFactory, tmp_path: Path
) -> None:
    stack = await make_stack(1, keys_file=keys_file(tmp_path), api_keys=("sk-plain",))
    assert (await post(stack, "other")).status_code == 401
    assert (await stack.http.post("/v1/completions", json=BODY)).status_code == 401
    assert (await post(stack, "plain")).status_code == 200
    [submit] = stack.workers[0].submits
    assert "sk-" not in submit.request_id


async def test_an_open_length_is_cut_to_what_the_key_may_use(make_stack: StackFactory, tmp_path: Path) -> None:
    stack = await make_stack(1, keys_file=keys_file(tmp_path, key("a", tokens_per_minute=60)))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    assert (await post(stack, "a", body, "chat/completions")).status_code == 200
    [submit] = stack.workers[0].submits
    assert len(submit.prompt_token_ids) + submit.sampling.max_tokens == 60
    too_long = await post(stack, "a", {**BODY, "max_tokens": 60})
    assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "max_tokens")


async def test_an_open_length_is_what_the_key_has_left(
    make_stack: StackFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await make_stack(1, keys_file=keys_file(tmp_path, key("a", tokens_per_minute=2000)))
    stand_still(monkeypatch, stack)
    [record] = stack.pool.models
    stack.pool.models[:] = [structs.replace(record, spec=structs.replace(record.spec, max_position=8000))]
    stack.workers[0].context_tokens = 8000
    await stack.gateway.refresh()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a" * 100}]}
    answers = [(await post(stack, "a", body, "chat/completions")).status_code for _ in range(12)]
    assert answers == [200] * 12
    submits = stack.workers[0].submits
    lengths = [len(submit.prompt_token_ids) + submit.sampling.max_tokens for submit in submits]
    # Each took its prompt and "hello".
    assert lengths == [2000 - number * (len(submits[0].prompt_token_ids) + 5) for number in range(12)]


async def test_a_key_with_too_little_left_for_an_open_length_waits(
    make_stack: StackFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await make_stack(1, keys_file=keys_file(tmp_path, key("a", tokens_per_minute=1000)))
    stand_still(monkeypatch, stack)
    stack.workers[0].pause_after = 1
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    running = [asyncio.create_task(post(stack, "a", {**body, "max_tokens": 200}, "chat/completions")) for _ in range(4)]
    await stack.until(lambda: len(stack.workers[0].submits) == 4)
    refused = await post(stack, "a", body, "chat/completions")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    stack.workers[0].resume.set()
    assert [(await task).status_code for task in running] == [200] * 4
    assert (await post(stack, "a", body, "chat/completions")).status_code == 200


async def test_a_key_that_goes_leaves_its_series_to_those_that_come(
    make_stack: StackFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.api_keys.MAX_LABELS", 2)
    monkeypatch.setattr(watched_file, "LOOK_EVERY_S", 3600.0)
    path = keys_file(tmp_path, *(key(name, requests_per_minute=1) for name in "ab"))
    stack = await make_stack(1, keys_file=path)
    stand_still(monkeypatch, stack)
    [worker] = stack.workers
    worker.pause_after = 1
    running = asyncio.create_task(post(stack, "a"))
    await stack.until(lambda: worker.submits)
    assert [(await post(stack, name)).status_code for name in "a"] == [429]
    for names in ("c", "cd"):
        keys_file(tmp_path, *(key(name) for name in names))
        await stack.gateway.api_keys.look()
    worker.resume.set()
    assert (await running).status_code == 200
    for name in "cd":
        assert (await post(stack, name)).status_code == 200
    series = {name: value for name, value in (await scrape(stack)).items() if "{key=" in name}
    assert {value for name, value in series.items() if 'key="a"' in name} == set()
    assert series['blitz_gateway_key_requests_total{key="c"}'] == 1
    assert series['blitz_gateway_key_requests_total{key="d"}'] == 1
    assert series['blitz_gateway_key_tokens_total{key="other",model_name="tiny"}'] == 8


async def test_a_file_that_changes_is_read_again_and_a_bad_one_changes_nothing(
    make_stack: StackFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_file, "LOOK_EVERY_S", 3600.0)  # never by itself, while the file is being written
    path = keys_file(tmp_path, key("a", requests_per_minute=1))
    stack = await make_stack(1, keys_file=path)
    stand_still(monkeypatch, stack)
    assert [(await post(stack, "a")).status_code for _ in range(2)] == [200, 429]
    rewrite(path, '{"keys": [{"name": "a", "key": "sk-a", "requests_per_minute": 0}]}')
    await stack.gateway.api_keys.look()
    assert (await post(stack, "a")).status_code == 429
    rewrite(path, None)
    await stack.gateway.api_keys.look()
    assert (await post(stack, "a")).status_code == 429
    keys_file(tmp_path, key("a", requests_per_minute=3), key("new"))
    await stack.gateway.api_keys.look()
    assert (await post(stack, "a")).status_code == 200
    assert (await post(stack, "new")).status_code == 200
    values = await scrape(stack)
    assert values['blitz_gateway_key_file_reads_total{outcome="bad"}'] == 2
    assert values['blitz_gateway_key_file_reads_total{outcome="ok"}'] == 2


def test_a_bad_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="BLITZ_GATEWAY_KEYS_FILE"):
        ApiKeys((), str(tmp_path / "none"), gateway_id="gw", incarnation="1")


async def test_metrics_name_keys_by_their_names_and_no_more_than_some(
    make_stack: StackFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.api_keys.MAX_LABELS", 2)
    path = keys_file(tmp_path, *(key(name, requests_per_minute=1) for name in "abcd"))
    stack = await make_stack(1, keys_file=path)
    stand_still(monkeypatch, stack)
    for name in "abcd":
        assert (await post(stack, name)).status_code == 200
    assert (await post(stack, "a")).status_code == 429
    values = await scrape(stack)
    requests = {name: value for name, value in values.items() if name.startswith("blitz_gateway_key_requests_total")}
    assert requests == {
        'blitz_gateway_key_requests_total{key="a"}': 1,
        'blitz_gateway_key_requests_total{key="b"}': 1,
        'blitz_gateway_key_requests_total{key="other"}': 2,
    }
    assert values['blitz_gateway_key_tokens_total{key="a",model_name="tiny"}'] == 8
    assert values['blitz_gateway_key_limited_total{key="a",limit="requests"}'] == 1
    assert values['blitz_gateway_key_open_requests{key="a"}'] == 0
    assert not any("sk-" in name for name in values)


async def test_tokens_of_keys_are_counted_by_model_within_bounds_and_go_with_the_model(
    make_stack: StackFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.api_keys.MAX_PAIRS", 2)
    stack = await make_stack(1, keys_file=keys_file(tmp_path, *(key(name) for name in "abc")))

    async def tokens() -> dict[str, float]:
        name = "blitz_gateway_key_tokens_total"
        return {series.removeprefix(name): n for series, n in (await scrape(stack)).items() if series.startswith(name)}

    for name in "abca":
        assert (await post(stack, name)).status_code == 200
    assert await tokens() == {
        '{key="a",model_name="tiny"}': 16,
        '{key="b",model_name="tiny"}': 8,
        '{key="other",model_name="tiny"}': 8,
    }
    [worker] = stack.workers
    worker.pause_after = 1
    num_submits = len(worker.submits)
    last = asyncio.create_task(post(stack, "b"))
    await stack.until(lambda: len(worker.submits) > num_submits)
    stack.pool.models = []
    await stack.gateway.refresh()
    worker.resume.set()
    assert (await last).status_code == 200
    assert await tokens() == {'{key="other",model_name="other"}': 8}, "its last request makes no series of its own"


async def test_gateways_share_a_keys_limit(
    make_stack: StackFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = keys_file(tmp_path, key("a", requests_per_minute=5))
    first = await make_stack(1, keys_file=path)
    second = await make_stack(
        0, broker=first.broker, record=first.pool.models[0], gateway_id="gw-other", keys_file=path
    )
    second.pool.workers.append(first.workers[0])
    await second.gateway.refresh()
    for stack in (first, second):
        stand_still(monkeypatch, stack)
    for _ in range(4):
        assert (await post(first, "a")).status_code == 200
    keys = second.gateway.api_keys
    await second.until(lambda: dict(keys.headers("a"))[b"x-ratelimit-remaining-requests"] == b"1")
    assert [(await post(second, "a")).status_code for _ in range(2)] == [200, 429]


async def test_keys_take_turns_at_an_instance(make_stack: StackFactory, tmp_path: Path) -> None:
    stack = await make_stack(1, keys_file=keys_file(tmp_path, key("a"), key("b")))
    [worker] = stack.workers
    worker.max_running, worker.pause_after = 1, 1
    await stack.gateway.refresh()
    order = []
    for name, prompt in (("a", [1]), ("a", [2]), ("a", [3]), ("b", [4])):
        order.append(asyncio.create_task(post(stack, name, {**BODY, "prompt": prompt})))
        active = len(order)
        await stack.until(lambda active=active: stack.gateway.dispatcher.num_active == active)
    worker.resume.set()
    assert [(await task).status_code for task in order] == [200] * 4
    assert [submit.prompt_token_ids for submit in worker.submits] == [(1,), (2,), (4,), (3,)]


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0ms"), (0.012, "12ms"), (1.5, "1.5s"), (360.0, "6m0s")])
def test_durations_are_written_as_clients_expect_them(seconds: float, text: str) -> None:
    assert shown_duration(seconds) == text
