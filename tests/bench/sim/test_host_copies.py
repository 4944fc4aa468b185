"""Copies in the memory of hosts: what a worker has room for, and a model's last copy."""

from __future__ import annotations

import math

from bench.sim.clock import Clock
from bench.sim.cluster import known_cluster
from bench.sim.fabric import Fabric
from bench.sim.flows import Network
from bench.sim.host_copies import LOOK_S, HostCopies
from bench.sim.latencies import LOCAL_NATS
from bench.sim.models import known_model
from services.pool.core.copies_policy import CopiesPolicy
from shared.messages.common import InstanceState
from shared.messages.registry import InstanceInfo, WorkerHeartbeat, WorkerInfo

MODEL = known_model("llama3-8b", "a100").record
ONE, OTHER = "host-0-gpu-0", "host-1-gpu-0"


class Rig:
    """Cluster B, of which two workers report."""

    def __init__(self, policy: CopiesPolicy) -> None:
        self.clock = Clock()
        fabric = Fabric(known_cluster("b"))
        self.copies = HostCopies(
            self.clock, Network(self.clock), fabric, LOCAL_NATS, str, policy=policy, keep_copies_s=math.inf
        )
        self.copies.put_model(MODEL)
        self._fabric = fabric
        self._sequence = 0

    def report(self, worker_id: str, state: InstanceState, *, host_bytes: int = 0) -> None:
        self._sequence += 1
        gpu = self._fabric.gpus[worker_id]
        worker = WorkerInfo(
            worker_id=worker_id, incarnation="1", host=gpu.host, device="cuda", engine="mock", transport_address=b"",
            arena_bytes=MODEL.weights_bytes, kv_bytes=0, host_cache_bytes=host_bytes,
        )  # fmt: skip
        instance = InstanceInfo(
            instance_id=f"i-{worker_id}", model=MODEL.name, model_hash=MODEL.model_hash, layout_hash=MODEL.layout_hash,
            state=state, role="colocated", epoch=1, weights_digest="" if state == "loading" else "whole",
        )  # fmt: skip
        self.copies.put_report(
            WorkerHeartbeat(
                worker=worker,
                state=state,
                instance=None if state == "spare" else instance,
                sequence=self._sequence,
                host_copies=self.copies.of(worker_id),
            )
        )


def test_a_worker_keeps_a_copy_only_where_it_has_memory_for_one() -> None:
    rig = Rig("kept")
    rig.report(ONE, "serving", host_bytes=MODEL.weights_bytes - 1)
    rig.report(OTHER, "serving", host_bytes=MODEL.weights_bytes)
    for worker_id in (ONE, OTHER):
        rig.copies.keep(worker_id, MODEL)
    assert rig.copies.of(ONE) == ()
    assert [copy.state for copy in rig.copies.of(OTHER)] == ["ready"]
    assert rig.copies.num_bytes == MODEL.weights_bytes


def test_an_instance_that_goes_leaves_another_whole_copy_behind() -> None:
    rig = Rig("one")
    rig.report(ONE, "draining", host_bytes=MODEL.weights_bytes)
    rig.report(OTHER, "loading", host_bytes=MODEL.weights_bytes)
    assert not rig.copies.may_drop_gpu(ONE, MODEL)
    rig.report(OTHER, "serving", host_bytes=MODEL.weights_bytes)
    assert rig.copies.may_drop_gpu(ONE, MODEL)


def test_a_copy_on_a_host_will_do() -> None:
    rig = Rig("one")
    rig.report(ONE, "draining", host_bytes=MODEL.weights_bytes)
    rig.clock.run(LOOK_S + 60.0)  # the pool has one placed there, from the GPU
    rig.report(ONE, "draining", host_bytes=MODEL.weights_bytes)
    assert rig.copies.may_drop_gpu(ONE, MODEL)
