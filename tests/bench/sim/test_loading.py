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
from services.planner.core.multicast.baselines import Strategy
from services.planner.core.multicast.chains import WorkerChains
from services.worker.core.upstreams import part_of
from tests.bench.sim.plans import plan_of


def simulated(
    cluster: Cluster, model: SimModel, serving: Sequence[int], num_targets: int, strategy: Strategy
) -> tuple[dict[str, float], WorkerChains, dict[str, list[float]]]:
    """When each target has all, what was planned, and when each had each of its layers."""
    clock, fabric = Clock(), Fabric(cluster)
    plan, planned = plan_of(cluster, fabric, model, serving, num_targets, strategy)
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
