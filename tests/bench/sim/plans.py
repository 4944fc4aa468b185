"""Plans for the GPUs of simulated clusters, as the planner makes them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.sim.cluster import Cluster
from bench.sim.fabric import Fabric
from bench.sim.models import SimModel
from services.planner.core.multicast.baselines import Strategy, plan_by
from services.planner.core.multicast.chains import WorkerChains
from services.planner.core.multicast.cluster import Clusters
from shared.messages.plans import ChainMember, ScalePlan
from shared.messages.registry import HostCopy, InstanceInfo, WorkerInfo, WorkerRecord
from tests.processes import INCARNATION


def records(cluster: Cluster, fabric: Fabric, model: SimModel, serving: Sequence[int]) -> list[WorkerRecord]:
    """A worker for each GPU; those at the places in ``serving`` have the model."""
    made = []
    for place, gpu in enumerate(fabric.gpus.values()):
        worker = WorkerInfo(
            worker_id=gpu.gpu_id,
            incarnation="1",
            host=gpu.host,
            device="cuda",
            engine="mock",
            transport_address=b"",
            arena_bytes=1 << 40,
            kv_bytes=1 << 30,
            leaf=gpu.nic.leaf,
            nic=gpu.nic.nic_id,
            nic_gbps=cluster.nic_gbps,
            scale_up_domain=gpu.domain,
            scale_up_gbps=cluster.scale_up_gbps,
            host_link_gbps=cluster.host_link_gbps,
            ssd_gbps=cluster.ssd_gbps,
        )
        instance = InstanceInfo(
            instance_id=f"i-{gpu.gpu_id}",
            model=model.name,
            model_hash=model.record.model_hash,
            layout_hash=model.record.layout_hash,
            state="serving",
            role="prefill",
            epoch=1,
            weights_digest="whole",
        )
        has_it = place in serving
        made.append(
            WorkerRecord(worker=worker, state="serving" if has_it else "spare", instance=instance if has_it else None)
        )
    return made


def plan_of(
    cluster: Cluster,
    fabric: Fabric,
    model: SimModel,
    serving: Sequence[int],
    num_targets: int,
    strategy: Strategy,
    copies: Sequence[int] = (),
) -> tuple[ScalePlan, WorkerChains]:
    """For prefill instances. ``serving``, ``copies``: places of GPUs with the model, and of those whose workers keep a
    copy in their hosts' memory."""
    found = records(cluster, fabric, model, serving)
    copy = HostCopy(
        model=model.name,
        model_hash=model.record.model_hash,
        layout_hash=model.record.layout_hash,
        num_bytes=model.record.weights_bytes,
        state="ready",
        cached=True,
        serial=1,
    )
    for place in copies:
        found[place] = msgspec.structs.replace(found[place], host_copies=(copy,))
    planned = plan_by(
        strategy,
        Clusters(found, transfers=None, busy_nic_share=0.1).of(
            model.record, remaining_s={}, avoided=frozenset(), at_least=0
        ),
        num_targets,
        model.record.weights_bytes,
    )
    members = [
        ChainMember(
            worker_id=r.worker.worker_id,
            incarnation=INCARNATION,
            instance_id="n",
            host=r.worker.host,
            transport_address=b"",
        )
        for r in found
    ]
    plan = ScalePlan(
        plan_id="p",
        model=model.record,
        role="prefill",
        members=tuple(members),
        chains=planned.chains,
        triggered_at_s=0.0,
        valid_s=1.0,
        term=1,
    )
    return plan, planned
