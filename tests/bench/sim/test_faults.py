"""Workers that die: what they had goes on elsewhere, and they come back with nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.replay.plan import PlannedRequest, Shape, plan_requests
from bench.sim.choices import check
from bench.sim.clock import Clock
from bench.sim.cluster import known_cluster
from bench.sim.fabric import Fabric
from bench.sim.faults import Fault, drawn
from bench.sim.flows import Network
from bench.sim.loading import Load, Loads
from bench.sim.models import known_model
from bench.sim.run import simulate
from bench.sim.run_result import RunResult
from bench.sim.setup import Frame, Setup
from bench.systems import SYSTEMS
from bench.traces.request import Trace, TraceRequest
from services.worker.core.upstreams import Upstream, part_of
from shared.errors import BadRequest
from tests.bench.sim.plans import plan_of

MODEL = known_model("llama3-8b", "a100")
SETUP = Setup(cluster=known_cluster("b"), model=MODEL)
NOTICE_S = 0.2


def requests(count: int = 60) -> tuple[PlannedRequest, ...]:
    """Ten in a second."""
    trace = Trace("even", tuple([TraceRequest(0.1 * number, 1000, 50) for number in range(count)]))
    return plan_requests(trace, Shape(context_tokens=8192))


def struck(name: str, *faults: Fault) -> RunResult:
    result = simulate(SETUP, SYSTEMS[name], requests(), frame=Frame(faults=faults))
    assert [record.failure for record in result.records if record.failure is not None] == []
    assert [record.output_tokens for record in result.records] == [50] * len(requests())
    return result


def longest_s(result: RunResult) -> float:
    return max(record.e2e_s for record in result.records)


@pytest.mark.parametrize("name", ["blitz", "sllm", "blitz-colocated"])
def test_what_a_worker_had_goes_on_elsewhere(name: str) -> None:
    """Its requests wait for an instance in its place, and continue behind their last tokens."""
    result = struck(name, Fault(2.05, 0))
    assert result.num_died == 1
    assert longest_s(result) > longest_s(struck(name)) + 0.05


def test_a_worker_is_back_with_nothing_or_stays_away() -> None:
    """Both first instances die; the only GPUs left are those of the others."""
    for back_s in (0.5, math.inf):
        result = struck("blitz", Fault(1.0, 0, back_s), Fault(1.0, 8, back_s), Fault(4.5))
        assert result.num_died == 3


def test_who_dies_when_is_drawn_by_the_seed() -> None:
    faults = drawn(2.0, 10.0, 410.0, seed=1)
    assert faults == drawn(2.0, 10.0, 410.0, seed=1) != drawn(2.0, 10.0, 410.0, seed=2)
    assert 150 < len(faults) < 250
    assert all(10.0 <= fault.at_s < 410.0 and fault.worker is None for fault in faults)
    often = replace(SETUP, kill_every_s=1.0)
    one, same = (simulate(often, SYSTEMS["blitz"], requests()) for _ in range(2))
    assert one.num_died > 2
    assert one.records == same.records
    assert not [record for record in one.records if record.failure is not None]


@pytest.mark.parametrize("every_s", [0.0, -1.0, math.nan, math.inf])
def test_workers_cannot_die_so_often(every_s: float) -> None:
    with pytest.raises(BadRequest, match="--kill-every"):
        check(replace(SETUP, kill_every_s=every_s), [])


def test_pipelines_are_simulated_without() -> None:
    with pytest.raises(BadRequest, match="lambdascale is simulated without workers that die"):
        check(replace(SETUP, kill_every_s=60.0), [SYSTEMS["lambdascale"]])


def test_targets_climb_past_a_source_that_dies() -> None:
    """Of a chain over two hosts, from one GPU: who reads from the first target goes on from the source, with what it
    has; the others behind it with it."""
    cluster, clock = known_cluster("a"), Clock()
    fabric = Fabric(cluster)
    plan, planned = plan_of(cluster, fabric, MODEL, (0,), 12, "chain")
    dead: set[str] = set()
    ended: dict[str, float] = {}

    def is_there(upstream: Upstream, _load: Load) -> bool:
        return upstream.worker_id not in dead

    network = Network(clock)
    loads = Loads(clock, network, fabric, str, is_there=is_there, notice_s=NOTICE_S)
    theirs: dict[str, Load] = {}
    for target in plan.targets:
        part = part_of(plan, target.worker_id)
        assert part is not None

        def end(worker_id: str = target.worker_id) -> None:
            ended[worker_id] = clock.now_s

        theirs[target.worker_id] = Load(plan, part, MODEL.weights, target.worker_id, None, end)
    loads.start(theirs, max(chain.chunk_bytes for chain in plan.chains))
    sources = {stripe.upstreams[0].worker_id for load in theirs.values() for stripe in load.part.stripes}
    first = next(worker_id for worker_id in theirs if worker_id in sources)
    last_s = max(planned.predicted_s.values())

    def die() -> None:
        dead.add(first)
        loads.abort(theirs[first])
        loads.lost(first)

    clock.at(planned.predicted_s[first] / 2, die)
    clock.run()
    assert ended.keys() == theirs.keys() - {first}
    late = {name for name in ended if ended[name] > planned.predicted_s[name] * 1.05}
    readers = {
        name for name, load in theirs.items() for stripe in load.part.stripes if stripe.upstreams[0].worker_id == first
    }
    assert readers
    assert readers <= late | {first}
    assert max(ended.values()) < 2 * last_s + NOTICE_S, "what had arrived is kept"
    assert not network.running()
