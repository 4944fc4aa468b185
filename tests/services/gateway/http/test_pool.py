from __future__ import annotations

from typing import Literal

import msgspec

from services.gateway.http.status import pool_of, status_of
from shared.messages.admin import PoolStatus, PoolTotals
from shared.messages.registry import HostCopy, ModelRecord, Unplaced, WorkerRecord
from shared.registry import RegistryView
from tests.records import model, view, worker_record

M = model("m", weights_bytes=100)


def copy_of(record: ModelRecord, state: Literal["loading", "ready", "retired"] = "ready", **fields: bool) -> HostCopy:
    return HostCopy(
        model=record.name,
        model_hash=record.model_hash,
        layout_hash=record.layout_hash,
        num_bytes=record.weights_bytes,
        state=state,
        **fields,
    )


def holder(worker_id: str, *copies: HostCopy, serves: ModelRecord | None = None, host: str = "host-a") -> WorkerRecord:
    record = worker_record(worker_id, serves, "serving" if serves else "spare", host=host, host_cache_bytes=1000)
    return msgspec.structs.replace(record, host_copies=copies)


def snapshot(*workers: WorkerRecord, unplaced: tuple[Unplaced, ...] = ()) -> RegistryView:
    return view(*workers, models=(M,), unplaced=unplaced)


def test_all_copies_are_shown_per_model_and_per_host() -> None:
    stray = model("old", weights_bytes=7)
    found = pool_of(
        snapshot(
            holder("w0", copy_of(M), serves=M),
            holder("w1", copy_of(M, cached=True), copy_of(stray), host="host-b"),
        )
    )
    [mine] = found.models
    assert (mine.invariant, mine.host_copy, mine.reason, mine.host_bytes) == ("ok", "ready", "", 200)
    assert [(i.worker, i.host, i.state, i.complete) for i in mine.instances] == [("w0", "host-a", "serving", True)]
    assert [(c.worker, c.host, c.state, c.bytes, c.cached) for c in mine.host_copies] == [
        ("w0", "host-a", "ready", 100, False),
        ("w1", "host-b", "ready", 100, True),
    ]
    assert [(h.host, h.used_bytes, h.placed_bytes, h.cached_bytes) for h in found.hosts] == [
        ("host-a", 100, 100, 0),
        ("host-b", 107, 7, 100),
    ]
    assert [(s.model, s.worker) for s in found.strays] == [("old", "w1")]
    assert found.totals == PoolTotals(
        host_bytes=207, host_capacity_bytes=2000, models=1, models_without_copy=0, models_without_host_copy=0
    )


def test_a_model_without_copies_says_why() -> None:
    entry = Unplaced(model="m", model_hash=M.model_hash, reason="no room")
    [mine] = pool_of(snapshot(holder("w0"), unplaced=(entry,))).models
    assert (mine.invariant, mine.host_copy) == ("missing", "none")
    assert mine.reason == "no complete copy in any memory: no room"
    [mine] = pool_of(snapshot(holder("w0", serves=M), unplaced=(entry,))).models
    assert (mine.invariant, mine.reason) == ("ok", "no host copy: no room")
    [mine] = pool_of(snapshot(holder("w0", copy_of(M, "loading")))).models
    assert (mine.invariant, mine.reason) == ("missing", "no complete copy in any memory: one loads")
    [mine] = pool_of(snapshot(holder("w0", copy_of(M, "retired")))).models
    assert (mine.invariant, mine.host_copy) == ("missing", "none")


def test_copies_of_instances_show_their_role() -> None:
    decoding = worker_record("w0", M, "serving", role="decode")
    [mine] = pool_of(snapshot(decoding, holder("w1", serves=M))).models
    assert [(i.worker, i.role) for i in mine.instances] == [("w0", "decode"), ("w1", "colocated")]


def test_the_command_line_reads_every_key() -> None:
    found = pool_of(snapshot(holder("w0", copy_of(M), copy_of(model("old")), serves=M)))
    assert msgspec.json.decode(msgspec.json.encode(found), type=PoolStatus) == found


def test_a_model_that_a_worker_can_read_is_on_disk_once_no_memory_holds_it() -> None:
    entry = Unplaced(model="m", model_hash=M.model_hash, reason="no room", on_disk=True)
    found = pool_of(snapshot(holder("w0"), unplaced=(entry,)))
    [mine] = found.models
    assert (mine.invariant, mine.host_copy, mine.reason) == ("disk", "none", "on disk only: no room")
    assert (found.totals.models_without_copy, found.totals.models_on_disk) == (0, 1)
    served = snapshot(holder("w0", serves=M), unplaced=(entry,))
    assert [model.invariant for model in pool_of(served).models] == ["ok"]
    assert [model.copies for model in status_of(served).models] == ["memory"]
    assert [model.copies for model in status_of(snapshot(unplaced=(entry,))).models] == ["disk"]
    assert [model.copies for model in status_of(snapshot()).models] == ["none"]
