"""Loads of whole plans: what the planner predicts is what its chains take on an idle network."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
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
from services.planner.core.operations.operation import Operation
from services.planner.core.operations.operations import Operations
from services.worker.core.upstreams import part_of
from shared.messages.common import InstanceState
from shared.messages.plans import ChainMember, ScalePlan
from shared.messages.progress import ScaleProgress
from shared.messages.registry import InstanceInfo
from tests.bench.sim.plans import plan_of, records
from tests.processes import INCARNATION


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
    Loads(clock, Network(clock), fabric, lambda worker_id: worker_id).start(loads, chunk_bytes)
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


# --- plans that begin while others run -------------------------------------------------------------


class Staggered:
    """Plans of the planner one after the other, each made while those before may still run."""

    def __init__(self, cluster: Cluster, model: SimModel, serving: Sequence[int]) -> None:
        self.clock, fabric = Clock(), Fabric(cluster)
        self.model = model
        self.records = {r.worker.worker_id: r for r in records(cluster, fabric, model, serving)}
        self.loads = Loads(self.clock, Network(self.clock), fabric, lambda worker_id: worker_id)
        self.operations = Operations()
        self.predicted: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.plans: list[ScalePlan] = []

    def scale(self, num_targets: int) -> None:
        """So many more instances, now."""
        model, now_s = self.model.record, self.clock.now_s
        found = Clusters(self.records.values(), transfers=self.operations.transfers(now_s)).of(
            model, remaining_s=self.operations.remaining_s(now_s)
        )
        planned = plan_by("chain", found, num_targets, model.weights_bytes)
        members = [
            ChainMember(
                worker_id=w, incarnation=INCARNATION, instance_id=f"i-{w}", host=r.worker.host, transport_address=b""
            )
            for w, r in self.records.items()
        ]
        plan = ScalePlan(
            plan_id=f"p{len(self.plans)}",
            model=model,
            role="prefill",
            members=tuple(members),
            chains=planned.chains,
            triggered_at_s=now_s,
            valid_s=99.0,
            term=1,
        )
        self.plans.append(plan)
        operation = Operation.of_plan(plan, now_s)
        operation.planned(now_s)
        self.operations.add(operation)
        loads = {target.worker_id: self._load(plan, operation, target) for target in plan.targets}
        for worker_id, predicted_s in planned.predicted_s.items():
            self.predicted[worker_id] = now_s + predicted_s
        self.loads.start(loads, max(chain.chunk_bytes for chain in plan.chains))

    def _load(self, plan: ScalePlan, operation: Operation, target: ChainMember) -> Load:
        worker_id = target.worker_id
        self._becomes(worker_id, "loading")
        part = part_of(plan, worker_id)
        assert part is not None

        def end() -> None:
            self.ended[worker_id] = self.clock.now_s
            self._becomes(worker_id, "serving")
            for event in ("accepted", "loaded", "serving"):
                operation.apply(
                    ScaleProgress(
                        plan_id=plan.plan_id,
                        worker_id=worker_id,
                        instance_id=target.instance_id,
                        event=event,  # type: ignore[arg-type]
                        after_s=0.0,
                    ),
                    self.clock.now_s,
                )

        return Load(plan, part, self.model.weights, worker_id, None, end)

    def _becomes(self, worker_id: str, state: InstanceState) -> None:
        instance = InstanceInfo(
            instance_id=f"i-{worker_id}",
            model=self.model.name,
            model_hash=self.model.record.model_hash,
            layout_hash=self.model.record.layout_hash,
            state=state,
            role="prefill",
            epoch=1,
            weights_digest="whole" if state == "serving" else "",
        )
        self.records[worker_id] = msgspec.structs.replace(self.records[worker_id], state=state, instance=instance)


@pytest.mark.parametrize(
    ("cluster", "model", "serving", "steps"),
    [
        ("b", "llama3-8b", (0, 15), (1, 1, 1, 1)),
        ("b", "llama3-8b", (0,), (1, 2, 1, 1)),
        ("b", "llama3-8b", (0,), (2, 2, 2)),
        ("b", "llama3-8b", (0,), (3, 1, 1, 1)),
        ("a", "mistral-24b", (0, 9), (1, 1, 2, 1)),
        ("lab", "llama3-8b", (0, 7), (1, 1, 1)),
    ],
)
def test_plans_that_begin_while_others_run_take_what_is_predicted(
    cluster: str, model: str, serving: tuple[int, ...], steps: tuple[int, ...]
) -> None:
    sim_model = known_model(model, "a100")
    staggered = Staggered(known_cluster(cluster).joined(sim_model.degree), sim_model, serving)
    for number, num_targets in enumerate(steps):
        staggered.clock.at(0.1 * number, staggered.scale, num_targets)
    staggered.clock.run()
    assert len(staggered.ended) == sum(steps)
    assert staggered.ended == pytest.approx(staggered.predicted, rel=0.03)


@pytest.mark.parametrize("serving", [(0,), (0, 15)])
def test_chains_over_host_memory_go_on_as_predicted(serving: tuple[int, ...]) -> None:
    alone = msgspec.structs.replace(known_cluster("b"), gpus_per_domain=1, scale_up_gbps=None)
    staggered = Staggered(alone, known_model("llama3-8b", "a100"), serving)
    for number, num_targets in enumerate((1, 1, 2, 1)):
        staggered.clock.at(0.1 * number, staggered.scale, num_targets)
    staggered.clock.run()
    assert len(staggered.ended) == 5
    assert staggered.ended == pytest.approx(staggered.predicted, rel=0.03)


def test_the_nth_target_of_a_burst_costs_next_to_nothing() -> None:
    model = known_model("llama3-8b", "a100")
    staggered = Staggered(known_cluster("b"), model, (0, 15))
    for number in range(5):
        staggered.clock.at(0.1 * number, staggered.scale, 1)
    staggered.clock.run()
    alone_s = model.record.weights_bytes * 8 / 256e9
    took_s = [ended - 0.1 * number for number, ended in enumerate(staggered.ended.values())]
    assert took_s == pytest.approx([alone_s] * 5, rel=0.02)


def test_loads_that_somebody_else_starts_in_more_parts_are_not_asked_for_their_upstreams() -> None:
    """As λScale's, which come in blocks."""
    cluster, model, clock = known_cluster("b"), known_model("llama3-8b", "a100"), Clock()
    fabric, network = Fabric(cluster), Network(clock)
    plan, _ = plan_of(cluster, fabric, model, (0,), 1, "chain")
    (target,) = plan.targets
    part = part_of(plan, target.worker_id)
    assert part is not None
    gpus = list(fabric.gpus)
    ours = Load(plan, part, model.weights, target.worker_id, None, lambda: None)
    loads = Loads(clock, network, fabric, lambda worker_id: worker_id)
    loads.start({target.worker_id: ours}, max(chain.chunk_bytes for chain in plan.chains))
    assert loads.is_read(gpus[0], [ours])
    theirs = Load(plan, part, model.weights, target.worker_id, None, lambda: None)
    theirs.started(16)
    theirs.flows[15] = ours.flows[0]
    assert theirs.running
    assert not loads.is_read(gpus[0], [theirs])
