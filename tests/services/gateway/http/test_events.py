"""``/admin/events``: who may read, what is in it, and how it ends. ``/ui``: the page's files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from services.gateway import feed as module
from services.gateway.core import watched_cluster
from services.gateway.core.watched_cluster import shown, without_paths
from shared import subjects
from shared.errors import NotPermitted
from shared.messages.live import LiveBatch, LiveReport
from shared.messages.load import LatencyReport, ModelLatencies, MovedRequests
from shared.messages.operations import HopRecord, ListScaleRecords, ScaleRecord, ScaleRecords, TargetRecord, Unplanned
from shared.messages.progress import ScaleProgress
from shared.messages.registry import GetGpuTime, GpuTimeReport, GpuUse
from tests.services.gateway.conftest import Stack, StackFactory
from tests.wait_until import WAIT_S, eventually

RECORD = ScaleRecord(
    plan_id="plan-1", model="tiny", status="running", direction="out", desired=2, reason="load",
    triggered_at_s=1.0, targets=(TargetRecord(worker_id="w1", instance_id="i"),),
    hops=(HopRecord(source="w0", source_kind="gpu", target="w1"),),
)  # fmt: skip


FILES = sorted(f"/{file.name}" for file in (resources.files("services.gateway") / "ui").iterdir())


class Reader:
    """Follows the feed as a browser does."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.entities: dict[str, Any] = {}
        self.last_id = ""
        self.kinds: list[str] = []
        self.ended = False
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        kind = ""
        async for line in self.response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
                self.kinds.append(kind)
            elif name == "id":
                self.last_id = value
            elif name == "data":
                found = json.loads(value)
                self.entities = found["entities"] if kind == "snapshot" else self.entities | found["changed"]
                for gone in found.get("gone", ()):
                    self.entities.pop(gone, None)
        self.ended = True


@asynccontextmanager
async def reading(stack: Stack, **headers: str) -> AsyncIterator[Reader]:
    async with stack.http.stream("GET", "/admin/events", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        reader = Reader(response)
        try:
            yield reader
        finally:
            reader.task.cancel()
            await asyncio.gather(reader.task, return_exceptions=True)


async def planner(stack: Stack) -> None:
    async def records(_: ListScaleRecords) -> ScaleRecords:
        lack = Unplanned(model="tiny", role="colocated", wanted=3, why="no worker is spare", for_s=2.0)
        return ScaleRecords(records=(RECORD,), unplanned=(lack,))

    await stack.broker.bus("planner").respond(subjects.planner("records"), ListScaleRecords, records)


async def test_it_shows_the_registry_and_an_operation_as_it_happens(make_stack: StackFactory) -> None:
    stack = await make_stack(2)
    await planner(stack)
    async with reading(stack) as reader:
        await eventually(lambda: {"worker/w1", "model/tiny", "operation/plan-1"} <= reader.entities.keys())
        assert reader.entities["worker/w0"]["model"] == "tiny"
        assert reader.entities["model/tiny"]["states"] == {"colocated serving": 2}
        assert reader.entities["cluster/now"]["silent"] == []
        assert reader.entities["operation/plan-1"]["hops"] == [
            {"source": "w0", "source_kind": "gpu", "target": "w1", "share": 1.0}
        ]
        assert reader.entities["unplanned/tiny/colocated"]["why"] == "no worker is spare"
        events = [("accepted", -1, 0), ("layer_ready", 0, 100), ("layer_ready", 1, 250)]
        for number, (event, layer, received) in enumerate(events):
            message = ScaleProgress(
                plan_id="plan-1", worker_id="w1", instance_id="i", event=event, after_s=number / 10,  # type: ignore[arg-type]
                layer=layer, received_bytes=received,
            )  # fmt: skip
            await stack.broker.bus("w1").publish(subjects.progress(), message)
        await eventually(lambda: reader.entities.get("load/plan-1/w1", {}).get("layers") == 2)
        load = reader.entities["load/plan-1/w1"]
        assert (load["bytes"], load["after_s"], load["event"]) == (250, 0.2, "layer_ready")
    assert reader.kinds[0] == "snapshot"


async def test_it_shows_what_moved_and_whose_the_gpus_were(make_stack: StackFactory) -> None:
    stack = await make_stack(1)

    async def gpu_time(_: GetGpuTime) -> GpuTimeReport:
        uses = (GpuUse(model="tiny", state="serving", seconds=1800.0), GpuUse(model="", state="idle", seconds=3600.0))
        return GpuTimeReport(counted_s=5400.0, total_s=5400.0, hour_cost=2.5, uses=uses)

    await stack.broker.bus("pool").respond(subjects.pool("gpu_time"), GetGpuTime, gpu_time)
    async with reading(stack) as reader:
        await eventually(lambda: "gpu_time/tiny" in reader.entities)
        assert reader.entities["gpu_time/tiny"] == {
            "model": "tiny",
            "seconds": {"serving": 1800.0},
            "share": 0.3333,
            "cost": 1.25,
        }
        assert reader.entities["gpu_time/"] == {"model": "", "seconds": {"idle": 3600.0}, "share": 0.6667, "cost": 2.5}
        moves = (MovedRequests(model="tiny", source="w0", target="w1", requests=2),)
        for gateway_id in ("g1", "g2"):
            told = LatencyReport(gateway_id=gateway_id, models=(), moves=moves)
            await stack.broker.bus(gateway_id).publish(subjects.latencies(), told)
        await eventually(lambda: reader.entities.get("move/tiny/w0/w1", {}).get("requests") == 4)
        assert reader.entities["move/tiny/w0/w1"]["from"] == "w0"


async def test_a_reader_that_comes_back_gets_only_what_it_missed(make_stack: StackFactory) -> None:
    stack = await make_stack(1)
    async with reading(stack) as stays:
        async with reading(stack) as reader:
            await eventually(lambda: reader.last_id)
        stack.workers[0].state = "draining"
        await stays_seen(stays)
        async with reading(stack, **{"Last-Event-ID": reader.last_id}) as again:
            await eventually(lambda: again.kinds)
            assert set(again.kinds) == {"frame"}


async def stays_seen(reader: Reader) -> None:
    await eventually(lambda: reader.entities.get("worker/w0", {}).get("state") == "draining")


async def test_without_readers_nothing_is_asked_or_heard(make_stack: StackFactory) -> None:
    stack = await make_stack(1)
    assert not any(listener.subject == subjects.progress() for listener in stack.broker.listeners)
    async with reading(stack) as reader:
        await eventually(lambda: reader.kinds)
        assert any(listener.subject == subjects.progress() for listener in stack.broker.listeners)
    await eventually(lambda: not any(x.subject == subjects.progress() for x in stack.broker.listeners))


async def test_who_comes_as_the_last_one_leaves_sees_everything(make_stack: StackFactory) -> None:
    stack = await make_stack(2)
    for _ in range(5):
        async with reading(stack) as reader:
            await eventually(lambda reader=reader: {"worker/w0", "worker/w1"} <= reader.entities.keys())
    async with reading(stack) as reader:
        await eventually(lambda: {"worker/w0", "worker/w1", "model/tiny"} <= reader.entities.keys())
        await asyncio.sleep(0.5)
        assert {"worker/w0", "worker/w1", "model/tiny"} <= reader.entities.keys()
        assert reader.kinds.count("snapshot") == 1


async def test_who_is_silent_is_named(make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECORDS_TIMEOUT_S", 0.1)
    stack = await make_stack(1)
    async with reading(stack) as reader:
        await eventually(lambda: reader.entities.get("cluster/now", {}).get("silent") == ["planner"])


async def test_a_feed_that_cannot_be_made_is_made_later_for_those_who_wait(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.05)
    stack = await make_stack(1)
    subscribe, failures = stack.bus.subscribe, [NotPermitted("not now"), ZeroDivisionError("a fault")]

    async def failing(subject: str, *rest: Any) -> Any:
        if failures and subject == subjects.progress():
            raise failures.pop()
        return await subscribe(subject, *rest)

    monkeypatch.setattr(stack.bus, "subscribe", failing)
    async with reading(stack) as reader:
        await eventually(lambda: "model/tiny" in reader.entities)
    assert failures == []


async def test_where_the_pool_is_silent_that_is_what_is_seen(make_stack: StackFactory) -> None:
    stack = await make_stack(1)
    stack.broker.responders[:] = [r for r in stack.broker.responders if r.subject != subjects.pool("snapshot")]
    async with reading(stack) as reader:
        await eventually(lambda: "pool" in reader.entities.get("cluster/now", {}).get("silent", ()))


async def test_one_reader_too_many_is_refused(make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READERS", 1)
    stack = await make_stack(1)
    async with reading(stack) as reader:
        await eventually(lambda: reader.kinds)
        refused = await stack.http.get("/admin/events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    async with asyncio.timeout(WAIT_S):
        while True:
            async with stack.http.stream("GET", "/admin/events") as response:
                if response.status_code == 200:
                    break


async def test_a_gateway_that_drains_ends_its_feeds_at_once(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMENT_EVERY_S", 3600.0)
    stack = await make_stack(1)
    async with reading(stack) as reader:
        await eventually(lambda: reader.kinds)
        await stack.gateway.drain()
        await eventually(lambda: reader.ended)
        refused = await stack.http.get("/admin/events")
        assert refused.status_code == 503


async def test_many_workers_are_counted_and_those_of_an_operation_are_shown(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_cluster, "MAX_WORKERS", 2)
    stack = await make_stack(4)
    await planner(stack)
    async with reading(stack) as reader:
        await eventually(lambda: {n for n in reader.entities if n.startswith("worker/")} == {"worker/w0", "worker/w1"})
        assert reader.entities["cluster/now"]["summarised"] is True
        assert reader.entities["cluster/now"]["workers"] == 4


async def test_it_wants_the_admin_key_where_there_is_one(make_stack: StackFactory) -> None:
    stack = await make_stack(1, admin_keys=("secret",))
    assert (await stack.http.get("/admin/events")).status_code == 401
    assert (await stack.http.get("/admin/events?key=secret")).status_code == 401
    async with reading(stack, Authorization="Bearer secret") as reader:
        await eventually(lambda: reader.kinds)


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Host": "evil.example"}])
async def test_pages_of_other_sites_are_refused(make_stack: StackFactory, headers: dict[str, str]) -> None:
    stack = await make_stack(1)
    assert (await stack.http.get("/admin/events", headers=headers)).status_code == 403


@pytest.mark.parametrize("name", ["", *FILES])
async def test_the_page_may_load_and_run_nothing_but_its_own_files(make_stack: StackFactory, name: str) -> None:
    stack = await make_stack(1, admin_keys=("secret",))
    page = await stack.http.get(f"/ui{name}")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["cache-control"] == "no-store"
    # Nothing that the policy would stop, and nothing that turns text into markup.
    for forbidden in (
        "innerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "http://",
        "https://",
        "onclick=",
        "style=",
    ):
        assert forbidden not in page.text.replace("http://www.w3.org/2000/svg", ""), forbidden


async def test_who_opens_the_address_comes_to_the_page(make_stack: StackFactory) -> None:
    stack = await make_stack(1)
    answer = await stack.http.get("/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/ui")


@pytest.mark.parametrize("name", ["none.js", "%2e%2e/service.py", "..%2fservice.py", ".", "index.html.bak"])
async def test_only_the_pages_files_are_served(make_stack: StackFactory, name: str) -> None:
    stack = await make_stack(1)
    assert (await stack.http.get(f"/ui/{name}")).status_code in (404, 200 if name == "." else 404)


async def test_who_holds_a_key_that_is_taken_back_is_cut_off(make_stack: StackFactory, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old\nnew\n")
    keys.chmod(0o600)
    stack = await make_stack(1, admin_keys_file=str(keys))
    async with (
        reading(stack, Authorization="Bearer old") as reader,
        reading(stack, Authorization="Bearer new") as another,
    ):
        await eventually(lambda: reader.kinds and another.kinds)
        keys.write_text("new\n")
        await stack.gateway.admin_keys.look()
        await eventually(lambda: reader.ended)
        assert not another.ended


async def test_it_has_the_latencies_of_all_gateways_and_the_batches_of_pairs(make_stack: StackFactory) -> None:
    stack = await make_stack(1)
    async with reading(stack) as reader:
        await eventually(lambda: reader.kinds)
        for gateway_id in ("g1", "g2"):
            latencies = ModelLatencies(model="tiny", tokens=105, ttft=(0, 0, 0, 5), tbt=(100,))
            report = LatencyReport(gateway_id=gateway_id, models=(latencies,))
            await stack.broker.bus(gateway_id).publish(subjects.latencies(), report)
        await eventually(lambda: reader.entities["model/tiny"].get("tokens_per_s") == 21.0)
        assert 5.0 < reader.entities["model/tiny"]["ttft_p50_ms"] <= 10.0
        assert reader.entities["model/tiny"]["tbt_p99_ms"] <= 1.0
        batch = LiveBatch(
            batch_id="b", num_requests=1, num_tokens=40, target_layers=3, source_layers=1, first_token_ago_s=0.1
        )
        pair = LiveReport(
            pair_id="pair-1", plan_id="plan-1", source="w0", target="w1", policy="zigzag", outcome="running",
            reason="", started_ago_s=1.0, batches=(batch, batch),
        )  # fmt: skip
        for _ in range(2):
            await stack.broker.bus("w0").publish(subjects.live_reports(), pair)
        await eventually(lambda: reader.entities.get("pair/plan-1/pair-1", {}).get("batches") == 4)
        ended = msgspec.structs.replace(pair, outcome="dissolved", batches=(batch,) * 50)
        await stack.broker.bus("w0").publish(subjects.live_reports(), ended)
        await eventually(lambda: reader.entities["pair/plan-1/pair-1"]["outcome"] == "dissolved")
        assert reader.entities["pair/plan-1/pair-1"]["batches"] == 50
        assert reader.entities["pair/plan-1/pair-1"]["recent"] == [[40, 3, 1]] * watched_cluster.MAX_RECENT_BATCHES


def test_paths_are_left_out() -> None:
    assert without_paths("cannot read '/srv/my models/a.bin', file:///srv/b/c.bin") == "cannot read '…/a.bin', …/c.bin"
    assert without_paths("cannot read /srv/models/a/model.safetensors: gone") == "cannot read …/model.safetensors: gone"
    assert without_paths("org/model at 3/4, see https://x.example/a/b") == "org/model at 3/4, see https://x.example/a/b"
    failed = TargetRecord(worker_id="w", instance_id="i", failure='open("/data/m/x.json") failed\n/srv/models/y/z.bin')
    record = ScaleRecord(
        plan_id="p", model="org/m", status="failed", direction="out", desired=1, reason="r", triggered_at_s=0.0,
        targets=(failed,),
    )  # fmt: skip
    found = json.loads(bytes(shown(record)))
    assert found["targets"][0]["failure"] == 'open("…/x.json") failed\n…/z.bin'
    assert found["model"] == "org/m"
