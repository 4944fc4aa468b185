"""Copies to read from, and traffic that is there already: the planner's own transfers, and serving traffic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import msgspec

from services.planner.core.multicast.topology import Gpu, Host, Nic, Topology
from shared.errors import BadTopology
from shared.messages.plans import SourceKind
from shared.messages.registry import HostCopy, WorkerRecord


class Source(msgspec.Struct, frozen=True):
    """A copy of the model: in the memory of a GPU, or of a host. Disks need not be named."""

    holder: str
    """A GPU's id, or a host's."""
    kind: SourceKind = "gpu"
    leaving: bool = False
    """Draining, or sending already: read it only after the others."""
    ships_kv: bool = False
    """It computes prompts for decode instances, and their KV leaves through its NIC: not to be disturbed while others
    are left."""
    ready_s: float = 0.0
    """When a copy that still loads will be whole, from now."""
    near_only: bool = False
    """It is offered to targets of its own scale-up domain or host, not through its NIC."""


class Flow(msgspec.Struct, frozen=True):
    """Traffic between two GPUs (KV, or another transfer); an empty end lies outside the cluster."""

    source: str = ""
    target: str = ""
    gbps: float = math.inf
    """What it takes inside a host or a scale-up domain, at most. NICs count flows."""


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """Flows per NIC and direction. Opposite directions of a NIC do not disturb each other.

    Inside hosts and scale-up domains only what GPUs send counts: nothing comes in at a target beside its own load."""

    egress: dict[str, int]
    ingress: dict[str, int]
    scale_up: dict[str, list[float]] = field(default_factory=dict)
    """What each flow that a GPU sends inside its domain wants, in Gbps."""
    host_links: dict[str, list[float]] = field(default_factory=dict)
    """The same inside its host, between domains."""

    @classmethod
    def of(cls, topology: Topology, flows: Iterable[Flow]) -> LinkLoad:
        """Count. A flow inside a host or a scale-up domain uses no NIC, but the sender's link there. Raises
        ``BadTopology`` for unknown ends."""
        load = cls({}, {})
        gpus = topology.gpus
        for flow in flows:
            source = gpus.get(flow.source) or _end(topology, flow.source)
            target = gpus.get(flow.target) or _end(topology, flow.target)
            if source is not None and target is not None:
                if isinstance(source, Gpu) and isinstance(target, Gpu) and source.domain == target.domain:
                    load.scale_up.setdefault(source.gpu_id, []).append(flow.gbps)
                    continue
                if _host(source) == _host(target):
                    if isinstance(source, Gpu):
                        load.host_links.setdefault(source.gpu_id, []).append(flow.gbps)
                    continue
            if source is not None:
                load.egress[source.nic.nic_id] = load.egress.get(source.nic.nic_id, 0) + 1
            if target is not None:
                load.ingress[target.nic.nic_id] = load.ingress.get(target.nic.nic_id, 0) + 1
        return load

    def egress_gbps(self, nic: Nic) -> float:
        """The fair share of one more flow."""
        return nic.gbps / (1 + self.egress.get(nic.nic_id, 0))

    def ingress_gbps(self, nic: Nic) -> float:
        return nic.gbps / (1 + self.ingress.get(nic.nic_id, 0))


def _end(topology: Topology, name: str) -> Gpu | Host | None:
    if not name:
        return None
    end = topology.gpus.get(name) or topology.hosts.get(name)
    if end is None:
        raise BadTopology(f"a flow ends at {name!r}, which is no GPU or host of the topology", param="flows")
    return end


def _host(end: Gpu | Host) -> str:
    return end.host if isinstance(end, Gpu) else end.host_id


BUSY_NIC_SHARE = 0.1
"""Serving traffic above this share of a NIC's bandwidth counts as a flow."""
SETTLING_S = 2.0
"""Workers average what their NICs carry between two reports: a reading may show a transfer for this long after its
end."""

Link = tuple[str, str]
"""The workers that send and receive the weights of one stripe."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Weights on their way by this planner's plans."""

    running: tuple[Link, ...] = ()
    settling: tuple[Link, ...] = ()
    """Ended less than ``SETTLING_S`` ago."""
    gbps: Mapping[Link, float] = field(default_factory=dict)
    """What a GPU sends another by those that run, as predicted; with links inside hops that are not in ``running``."""


class NetworkTraffic:
    """What there is at one moment. It is counted once for all plans that are made then."""

    def __init__(self, topology: Topology, transfers: Iterable[Flow], serving: Iterable[Flow]) -> None:
        """``transfers``: weights in flight. ``serving``: what is not part of a plan."""
        self._topology = topology
        self.transfers = tuple(transfers)
        self.serving = tuple(serving)

    @cached_property
    def load(self) -> LinkLoad:
        """All of it."""
        return LinkLoad.of(self._topology, [*self.transfers, *self.serving])

    @cached_property
    def serving_load(self) -> LinkLoad:
        """What keeps its share of a NIC."""
        return LinkLoad.of(self._topology, self.serving)


def transfer_flows(
    topology: Topology, links: Iterable[Link], gbps: Mapping[Link, float] = MappingProxyType({})
) -> list[Flow]:
    """One flow per link; a worker that the topology does not know (it died) is left out. ``gbps``: as in
    ``Transfers``."""
    gpus, running = topology.gpus, dict.fromkeys(links)
    flows = [
        Flow(source if source in gpus else "", target if target in gpus else "", gbps.get((source, target), math.inf))
        for source, target in running
    ]
    inside = [
        Flow(source, target, rate)
        for (source, target), rate in gbps.items()
        if (source, target) not in running and source in gpus and target in gpus
    ]
    return [f for f in (*flows, *inside) if f.source or f.target]


def serving_flows(
    topology: Topology, workers: Iterable[WorkerRecord], transfers: Transfers, busy_share: float = BUSY_NIC_SHARE
) -> list[Flow]:
    """What the NICs carry beside the planner's transfers, as one flow per NIC and direction in use.

    A reading says how much passes, not whose it is. So the planner ignores a direction that one of its own transfers
    uses: the transfer is a flow already. It also ignores one that the pool's transfers use, or may use: weights on
    their way into host memory, from the worker that is named or from whichever holder. Any other that carries more
    than ``busy_share`` of the NIC's bandwidth serves (KV that is shipped, or anything else that should not be
    disturbed). Workers that share a NIC all report its traffic; it counts once, at the first of them.
    """
    gpus = topology.gpus
    records = sorted(workers, key=lambda w: w.worker.worker_id)
    ours_out: set[str] = set()
    ours_in: set[str] = set()
    for source, target in (*transfers.running, *transfers.settling, *_host_loads(records)):
        sender, receiver = gpus.get(source), gpus.get(target)
        if sender is not None and receiver is not None and sender.host == receiver.host:
            continue  # no NIC carries it
        if sender is not None:
            ours_out.add(sender.nic.nic_id)
        if receiver is not None:
            ours_in.add(receiver.nic.nic_id)
    leaving: dict[str, str] = {}
    coming: dict[str, str] = {}
    for worker in records:
        gpu = gpus.get(worker.worker.worker_id)
        if gpu is None:
            continue
        nic, limit_gbps = gpu.nic, busy_share * gpu.nic.gbps
        if worker.nic_egress_gbps > limit_gbps and nic.nic_id not in ours_out:
            leaving.setdefault(nic.nic_id, gpu.gpu_id)
        if worker.nic_ingress_gbps > limit_gbps and nic.nic_id not in ours_in:
            coming.setdefault(nic.nic_id, gpu.gpu_id)
    return [Flow(source=name) for name in leaving.values()] + [Flow(target=name) for name in coming.values()]


def placed_copies(records: Iterable[WorkerRecord]) -> tuple[Link, ...]:
    """The links by which placed host copies are being loaded, as far as workers name their sources."""
    return tuple((c.source, r.worker.worker_id) for r in records for c in r.host_copies if _comes(c) and c.source)


def _host_loads(records: Iterable[WorkerRecord]) -> list[Link]:
    """Every link by which a placed host copy that loads may get its weights. A cached one is copied in its process."""
    records = tuple(records)
    loads = [(r.worker.worker_id, c) for r in records for c in r.host_copies if _comes(c)]
    unnamed = [(target, c.model_hash) for target, c in loads if not c.source]
    return [
        *placed_copies(records),
        *((source.worker.worker_id, target) for target, h in unnamed for source in records if _holds(source, h)),
        *(("", target) for target, _ in loads),
    ]


def _comes(copy: HostCopy) -> bool:
    return copy.state == "loading" and not copy.cached


def _holds(record: WorkerRecord, model_hash: str) -> bool:
    held = record.instance
    if held is not None and held.model_hash == model_hash and held.is_source:
        return True
    return any(c.model_hash == model_hash and c.state == "ready" for c in record.host_copies)
