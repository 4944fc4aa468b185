from __future__ import annotations

import pytest

from services.planner.core.multicast.topology import topology_of
from services.planner.core.multicast.traffic import Flow, Link, Transfers, placed_copies, serving_flows, transfer_flows
from shared.messages.registry import WorkerRecord
from tests.records import model
from tests.services.planner.core.multicast.clusters import coming_from, record


def serving(*records: WorkerRecord, running: tuple[Link, ...] = (), settling: tuple[Link, ...] = ()) -> list[Flow]:
    return serving_flows(topology_of(r.worker for r in records), records, Transfers(running, settling))


def test_a_nic_that_carries_more_than_a_tenth_serves() -> None:
    records = (
        record("w0", egress_gbps=1.1),
        record("w1", ingress_gbps=1.1),
        record("w2", egress_gbps=0.9, ingress_gbps=0.9),
        record("w3", egress_gbps=9.0, nic_gbps=100.0),
    )
    assert serving(*records) == [Flow(source="w0"), Flow(target="w1")]


def test_workers_that_share_a_nic_report_one_flow() -> None:
    shared = [record(f"w{i}", host="a", egress_gbps=5.0, ingress_gbps=5.0) for i in range(3)]
    own = record("w3", host="a", nic="own", egress_gbps=5.0)
    assert serving(*shared, own) == [Flow(source="w0"), Flow(source="w3"), Flow(target="w0")]


def test_a_direction_that_our_transfer_uses_is_not_taken_for_serving() -> None:
    sender, receiver = record("w0", egress_gbps=9.0, ingress_gbps=9.0), record("w1", egress_gbps=9.0, ingress_gbps=9.0)
    # What comes in at the sender and leaves the receiver is not of this transfer.
    assert serving(sender, receiver, running=(("w0", "w1"),)) == [Flow(source="w1"), Flow(target="w0")]


def test_a_reading_may_still_show_a_transfer_that_just_ended() -> None:
    assert serving(record("w0", egress_gbps=9.0), record("w1"), settling=(("w0", "w1"),)) == []


def test_a_transfer_inside_a_host_explains_no_traffic_on_its_nic() -> None:
    records = (record("w0", host="a", egress_gbps=9.0), record("w1", host="a"))
    assert serving(*records, running=(("w0", "w1"),)) == [Flow(source="w0")]


@pytest.mark.parametrize("gbps", [float("nan"), -5.0])
def test_readings_that_make_no_sense_are_no_traffic(gbps: float) -> None:
    assert serving(record("w0", egress_gbps=gbps, ingress_gbps=gbps)) == []


def test_a_transfer_of_a_worker_that_is_gone_counts_at_the_other_end_only() -> None:
    topology = topology_of([record("w0").worker])
    links = (("w0", "gone"), ("gone", "w0"), ("gone", "gone too"))
    assert transfer_flows(topology, links) == [Flow(source="w0"), Flow(target="w0")]


def test_what_may_be_a_host_copy_that_loads_is_not_taken_for_serving() -> None:
    loading = record("w0", host_copy="loading", egress_gbps=9.0, ingress_gbps=9.0)
    gpu, host = record("w1", "serving", egress_gbps=9.0), record("w2", host_copy="ready", egress_gbps=9.0)
    other = record("w3", host_copy="ready", copy_of=model("other"), egress_gbps=9.0, ingress_gbps=9.0)
    # What leaves the loading worker, and a holder of another model, serves.
    assert serving(loading, gpu, host, other) == [Flow(source="w0"), Flow(source="w3"), Flow(target="w3")]
    done = record("w0", host_copy="ready", ingress_gbps=9.0)
    assert serving(done, gpu, host) == [Flow(source="w1"), Flow(source="w2"), Flow(target="w0")]


def test_a_copy_that_loads_inside_its_host_or_process_explains_no_traffic_on_others_nics() -> None:
    near = record("w1", "serving", host="a", egress_gbps=9.0)
    assert serving(record("w0", host="a", host_copy="loading"), near) == [Flow(source="w1")]
    cached = record("w0", host_copy="loading", cached=True, ingress_gbps=9.0)
    assert serving(cached, record("w1", "serving", egress_gbps=9.0)) == [Flow(source="w1"), Flow(target="w0")]


def test_a_host_copy_whose_source_is_named_explains_that_ones_traffic_only() -> None:
    loading = coming_from(record("w0", host_copy="loading", ingress_gbps=9.0), "w1")
    sends, other = record("w1", "serving", egress_gbps=9.0), record("w2", "serving", egress_gbps=9.0)
    assert serving(loading, sends, other) == [Flow(source="w2")]
    assert placed_copies([loading, sends, other]) == (("w1", "w0"),)
    assert placed_copies([coming_from(record("w0", host_copy="ready"), "w1")]) == ()
    assert placed_copies([record("w0", host_copy="loading")]) == ()
