"""What this worker's transport has carried, for its metrics and for a gateway that asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.messages.registry import WorkerInfo
from shared.messages.traffic import GetTraffic, PeerTransports, WorkerTraffic
from shared.transport.traffic import TrafficCounters


class TrafficReporter(Collector):
    """Reads the transport's counters when somebody looks, from any thread."""

    def __init__(
        self,
        worker: WorkerInfo,
        traffic: TrafficCounters,
        peers: Callable[[], Awaitable[tuple[PeerTransports, ...]]],
        *,
        metrics: CollectorRegistry,
    ) -> None:
        self._worker = worker
        self._traffic = traffic
        self._peers = peers
        metrics.register(self)

    async def on_get(self, _: GetTraffic) -> WorkerTraffic:
        """Everything up to now."""
        return WorkerTraffic(
            worker_id=self._worker.worker_id,
            incarnation=self._worker.incarnation,
            carried=tuple(row for row in self._traffic.carried() if row.num_bytes),
            peers=await self._peers(),
        )

    def collect(self) -> Iterator[Metric]:
        """``blitz_worker_transfer_bytes_total``."""
        family = CounterMetricFamily(
            "blitz_worker_transfer_bytes",
            "Bytes of tensor transfers sent and received: weights, kv (of requests), activations (hidden states "
            "of a pair); over the network or within the host. What is received twice, or thrown away, counts at its "
            "sender only.",
            labels=["direction", "purpose", "way"],
        )
        for row in self._traffic.carried():
            family.add_metric([row.direction, row.purpose, row.way], row.num_bytes)
        yield family
