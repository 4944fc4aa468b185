from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.worker.node.traffic import TrafficReporter
from shared.messages.registry import WorkerInfo
from shared.messages.traffic import CarriedBytes, GetTraffic, PeerTransports
from shared.transport.tags import Carries, tag_of
from shared.transport.traffic import TrafficCounters
from tests.records import worker_record


def worker() -> WorkerInfo:
    return worker_record("w0", None, "spare").worker


PEERS = (PeerTransports(worker_id="w1", transports=("tcp/eth0",)),)


async def peers() -> tuple[PeerTransports, ...]:
    return PEERS


async def test_counters_are_answered_without_zeros_and_shown_as_metrics() -> None:
    traffic, metrics = TrafficCounters(), CollectorRegistry()
    reporter = TrafficReporter(worker(), traffic, peers, metrics=metrics)
    traffic.count("sent", tag_of(1, 0, Carries.KV_TO_DECODE), 5, same_host=False)
    traffic.count("sent", tag_of(1, 1, Carries.KV_TO_DECODE), 6, same_host=False)
    answer = await reporter.on_get(GetTraffic())
    assert (answer.worker_id, answer.incarnation) == ("w0", worker().incarnation)
    assert answer.carried == (CarriedBytes(direction="sent", purpose="kv", way="network", num_bytes=11),)
    assert answer.peers == PEERS
    labels = {"direction": "sent", "purpose": "kv", "way": "network"}
    assert metrics.get_sample_value("blitz_worker_transfer_bytes_total", labels) == 11
    assert metrics.get_sample_value("blitz_worker_transfer_bytes_total", labels | {"way": "host"}) == 0
