"""What a simulated run is of: the same for all systems, and what is around the requests that count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from bench.replay.plan import PlannedRequest
from bench.sim.cluster import Cluster
from bench.sim.faults import Fault
from bench.sim.flows import BYTES_PER_GBIT
from bench.sim.gateway import GatewaySettings
from bench.sim.latencies import LOCAL_NATS, Latencies
from bench.sim.models import SimModel
from bench.systems import GIVE_BACK_S, give_back_s
from shared.messages.common import Role

KV_SHARE = 0.9
"""Of the memory that weights leave, that KV may take."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Of a worker, those that matter here. Batches and queues are those of GPUs; a worker's defaults are for CPUs."""

    block_size: int = 16
    max_running_requests: int = 256
    max_batch_tokens: int = 8192
    prefill_chunk_tokens: int = 2048
    max_queued_requests: int = 1024
    max_queued_tokens: int = 32768
    slo_tbt_s: float = 0.1
    kv_bytes: int | None = None
    """None: what the GPU's memory leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is the same for all systems."""

    cluster: Cluster
    """Of single GPUs."""
    model: SimModel
    seed: int = 0
    compute_scale: float = 1.0
    step_overhead_s: float = 0.0
    """What a step takes beside its layers, whatever the scale."""
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    gateway: GatewaySettings = field(default_factory=lambda: GatewaySettings(max_queued_requests=1_000_000))
    latencies: Latencies = LOCAL_NATS
    give_back_s: float = GIVE_BACK_S
    """For how long an instance is kept that the load does not need; 0: twice what a load over an idle NIC takes."""
    patience_s: float = 120.0
    """After the last arrival: what has not ended by then is unfinished."""
    kill_every_s: float | None = None
    """So often, on average, a worker with an instance dies between the first arrival and the last; by the seed."""

    @property
    def num_workers(self) -> int:
        """That the cluster has for instances of the model."""
        return self.cluster.num_gpus // self.model.degree

    @property
    def give_back_window_s(self) -> float:
        """``give_back_s``, or what the rule comes to on this cluster. Raises ``BadTopology``."""
        nic_gbps = self.cluster.joined(self.model.degree).nic_gbps
        return give_back_s(self.give_back_s, self.model.record.weights_bytes / (nic_gbps * BYTES_PER_GBIT))

    @property
    def kv_bytes(self) -> int:
        """Of an instance; none is left where this is not positive."""
        if self.worker.kv_bytes is not None:
            return self.worker.kv_bytes
        memory = self.model.degree * self.cluster.gpu_memory_gib * GIB
        return int(KV_SHARE * (memory - self.model.record.weights_bytes))


class Imposed(NamedTuple):
    """Something that is asked for at a time, whatever the load says."""

    at_s: float
    """As requests are due."""
    role: Role
    desired: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What is around the requests that count, in a run that is to be like another one."""

    lead_in: tuple[PlannedRequest, ...] = ()
    """Requests before those that count; due so many seconds after the lead-in begins."""
    lead_in_s: float = 0.0
    """From there to where times are counted from."""
    counted_s: float | None = None
    """For how long after the first arrival GPU seconds count. None: up to the last one."""
    placed: tuple[tuple[int, Role], ...] | None = None
    """Which workers have instances at the beginning, by their numbers. None: one of each host in turn."""
    packed: bool = False
    """Without ``placed``: one host after the other is filled instead."""
    copies: tuple[tuple[int, bool], ...] = ()
    """With ``placed``: which workers have copies in their hosts' memory, and whether they keep them for themselves."""
    looks_after_s: float = 0.0
    """The monitor looks for the first time so long after the clock begins, and at intervals from then on."""
    imposed: tuple[Imposed, ...] | None = None
    """What the planner is asked for after the lead-in, instead of what the monitor would ask for; in the order of
    time."""
    faults: tuple[Fault, ...] = ()
    """Workers that die, beside those that ``Setup.kill_every_s`` has die."""
