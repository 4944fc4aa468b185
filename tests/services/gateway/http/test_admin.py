from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from compose import admin as admin_client
from services.gateway.http import admin
from shared import subjects
from shared.errors import ModelNotFound, PlanNotFound, Unavailable
from shared.messages.codec import Message
from shared.messages.load import LoadReport
from shared.messages.operations import GetScaleRecord, ListScaleRecords, ScaleRecord, ScaleRecords, StartScale
from shared.messages.registry import AddModel, GetGpuTime, GpuTimeReport, GpuUse, SetModel
from shared.messages.traffic import CarriedBytes, GetTraffic, WorkerTraffic
from tests.processes import INCARNATION, process
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.http.test_refusals import check
from tests.wait_until import WAIT_S

RECORD = ScaleRecord(
    plan_id="p1", model="tiny", status="running", direction="out", desired=2, reason="manual", triggered_at_s=1.0
)


async def planner(stack: Stack) -> list[Any]:
    """A planner that knows one operation; returns what it was asked."""
    asked: list[Any] = []
    bus = stack.broker.bus("planner")

    async def scale(message: StartScale) -> ScaleRecord:
        asked.append(message)
        return RECORD

    async def record(message: GetScaleRecord) -> ScaleRecord:
        asked.append(message)
        if message.plan_id != "p1":
            raise PlanNotFound(f"no scale operation {message.plan_id!r}")
        return RECORD

    async def records(message: ListScaleRecords) -> ScaleRecords:
        asked.append(message)
        return ScaleRecords(records=(RECORD,))

    await bus.respond(subjects.planner("scale"), StartScale, scale)
    await bus.respond(subjects.planner("record"), GetScaleRecord, record)
    await bus.respond(subjects.planner("records"), ListScaleRecords, records)
    return asked


async def test_status_shows_models_instances_and_workers_of_all_pages(make_stack: StackFactory) -> None:
    stack = await make_stack(5)
    status = (await stack.http.get("/admin/status")).json()
    assert [w["id"] for w in status["workers"]] == ["w0", "w1", "w2", "w3", "w4"]
    assert len(status["instances"]) == 5
    assert status["instances"][0] == {
        "id": "w0-i", "model": "tiny", "state": "serving", "role": "colocated", "workers": ["w0"],
        "layers_ready": 1, "weights_digest": "d", "copy": "there", "epoch": 1, "plan_id": "",
        "context_tokens": 256, "max_running_requests": 64, "load": None,
    }  # fmt: skip
    [model] = status["models"]
    assert (model["name"], model["instances"], model["weights_bytes"], model["model_hash"]) == ("tiny", 5, 1000, "hash")
    assert status["floors"] == []
    assert (await stack.http.get("/admin/models")).json() == {"models": status["models"]}


async def test_traffic_is_asked_of_the_workers_and_those_that_do_not_answer_are_named(make_stack: StackFactory) -> None:
    stack = await make_stack(2)
    kv = CarriedBytes(direction="sent", purpose="kv", way="network", num_bytes=7)

    async def answer(_: GetTraffic) -> WorkerTraffic:
        return WorkerTraffic(worker_id="w1", incarnation="i", carried=(kv,))

    await stack.broker.bus("w1").respond(subjects.worker_traffic(process("w1")), GetTraffic, answer)
    [worker] = (traffic := (await stack.http.get("/admin/traffic")).json())["workers"]
    assert (worker["worker_id"], worker["incarnation"]) == ("w1", "i")
    assert worker["carried"] == [{"direction": "sent", "purpose": "kv", "way": "network", "num_bytes": 7}]
    assert traffic["silent"] == ["w0"]


async def test_what_gpus_were_for_is_asked_of_the_pool(stack: Stack) -> None:
    use = GpuUse(model="tiny", state="serving", seconds=5.0)

    async def answer(request: GetGpuTime) -> GpuTimeReport:
        if request.model not in ("", "tiny"):
            raise ModelNotFound(f"model {request.model!r} is not registered")
        return GpuTimeReport(counted_s=3.0, total_s=9.0, hour_cost=2.0, uses=(use,))

    unanswered = await stack.http.get("/admin/gpu_time")
    assert "no pool answers" in check(unanswered, 503, "server_error", "no_responder")
    await stack.broker.bus("pool-2").respond(subjects.pool("gpu_time"), GetGpuTime, answer)
    found = (await stack.http.get("/admin/gpu_time?model=tiny")).json()
    assert (found["total_s"], found["hour_cost"], found["uses"]) == (9.0, 2.0, [msgspec.structs.asdict(use)])
    check(await stack.http.get("/admin/gpu_time?model=none"), 404, "not_found_error", "model_not_found")


async def test_status_shows_live_instances_and_what_instances_have_to_do(make_stack: StackFactory) -> None:
    stack = await make_stack(2)
    stack.workers[1].state = "live"
    stack.pool.models[0] = msgspec.structs.replace(stack.pool.models[0], slo_ttft_s=0.5, slo_tbt_s=0.1)
    report = LoadReport(
        worker_id="w1", incarnation=INCARNATION,
        instance_id="w1-i", model="tiny", state="live", role="colocated",
        queued_requests=3, queued_tokens=700, running_requests=2, running_tokens=50, prefill_tokens_total=0,
        decode_tokens_total=0, busy_s_total=0.0, kv_blocks_total=10, kv_blocks_used=4, kv_block_tokens=16,
    )  # fmt: skip
    await stack.broker.bus("w1").publish(subjects.load(), report)
    await stack.until(lambda: len(stack.gateway.load_gauges))
    status = (await stack.http.get("/admin/status")).json()
    assert [(i["state"], i["load"]) for i in status["instances"]] == [
        ("serving", None),
        (
            "live",
            {
                "running_requests": 2,
                "queued_requests": 3,
                "queued_tokens": 700,
                "kv_blocks_used": 4,
                "kv_blocks_total": 10,
            },
        ),
    ]
    [model] = (await stack.http.get("/admin/models")).json()["models"]
    assert (model["serving"], model["live"], model["slo_ttft_s"], model["slo_tbt_s"]) == (1, 1, 0.5, 0.1)


async def test_the_pool_shows_which_memory_holds_which_model(make_stack: StackFactory) -> None:
    stack = await make_stack(5)
    pool = (await stack.http.get("/admin/pool")).json()
    [model] = pool["models"]
    assert [i["worker"] for i in model["instances"]] == ["w0", "w1", "w2", "w3", "w4"]
    assert model["invariant"] == "ok"


async def test_scaling_asks_the_planner_and_shows_its_record(stack: Stack) -> None:
    asked = await planner(stack)
    response = await stack.http.post("/admin/models/tiny/scale", json={"instances": 2, "hold_s": 30})
    assert response.status_code == 200
    assert (response.json()["plan_id"], response.json()["status"]) == ("p1", "running")
    assert (await stack.http.get("/admin/scale/p1?wait_s=1.5")).json()["plan_id"] == "p1"
    assert [r["plan_id"] for r in (await stack.http.get("/admin/scale?limit=3")).json()["records"]] == ["p1"]
    assert asked == [
        StartScale(model="tiny", instances=2, hold_s=30.0, live="auto"),
        GetScaleRecord(plan_id="p1", wait_s=1.5),
        ListScaleRecords(limit=3),
    ]


WRONG_CHOICES: list[Any] = [True, "", "maybe", 1, []]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/admin/models/tiny/scale", {}, "instances"),
        ("/admin/models/tiny/scale", {"instances": -1}, "instances"),
        ("/admin/models/tiny/scale", {"instances": "2"}, "instances"),
        ("/admin/models/tiny/scale", {"instances": 2, "hold_s": -1}, "hold_s"),
        *(("/admin/models/tiny/scale", {"instances": 2, "live": live}, "live") for live in WRONG_CHOICES),
        *(("/admin/models/tiny/scale", {"instances": 2, "role": role}, "role") for role in WRONG_CHOICES),
        *(
            ("/admin/models", {"path": "/m", param: slo_s}, param)
            for param in ("slo_ttft_s", "slo_tbt_s")
            for slo_s in (-0.5, 0, 1e-9, 3601, 10**400, "NaN", "0.5", "500ms", True, [0.5])
        ),
        *(
            ("/admin/models", {"path": "/m", "keep_alive_s": keep_alive_s}, "keep_alive_s")
            for keep_alive_s in (-1, 2_592_001, 10**400, "60", True, [60])
        ),
        *(
            ("/admin/models", {"path": "/m", "no_room_timeout_s": timeout_s}, "no_room_timeout_s")
            for timeout_s in (-1, 3601, 10**400, "60", "default", True, [60])
        ),
        ("/admin/models", {}, "path"),
        ("/admin/models", {"path": 1}, "path"),
        ("/admin/models", {"path": "/m", "min_instances": -1}, "min_instances"),
    ],
)
async def test_wrong_admin_bodies_name_the_parameter(stack: Stack, path: str, body: Any, param: str) -> None:
    response = await stack.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("live", ["auto", "always", "never", None])
async def test_whether_to_scale_live_is_the_planners_to_know(stack: Stack, live: str | None) -> None:
    asked = await planner(stack)
    body = {"instances": 2, "live": live}
    assert (await stack.http.post("/admin/models/tiny/scale", json=body)).status_code == 200
    assert [message.live for message in asked] == [live or "auto"]


@pytest.mark.parametrize("role", ["colocated", "prefill", "decode", None])
async def test_the_role_that_is_scaled_reaches_the_planner(stack: Stack, role: str | None) -> None:
    asked = await planner(stack)
    body = {"instances": 2, "role": role}
    assert (await stack.http.post("/admin/models/tiny/scale", json=body)).status_code == 200
    assert [message.role for message in asked] == [role or "colocated"]


@pytest.mark.parametrize(
    ("number", "param"), [("NaN", None), ("Infinity", None), ("-Infinity", None), ("1e999", "slo_ttft_s")]
)
async def test_numbers_that_json_does_not_have_are_refused(stack: Stack, number: str, param: str | None) -> None:
    body = f'{{"path": "/m", "slo_ttft_s": {number}}}'
    response = await stack.http.post("/admin/models", content=body, headers={"content-type": "application/json"})
    check(response, 400, "invalid_request_error", "bad_request", param)


async def test_a_models_objectives_reach_the_pool(stack: Stack) -> None:
    body = {"path": "/m", "slo_ttft_s": 0.5, "slo_tbt_s": 1}
    assert (await stack.http.post("/admin/models", json=body)).status_code == 200
    assert (await stack.http.post("/admin/models", json={"path": "/m", "slo_ttft_s": None})).status_code == 200
    assert stack.pool.added == [AddModel(path="/m", slo_ttft_s=0.5, slo_tbt_s=1.0), AddModel(path="/m")]


async def test_how_a_model_is_served_reaches_the_pool(stack: Stack) -> None:
    body = {"path": "/m", "served_as": "disaggregated", "weight": 0.5, "advise": True, "tool_parser": "hermes"}
    body["reasoning_parser"] = "qwen3"
    assert (await stack.http.post("/admin/models", json=body)).status_code == 200
    assert stack.pool.added == [
        AddModel(
            path="/m", serving="disaggregated", weight=0.5, advise=True, tool_parser="hermes", reasoning_parser="qwen3"
        )
    ]
    response = await stack.http.patch("/admin/models/tiny", json={"served_as": "colocated", "weight": 2})
    assert (response.json()["served_as"], response.json()["weight"]) == ("colocated", 2.0)
    assert stack.pool.changed == [SetModel(name="tiny", serving="colocated", weight=2.0)]
    [model] = (await stack.http.get("/admin/models")).json()["models"]
    assert (model["serving"], model["served_as"], model["weight"], model["advise"]) == (1, "colocated", 2.0, False)


async def test_a_model_with_a_keep_alive_need_not_keep_an_instance(stack: Stack) -> None:
    for least in ({}, {"min_instances": None}, {"min_instances": 0}, {"min_instances": 2}):
        body = {"path": "/m", "keep_alive_s": 60, **least}
        assert (await stack.http.post("/admin/models", json=body)).status_code == 200
    assert (await stack.http.post("/admin/models", json={"path": "/m", "keep_alive_s": 0})).status_code == 200
    sent = [(message.min_instances, message.keep_alive_s) for message in stack.pool.added]
    assert sent == [(0, 60.0), (0, 60.0), (0, 60.0), (2, 60.0), (1, 0.0)]


async def test_a_models_own_patience_reaches_the_pool_and_0_is_one(stack: Stack) -> None:
    for body in ({}, {"no_room_timeout_s": None}, {"no_room_timeout_s": 0}, {"no_room_timeout_s": 2.5}):
        assert (await stack.http.post("/admin/models", json={"path": "/m", **body})).status_code == 200
    assert [message.no_room_timeout_s for message in stack.pool.added] == [None, None, 0.0, 2.5]
    for timeout_s, shown in ((0, 0.0), (2.5, 2.5), ("default", None)):
        response = await stack.http.patch("/admin/models/tiny", json={"no_room_timeout_s": timeout_s})
        assert (response.status_code, response.json()["no_room_timeout_s"]) == (200, shown)
        assert stack.pool.changed[-1] == SetModel(name="tiny", no_room_timeout_s=timeout_s)
        assert stack.gateway.routes.models["tiny"].record.no_room_timeout_s == shown
        [model] = (await stack.http.get("/admin/models")).json()["models"]
        assert model["no_room_timeout_s"] == shown


async def test_what_is_given_of_a_models_settings_reaches_the_pool_and_shows_at_once(stack: Stack) -> None:
    body = {"min_instances": 0, "slo_ttft_s": 0, "slo_tbt_s": None, "keep_alive_s": 60}
    response = await stack.http.patch("/admin/models/tiny", json=body)
    assert response.status_code == 200
    assert (response.json()["name"], response.json()["keep_alive_s"]) == ("tiny", 60.0)
    assert stack.pool.changed == [SetModel(name="tiny", min_instances=0, slo_ttft_s=0.0, keep_alive_s=60.0)]
    assert stack.gateway.routes.models["tiny"].record.keep_alive_s == 60.0
    [model] = (await stack.http.get("/admin/models")).json()["models"]
    assert (model["min_instances"], model["keep_alive_s"]) == (0, 60.0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"min_instances": -1}, "min_instances"),
        ({"max_instances": -1}, "max_instances"),
        ({"max_instances": 1.5}, "max_instances"),
        ({"slo_ttft_s": -1}, "slo_ttft_s"),
        ({"slo_tbt_s": 3601}, "slo_tbt_s"),
        ({"keep_alive_s": 2_592_001}, "keep_alive_s"),
        ({"keep_alive_s": "60"}, "keep_alive_s"),
        ({"no_room_timeout_s": -0.5}, "no_room_timeout_s"),
        ({"no_room_timeout_s": 3601}, "no_room_timeout_s"),
        ({"no_room_timeout_s": "60"}, "no_room_timeout_s"),
        ({"no_room_timeout_s": True}, "no_room_timeout_s"),
        ({"served_as": "apart"}, "served_as"),
        ({"served_as": True}, "served_as"),
        ({"tool_parser": "qwen"}, "tool_parser"),
        ({"tool_parser": 1}, "tool_parser"),
        ({"reasoning_parser": "qwen"}, "reasoning_parser"),
        ({"reasoning_parser": False}, "reasoning_parser"),
        ({"weight": 0}, "weight"),
        ({"weight": -1}, "weight"),
        ({"weight": 1e7}, "weight"),
        ({"weight": "2"}, "weight"),
        ({"advise": 1}, "advise"),
        ([], None),
        ("x", None),
    ],
)
async def test_wrong_settings_name_the_parameter_and_do_not_reach_the_pool(
    stack: Stack, body: Any, param: str | None
) -> None:
    response = await stack.http.patch("/admin/models/tiny", json=body)
    check(response, 400, "invalid_request_error", "bad_request", param)
    assert stack.pool.changed == []


async def test_settings_of_an_unknown_model_are_a_404(stack: Stack) -> None:
    response = await stack.http.patch("/admin/models/no/such", json={"min_instances": 0})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert [message.name for message in stack.pool.changed] == ["no/such"]


async def test_a_worker_is_drained_and_used_again(stack: Stack) -> None:
    (worker,) = (await stack.http.get("/admin/workers")).json()["workers"]
    assert (worker["id"], worker["drain"]) == ("w0", "")
    for verb, lift in (("drain", False), ("undrain", True)):
        response = await stack.http.post(f"/admin/workers/w0/{verb}")
        assert (response.status_code, response.json()["id"]) == (200, "w0")
        assert (stack.pool.cordons[-1].worker_id, stack.pool.cordons[-1].lift) == ("w0", lift)
        missing = await stack.http.post(f"/admin/workers/w9/{verb}")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


async def test_admin_errors_are_typed(stack: Stack) -> None:
    await planner(stack)
    answers = {
        "/admin/scale/none": (404, "plan_not_found"),
        "/admin/scale/p1?wait_s=-1": (400, "bad_request"),
        "/admin/scale/p1?wait_s=nan": (400, "bad_request"),
        "/admin/scale?limit=0": (400, "bad_request"),
        f"/admin/scale?limit={'9' * 5000}": (400, "bad_request"),
    }
    for path, expected in answers.items():
        response = await stack.http.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == expected, path
    absent = await stack.http.post("/admin/models/none/scale", json={"instances": 1})
    assert (absent.status_code, absent.json()["error"]["code"]) == (404, "model_not_found")
    assert (await stack.http.delete("/admin/models/none")).status_code == 404


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/admin/models/tiny/scale"), ("GET", "/admin/scale"), ("GET", "/admin/scale/p1")]
)
async def test_what_is_asked_while_no_planner_leads_is_answered_by_the_next_one(
    stack: Stack, method: str, path: str
) -> None:
    bus, asked = stack.broker.bus("planner"), asyncio.Event()

    async def not_leading(message: Message) -> ScaleRecord:
        asked.set()
        raise Unavailable("this planner does not lead", retry_after_s=0.5)

    kinds = {"scale": StartScale, "record": GetScaleRecord, "records": ListScaleRecords}
    before = [await bus.respond(subjects.planner(verb), kind, not_leading) for verb, kind in kinds.items()]
    body = {"instances": 1} if method == "POST" else None
    asking = asyncio.create_task(stack.http.request(method, path, json=body))
    async with asyncio.timeout(WAIT_S):
        await asked.wait()
    for responder in before:
        await responder.close()
    await planner(stack)
    response = await asking
    assert response.status_code == 200, response.text


async def test_without_a_planner_scaling_is_unavailable(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "LEADER_WAIT_S", 0.3)
    response = await stack.http.post("/admin/models/tiny/scale", json={"instances": 1})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_responder")
    said = "no planner answers: nothing is scaled until one leads; requests are still served"
    assert response.json()["error"]["message"] == said


async def test_a_model_that_is_there_already_is_no_new_one(stack: Stack) -> None:
    first = await stack.http.post("/admin/models", json={"path": "/m", "name": "tiny"})
    assert first.status_code == 200, "the gateway knew it"
    assert first.json()["name"] == "tiny"


async def test_models_are_added_and_names_may_hold_slashes(stack: Stack) -> None:
    from msgspec.structs import replace

    stack.pool.models[0] = replace(stack.pool.models[0], name="org/tiny")
    response = await stack.http.post("/admin/models", json={"path": "/m", "name": "org/tiny", "max_instances": 3})
    assert (response.status_code, response.json()["name"]) == (201, "org/tiny")
    # The very next request finds it.
    answer = await stack.openai.completions.create(model="org/tiny", prompt="a")
    assert answer.choices[0].text == "hello"
    assert (await stack.openai.models.retrieve("org/tiny")).id == "org/tiny"
    asked = await planner(stack)
    for name in ("org/tiny", "org%2Ftiny"):
        response = await stack.http.post(f"/admin/models/{name}/scale", json={"instances": 1})
        assert response.status_code == 200
    assert [a.model for a in asked] == ["org/tiny"] * 2
    assert (await stack.http.delete("/admin/models/org/tiny")).status_code == 200
    assert AddModel(path="/m").min_instances == 1


async def test_adding_a_model_leaves_the_pool_time_to_read_it_all(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: dict[str, float] = {}
    request = stack.bus.request

    async def noted(subject: str, *arguments: Any, timeout_s: float) -> Any:
        waits[subject] = timeout_s
        return await request(subject, *arguments, timeout_s=timeout_s)

    monkeypatch.setattr(stack.bus, "request", noted)
    assert (await stack.http.post("/admin/models", json={"path": "/m"})).status_code == 200
    assert waits[subjects.pool("add_model")] >= 600
    # The client hears the gateway's own error rather than giving up before it.
    assert admin_client.ADD_TIMEOUT_S > admin.ADD_TIMEOUT_S


async def test_too_large_an_admin_body_is_413_declared_or_not(make_stack: StackFactory) -> None:
    stack = await make_stack(max_body_bytes=2000)
    body = msgspec.json.encode({"path": "x" * 3000})
    headers = {"content-type": "application/json"}
    response = await stack.http.post("/admin/models", content=body, headers=headers)
    check(response, 413, "invalid_request_error", "payload_too_large")
    # The answer comes once the limit is passed, though the body never ends.
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(stack.url).port)
    head = "POST /admin/models HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n{3000:x}\r\n{' ' * 3000}\r\n".encode())
    async with asyncio.timeout(WAIT_S):
        assert b" 413 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
async def test_an_admin_body_must_be_declared_as_json(stack: Stack, content_type: str | None) -> None:
    asked = await planner(stack)
    headers = {"content-type": content_type} if content_type else {}
    for path in ("/admin/models", "/admin/models/tiny/scale"):
        response = await stack.http.post(path, content=b'{"path": "/m", "instances": 1}', headers=headers)
        check(response, 415, "invalid_request_error", "unsupported_media_type")
    assert not asked
    declared = {"content-type": "Application/JSON; charset=utf-8"}
    response = await stack.http.post("/admin/models/tiny/scale", content=b'{"instances": 1}', headers=declared)
    assert response.status_code == 200


async def test_pages_of_other_sites_cannot_administrate_without_a_key(stack: Stack) -> None:
    for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
        model = "/admin/models/tiny"
        for method, path in (("GET", "/admin/status"), ("DELETE", model), ("PATCH", model), ("POST", "/admin/models")):
            response = await stack.http.request(method, path, headers=headers)
            check(response, 403, "permission_error", "forbidden")
    assert stack.pool.models
    # The API stays open to every page, as its key decides.
    assert (await stack.http.get("/v1/models", headers={"origin": "https://evil.example"})).status_code == 200
