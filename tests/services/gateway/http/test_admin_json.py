"""What ``/admin`` answers, to the byte: programs of others read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.http.status import pool_of, status_of
from shared.messages.load import LoadReport
from shared.messages.operations import Advice, RefusedLoad, ScaleRecords, Unplanned
from shared.messages.registry import Floor, HostCopy, Unplaced
from shared.registry import RegistryView
from tests.processes import INCARNATION
from tests.records import model, view, worker_record

GOLDEN = Path(__file__).parent / "golden"
M, OLD = model("m", slo_ttft_s=0.5, max_instances=3), model("old")


def registry() -> RegistryView:
    copy = HostCopy(model="m", model_hash=M.model_hash, layout_hash=M.layout_hash, num_bytes=100, state="ready")
    stray = HostCopy(
        model="old", model_hash=OLD.model_hash, layout_hash=OLD.layout_hash, num_bytes=7, state="retired", cached=True
    )
    serving = worker_record("w0", M, "serving", host_cache_bytes=1000)
    loading = worker_record("w1", M, "loading", role="decode", host="host-b", nic_gbps=25.0, pid=7, leaf="leaf-1")
    spare = worker_record("w2", lease_plan_id="p1", host="host-b")
    return view(
        msgspec.structs.replace(serving, host_copies=(copy,), stopping=True),
        loading,
        msgspec.structs.replace(spare, host_copies=(stray,)),
        models=(M, model("unused")),
        floors=(Floor(model="m", instances=2, left_s=9.0, role="decode"),),
        unplaced=(Unplaced(model="unused", model_hash=model("unused").model_hash, reason="no room"),),
    )


def status() -> Any:
    report = LoadReport(
        worker_id="w0", incarnation=INCARNATION,
        instance_id="i-w0", model="m", state="serving", role="colocated",
        queued_requests=3, queued_tokens=700, running_requests=2, running_tokens=50, prefill_tokens_total=0,
        decode_tokens_total=0, busy_s_total=0.0, kv_blocks_total=10, kv_blocks_used=4, kv_block_tokens=16,
    )  # fmt: skip
    refused = RefusedLoad(worker_id="w1", model="m", why="its disk is gone", for_s=3.5, failures=2)
    unplanned = Unplanned(model="m", role="prefill", wanted=2, why="no worker is spare", for_s=1.5)
    advice = Advice(model="m", role="colocated", now=1, wanted=2, why="prefill 1.40", for_s=0.5)
    planned = ScaleRecords(records=(), refused=(refused,), unplanned=(unplanned,), advice=(advice,))
    return status_of(registry(), {"i-w0": report}, planned, {"m": 5})


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("status", status),
        ("status_of_nothing", lambda: status_of(view())),
        ("pool", lambda: pool_of(registry())),
        ("pool_of_nothing", lambda: pool_of(view())),
    ],
)
def test_fields_their_order_and_nulls_stay(name: str, answer: Any) -> None:
    expected = json.loads((GOLDEN / f"{name}.json").read_text())
    assert msgspec.json.encode(answer()) == msgspec.json.encode(expected)
