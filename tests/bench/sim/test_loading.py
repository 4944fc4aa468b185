"""Loads of whole plans: what the planner predicts is what its chains take on an idle network."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.sim.clock import Clock
from bench.sim.cluster import Cluster, known_cluster
from bench.sim.fabric import Fabric
from bench.sim.flows import Network
from bench.sim.loading import Load, Loads
from bench.sim.models import SimModel, known_model
from services.planner.core.multicast.baselines import Strategy, plan_by
from services.planner.core.multicast.chains import WorkerChains
from services.planner.core.multicast.cluster import Clusters
from services.worker.core.upstreams import part_of
from shared.messages.registry import InstanceInfo, WorkerInfo, WorkerRecord
from shared.messages.scaling import ChainMember, ScalePlan


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


def simulated(
    cluster: Cluster, model: SimModel, serving: Sequence[int], num_targets: int, strategy: Strategy
) -> tuple[dict[str, float], WorkerChains, dict[str, list[float]]]:
    """When each target has all, what was planned, and when each had each of its layers."""
    clock, fabric = Clock(), Fabric(cluster)
    found = records(cluster, fabric, model, serving)
    planned = plan_by(
        strategy,
        Clusters(found, transfers=None, busy_nic_share=0.1).of(
            model.record, remaining_s={}, avoided=frozenset(), at_least=0
        ),
        num_targets,
        model.record.weights_bytes,
    )
    members = [
        ChainMember(worker_id=r.worker.worker_id, instance_id="n", host=r.worker.host, transport_address=b"")
        for r in found
    ]
    plan = ScalePlan(
        plan_id="p",
        model=model.record,
        role="prefill",
        members=tuple(members),
        chains=planned.chains,
        triggered_at_s=0.0,
        planned_at_s=0.0,
        expires_at_s=1.0,
    )
    ended: dict[str, float] = {}
    layers: dict[str, list[float]] = {target.worker_id: [] for target in plan.targets}
    loads: dict[str, Load] = {}
    for target in plan.targets:
        part = part_of(plan, target.worker_id)
        assert part is not None

        def layer(_num: int, worker_id: str = target.worker_id) -> None:
            layers[worker_id].append(clock.now_s)

        def end(worker_id: str = target.worker_id) -> None:
            ended[worker_id] = clock.now_s

        loads[target.worker_id] = Load(plan, part, model.weights, target.worker_id, layer, end)
    chunk_bytes = max(chain.chunk_bytes for chain in plan.chains)
    Loads(Network(clock), fabric, lambda worker_id: worker_id).start(loads, chunk_bytes)
    clock.run()
    return ended, planned, layers


@pytest.mark.parametrize(
    ("cluster", "model", "serving", "num_targets"),
    [
        ("a", "mistral-24b", (0, 1), 6),
        ("a", "mistral-24b", (0, 9), 12),
        ("b", "llama3-8b", (0, 1), 6),
        ("b", "llama3-8b", (0,), 15),
        ("a", "qwen2.5-72b", (0, 1), 6),
        ("lab", "llama3-8b", (0,), 5),
        ("lab", "llama3-8b", (0, 1, 2), 5),
    ],
)
def test_chains_take_what_the_planner_predicts(
    cluster: str, model: str, serving: tuple[int, ...], num_targets: int
) -> None:
    sim_model = known_model(model, "a100")
    ended, planned, _ = simulated(
        known_cluster(cluster).joined(sim_model.degree), sim_model, serving, num_targets, "chain"
    )
    assert len(ended) == num_targets
    assert ended == pytest.approx(planned.predicted_s, rel=0.02)


def test_layers_come_in_order_and_the_last_before_the_head() -> None:
    model = known_model("llama3-8b", "a100")
    ended, _, layers = simulated(known_cluster("b"), model, (0,), 15, "chain")
    for worker_id, times in layers.items():
        assert len(times) == model.record.spec.num_layers
        assert times == sorted(times)
        assert 0 < times[0] < times[-1] < ended[worker_id]


def test_a_disk_is_shared_by_those_that_read_it() -> None:
    model = known_model("llama3-8b", "a100")
    ended, _, _ = simulated(known_cluster("b"), model, (0,), 3, "disk")
    alone_s = model.record.weights_bytes * 8 / 10e9
    assert list(ended.values()) == pytest.approx([alone_s] * 3), "each GPU has an SSD's bandwidth of its own"


def test_one_nic_carries_every_copy_of_a_star() -> None:
    model = known_model("llama3-8b", "a100")
    ended, planned, _ = simulated(known_cluster("lab"), model, (0,), 3, "star")
    assert ended == pytest.approx(planned.predicted_s)
