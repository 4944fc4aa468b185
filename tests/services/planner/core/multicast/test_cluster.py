from __future__ import annotations

import msgspec
import pytest

from services.planner.core.multicast.chains import left_out_of
from services.planner.core.multicast.cluster import Clusters
from services.planner.core.multicast.traffic import Flow
from shared.messages.common import InstanceState
from shared.messages.registry import WarmEngine
from tests.records import model, worker_record
from tests.services.planner.core.multicast.clusters import MODEL, MODEL_BYTES, cluster, coming_from, record


def test_serving_and_draining_instances_and_ready_host_copies_are_complete_copies() -> None:
    found = cluster(
        record("w0", "serving"),
        record("w1", "draining"),
        record("w2", "loading"),
        record("w3", host_copy="ready"),
        record("w4", host_copy="ready", cached=True),
        record("w5", host_copy="loading"),
        record("w6", host_copy="retired"),
    )
    assert [(c.kind, c.worker_id, c.instance_id, c.draining) for c in found.copies] == [
        ("gpu", "w0", "i-w0", False),
        ("gpu", "w1", "i-w1", True),
        ("host", "w3", "", False),
        ("host", "w4", "", False),
    ]


def test_other_weights_and_other_layouts_are_no_copies() -> None:
    others = (model("m", model_hash="other"), model("m", layout_hash="other"))
    records = [worker_record(f"w{i}", other, "serving") for i, other in enumerate(others)]
    records += [record(f"w{2 + i}", host_copy="ready", copy_of=other) for i, other in enumerate(others)]
    assert Clusters(records).of(MODEL).copies == ()


def test_copies_to_stay_apart_from_are_those_that_the_pool_placed_and_that_stay() -> None:
    records = [
        record("w0", "serving"),
        record("w1", host_copy="ready"),
        record("w2", host_copy="loading"),
        record("w3", host_copy="ready", cached=True),
        record("w4", host_copy="retired"),
        record("w5", host_copy="ready", copy_of=model("m", layout_hash="other")),
        msgspec.structs.replace(record("w6", host_copy="ready"), cordoned=True),
    ]
    assert [w.worker_id for w in Clusters(records).copies_at(MODEL)] == ["w1", "w2"]


@pytest.mark.parametrize("state", ["loading", "live"])
def test_an_instance_that_loads_is_known_with_the_time_that_it_still_needs(state: InstanceState) -> None:
    found = cluster(record("w0", state), record("w1", state), remaining_s={"w1": 1.5})
    assert [(c.worker_id, c.ready_s) for c in found.loading] == [("w1", 1.5)], "w0's plan is not known"


def test_spare_workers_are_free_and_large_enough() -> None:
    found = cluster(
        record("w0"),
        record("w1", arena_bytes=MODEL_BYTES - 1),
        record("w2", arena_bytes=MODEL_BYTES),
        worker_record("w3", lease_plan_id="p", lease_model="m", arena_bytes=1 << 40),
        record("w4", "serving"),
    )
    assert [w.worker_id for w in found.spare] == ["w0", "w2"]
    assert "1 spare worker's arena" in found.unfit[0]


def test_what_a_plan_takes_is_spare_for_no_later_one_whatever_its_size() -> None:
    arenas = {"w0": MODEL_BYTES, "w1": 4 * MODEL_BYTES, "w2": 4 * MODEL_BYTES, "w3": 2 * MODEL_BYTES}
    larger = model("larger", weights_bytes=3 * MODEL_BYTES)
    clusters = Clusters([record(name, arena_bytes=size) for name, size in arenas.items()])
    everywhere, shunning = clusters.of(MODEL), clusters.of(MODEL, avoided={"w2": "it fails"})
    assert [w.worker_id for w in shunning.spare] == ["w0", "w1", "w3"]
    assert [w.worker_id for w in clusters.of(larger).spare] == ["w1", "w2"]
    assert everywhere.spare.targets.num_gpus == 4
    clusters.take(["w1", "w0"], "p", "m", "colocated")
    for found, spare in ((everywhere, ["w2", "w3"]), (clusters.of(MODEL), ["w2", "w3"]), (clusters.of(larger), ["w2"])):
        assert [w.worker_id for w in found.spare] == spare
        assert [w for w in arenas if w in found.spare.targets] == spare
    assert "1 spare worker's arena" in clusters.of(larger).unfit[0]
    assert clusters.of(MODEL).unfit == ()
    shunning = clusters.of(MODEL, avoided={"w2": "it fails", "w1": "it is taken"})
    assert [w for w in arenas if w in shunning.spare.targets] == [w.worker_id for w in shunning.spare] == ["w3"]
    assert shunning.refused == ("worker w2 is avoided: it fails",)
    assert len(clusters.of(MODEL, avoided={"w2": "it fails"}, at_least=2).spare) == 2


def test_transfers_make_their_senders_busy_and_are_flows() -> None:
    found = cluster(record("w0", "serving"), record("w1", "serving"), record("w2", "loading"), links=(("w0", "w2"),))
    assert [c.sending for c in found.copies] == [True, False]
    assert found.traffic.transfers == (Flow("w0", "w2"),)


def test_a_planner_that_is_not_to_know_flows_sees_none() -> None:
    found = cluster(record("w0", "serving", egress_gbps=9.0), record("w1"), links=(("w0", "w1"),), knows_flows=False)
    assert not found.copies[0].sending
    assert found.traffic.transfers == found.traffic.serving == ()


def test_only_workers_that_could_take_part_are_named_when_their_facts_are_wrong() -> None:
    found = cluster(
        record("w0", "serving"),
        record("w1", "serving", nic_gbps=0.0),
        record("w2", ssd_gbps=0.0),
        record("w3", host_copy="ready", leaf=""),
        worker_record("w4", model("other"), "serving", nic_gbps=0.0),
        record("w5"),
    )
    assert [line.split()[1] for line in found.refused] == ["w1", "w2", "w3"]
    assert "nic_gbps=0.0" in found.refused[0]
    assert [c.worker_id for c in found.copies] == ["w0"]
    assert [w.worker_id for w in found.spare] == ["w5"]


def test_a_thousand_wrong_workers_are_not_all_named() -> None:
    found = cluster(*(record(f"w{i:04}", nic_gbps=0.0) for i in range(1000)))
    assert len(found.refused) == 9
    assert "992 more" in found.refused[-1]


def test_the_pools_transfers_are_flows_as_well() -> None:
    loading = coming_from(record("w2", host_copy="loading"), "w0")
    found = cluster(record("w0", "serving"), record("w1", "serving"), loading, links=(("w1", "w2"),))
    assert [c.sending for c in found.copies] == [True, True]
    assert found.traffic.transfers == (Flow("w1", "w2"), Flow("w0", "w2"))
    assert cluster(record("w0", "serving"), loading, knows_flows=False).traffic.transfers == ()


def test_a_model_with_another_engine_finds_only_those_that_offer_it() -> None:
    theirs = model("v", engine="vllm", weights_bytes=MODEL_BYTES)
    records = [record("w0"), record("w1", engines=("vllm",)), record("w2", engines=("vllm",), arena_bytes=1)]
    clusters = Clusters([*records, msgspec.structs.replace(record("w3"), cordoned=True)])
    found = clusters.of(theirs)
    assert [w.worker_id for w in found.spare] == ["w1"]
    assert "1 spare worker does not offer the engine vllm (BLITZ_WORKER_ENGINES)" in found.unfit[0]
    assert "1 spare worker's arena" in found.unfit[1]
    assert found.drained == ()
    assert [w.worker_id for w in clusters.of(MODEL).spare] == ["w0", "w1"]
    clusters.take(["w0"], "p", "m", "colocated")
    assert [w.worker_id for w in found.spare] == ["w1"]
    assert len(clusters.of(theirs).unfit) == 1
    clusters.take(["w1"], "p", "v", "colocated")
    assert list(found.spare) == list(clusters.of(theirs).spare) == list(clusters.of(MODEL).spare) == []


def test_a_model_of_our_engine_finds_no_worker_that_has_only_those_of_others() -> None:
    theirs = [record("w0", engine="none", engines=("vllm",)), record("w1", engine="none", engines=("vllm",))]
    (why,) = Clusters(theirs).of(MODEL).unfit
    assert why == "no worker offers the system's own engine (BLITZ_WORKER_ENGINE)"
    clusters = Clusters([*theirs, record("w2")])
    assert [w.worker_id for w in clusters.of(MODEL).spare] == ["w2"]
    assert clusters.of(MODEL).unfit == ("2 spare workers do not offer the system's own engine (BLITZ_WORKER_ENGINE)",)
    both = clusters.of(model("v", engine="vllm", weights_bytes=MODEL_BYTES))
    assert [w.worker_id for w in both.spare] == ["w0", "w1"]
    assert Clusters([]).of(MODEL).unfit == ()


def test_those_that_are_avoided_are_counted_among_those_that_offer_the_engine() -> None:
    theirs = model("v", engine="vllm", weights_bytes=MODEL_BYTES)
    clusters = Clusters([record("w0"), record("w1"), record("w2", engines=("vllm",))])
    assert list(clusters.of(theirs, avoided={"w2": "it fails"}).spare) == []
    assert len(clusters.of(theirs, avoided={"w2": "it fails"}, at_least=1).spare) == 1
    assert clusters.of(theirs, avoided={"w0": "it fails"}).refused == ()


def test_where_nobody_offers_the_engine_this_is_the_reason() -> None:
    theirs = model("v", engine="vllm", weights_bytes=MODEL_BYTES)
    for records in ([record("w0")], [record("w0", "serving")], []):
        found = Clusters(records).of(theirs)
        assert left_out_of(found, 0, 1) == (
            "1 of 1 more instances have no worker: no worker offers the engine vllm (BLITZ_WORKER_ENGINES)",
        )


@pytest.mark.parametrize(
    ("num_wanted", "expected"),
    [(1, ["w1", "w3"]), (2, ["w1", "w3"]), (3, ["w0", "w1", "w2", "w3"])],
)
def test_workers_where_the_models_engine_waits_come_first(num_wanted: int, expected: list[str]) -> None:
    theirs = model("v", engine="vllm")
    others = model("v", engine="vllm", model_hash="another")
    unlike = model("v", engine="vllm", layout_hash="unlike")
    warm = {
        "w0": WarmEngine(kind=unlike.kind, model_hash=theirs.model_hash, takes_others=True),
        "w1": WarmEngine(kind=theirs.kind, model_hash=theirs.model_hash),
        "w2": WarmEngine(kind=others.kind, model_hash=others.model_hash),
        "w3": WarmEngine(kind=others.kind, model_hash=others.model_hash, takes_others=True),
    }
    records = [
        msgspec.structs.replace(worker_record(f"w{i}", engines=("vllm",)), warm=warm.get(f"w{i}")) for i in range(4)
    ]
    found = Clusters(records).of(theirs, num_wanted=num_wanted)
    assert [w.worker_id for w in found.spare] == expected
    assert len(found.refused) == 4 - len(expected)
    ours = Clusters(records).of(model("m"), num_wanted=1)
    assert len(ours.spare) == 4, "of our engines none waits"
