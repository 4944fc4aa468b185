"""Results of replays that never ran."""

from __future__ import annotations

from bench.replay.document import About, Document
from bench.replay.objectives import Slo
from bench.replay.observations import Cluster, ClusterLog
from bench.replay.plan import PlannedRequest
from bench.replay.record import Collector, Failure, RequestRecord
from shared.messages.admin import InstanceStatus, PoolStatus, PoolTotals, Status, TrafficStatus
from shared.messages.operations import ScaleRecord
from shared.messages.traffic import CarriedBytes, WorkerTraffic


def cluster() -> Cluster:
    log = ClusterLog("m")
    for at_s, states in ((0.0, ("serving",)), (1.0, ("serving", "loading")), (3.0, ("serving", "serving"))):
        instances = tuple(
            InstanceStatus(id=f"i{n}", model="m", role="prefill" if n else "decode", state=state, workers=(f"w{n}",))
            for n, state in enumerate(states)
        )
        log.saw_status(at_s, Status(instances=instances))
        log.saw_pool(at_s, PoolStatus(models=(), totals=PoolTotals(host_bytes=1_000_000)))
        sent = CarriedBytes(direction="sent", purpose="weights", way="network", num_bytes=int(at_s * 1_000_000))
        log.saw_traffic(at_s, TrafficStatus(workers=(WorkerTraffic(worker_id="w", incarnation="i", carried=(sent,)),)))
    reason = "load <b>of</b> 2"
    record = ScaleRecord(
        plan_id="p", model="m", status="done", direction="out", desired=2, reason=reason, triggered_at_s=100.9
    )
    log.saw_operations([record])
    found = log.sum_up(0.0, 3.0, started_at_s=100.0)
    assert found is not None
    return found


def document(model: str = "m", *, ttft_s: float = 0.1, with_cluster: bool = True, shortened: int = 0) -> Document:
    """Four requests, of which one failed."""
    records = [RequestRecord(i, i * 0.8, 0.001, 5, 3, ttft_s * (i + 1), (0.02, 0.03), 0.5) for i in range(3)]
    records.append(RequestRecord(3, 2.4, 0.001, 5, 0, None, (), 0.2, Failure("connect", "refused")))
    requests = [PlannedRequest(record.index, record.due_s, 5, 3, False) for record in records]
    about = About(
        trace="t.csv", url="http://x", model=model, seed=1, speed=1.0, scale_rate=2.0, spread_seconds=False,
        skipped_rows=0, unsorted_rows=0, started_at_s=100.0,
    )  # fmt: skip
    collector = Collector(planned=4, shortened=shortened, elapsed_s=4.0, records=records)
    return Document.of(about, requests, collector, slo=Slo(0.25, 0.1), cluster=cluster() if with_cluster else None)
