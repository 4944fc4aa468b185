from __future__ import annotations

import msgspec

from services.gateway.http.status import status_of
from shared.messages.operations import RefusedLoad, ScaleRecords, Unplanned
from shared.messages.registry import Floor, ModelRecord, WarmEngine
from tests.records import model, view, worker_record

M = model("m")


def test_roles_of_instances_and_the_floors_of_each_role_are_shown() -> None:
    floors = (
        Floor(model="m", instances=2, left_s=9.0, role="prefill"),
        Floor(model="m", instances=1, left_s=9.0, role="decode"),
        Floor(model="m", instances=3, left_s=9.0),
    )
    workers = (worker_record("w0", M, "serving", role="prefill"), worker_record("w1", M, "serving"))
    found = status_of(view(*workers, models=(M,), floors=floors))
    assert [(f.role, f.instances) for f in found.floors] == [("prefill", 2), ("decode", 1), ("colocated", 3)]
    assert [i.role for i in found.instances] == ["prefill", "colocated"]


def test_a_worker_that_is_about_to_end_and_one_that_is_left_alone_are_shown() -> None:
    ending = msgspec.structs.replace(worker_record("w0", M, "draining"), stopping=True)
    refused = RefusedLoad(worker_id="w1", model="m", why="its disk is gone", for_s=3.5, failures=2)
    read = status_of(
        view(ending, worker_record("w1"), models=(M,)), planned=ScaleRecords(records=(), refused=(refused,))
    )
    assert [w.stopping for w in read.workers] == [True, False]
    assert [(r.worker, r.model, r.why, r.for_s, r.failures) for r in read.refused] == [
        ("w1", "m", "its disk is gone", 3.5, 2)
    ]


def test_what_waits_and_what_is_wanted_in_vain_is_shown() -> None:
    unplanned = Unplanned(model="m", role="colocated", wanted=2, why="no worker is spare", for_s=1.5)
    read = status_of(view(models=(M,)), planned=ScaleRecords(records=(), unplanned=(unplanned,)), queued={"m": 5})
    assert [m.queued_requests for m in read.models] == [5]
    assert [(u.model, u.wanted, u.why, u.for_s) for u in read.unplanned] == [("m", 2, "no worker is spare", 1.5)]


def waiting_for(model: ModelRecord, **changes: object) -> WarmEngine:
    """What has its weights."""
    return WarmEngine(kind=model.kind, model_hash=model.model_hash, **changes)  # type: ignore[arg-type]


def test_engines_that_wait_are_shown_with_the_models_that_they_could_serve() -> None:
    theirs = [model(name, engine="vllm") for name in ("a", "b")]
    unlike = model("c", engine="vllm", layout_hash="unlike")
    twin = model("twin", engine="vllm", model_hash=theirs[0].model_hash)
    warm = {
        "w1": waiting_for(theirs[0]),
        "w2": waiting_for(theirs[0], takes_others=True),
        # Of a model that is not registered any more; and one without weights.
        "w3": waiting_for(model("d", engine="vllm", layout_hash="another")),
        "w4": WarmEngine(kind=unlike.kind, model_hash="", takes_others=True),
    }
    workers = [
        msgspec.structs.replace(worker_record(f"w{i}", engines=("vllm",)), warm=warm.get(f"w{i}")) for i in range(5)
    ]
    found = status_of(view(*workers, models=(M, *theirs, unlike, twin)))
    assert [w.warm_for for w in found.workers] == [None, ("a", "twin"), ("a", "b", "twin"), (), ("c",)]
