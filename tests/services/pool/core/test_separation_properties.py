"""Small clusters at random, whose instances come and go: copies come to rest, apart from their instances wherever that
is possible, and evenly as far as that leaves them free to move."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from services.pool.core.cluster import ClusterView
from services.pool.core.copies import ModelCopies
from services.pool.core.loads import LoadLimits
from services.pool.core.placement import Placer
from services.pool.core.rebalance import HELD_BACK_S
from services.pool.core.separation import EXPOSED_S, MOVE_EVERY_S
from services.pool.core.steps import Drop, Hold, PlacementDecision
from shared.failure_domains import FailureDomain
from shared.messages.registry import HostCopy, ModelRecord
from tests.records import model
from tests.services.pool.host_copies import copy_of, holding

LOOK_S = 0.5
AMPLE = 10_000


@dataclass
class World:
    """Workers that do what they are told: a copy is there one look after it began to load."""

    models: list[ModelRecord]
    workers: dict[str, tuple[str, int]]
    """Host and capacity by id."""
    serves: dict[str, ModelRecord]
    copies: dict[str, dict[str, HostCopy]]
    limits: LoadLimits
    now_s: float = 0.0
    sequence: int = 0
    num_holds: int = 0
    cluster: ClusterView = field(init=False)
    placer: Placer = field(init=False)

    def __post_init__(self) -> None:
        self.cluster = ClusterView((), self.limits)
        self.placer = Placer(self.cluster)
        for record in self.models:
            self.cluster.copies.put_model(record)
        self.report()

    def report(self) -> None:
        self.sequence += 1
        for worker_id, (host, capacity) in self.workers.items():
            copies, serves = self.copies.get(worker_id, {}).values(), self.serves.get(worker_id)
            made = holding(worker_id, copies, serves=serves, host=host, capacity=capacity, sequence=self.sequence)
            self.cluster.put_report(made, self.now_s)
        self.cluster.refresh()

    def pass_by(self, seconds: float) -> PlacementDecision:
        """What is decided then, and done."""
        self.now_s += seconds
        before = self.complete()
        self.cluster.outstanding.expire(self.now_s)
        decided = self.placer.look(self.now_s)
        for mine in self.copies.values():
            for copy in [c for c in mine.values() if c.state == "loading"]:
                mine[copy.model_hash] = copy_of(next(m for m in self.models if m.model_hash == copy.model_hash))
        for step in decided.steps:
            mine = self.copies.setdefault(step.worker.id, {})
            if isinstance(step, Drop):
                del mine[step.model_hash]
                continue
            assert isinstance(step, Hold)
            self.num_holds += 1
            state = "ready" if step.record.model_hash in mine else "loading"
            mine[step.record.model_hash] = copy_of(step.record, state)  # type: ignore[arg-type]
            assert self.free(step.worker.id) >= 0
        self.report()
        assert before <= self.complete()
        return decided

    def complete(self) -> set[str]:
        """Hashes of the models that have a complete copy somewhere."""
        ready = {c.model_hash for mine in self.copies.values() for c in mine.values() if c.state == "ready"}
        return ready | {record.model_hash for record in self.serves.values()}

    def free(self, worker_id: str) -> int:
        return self.workers[worker_id][1] - sum(c.num_bytes for c in self.copies.get(worker_id, {}).values())

    def settle(self) -> None:
        """Until nothing happens any more, however long one waits."""
        quiet = 0
        for _ in range(400):
            # The last of these is when all may be looked at again for the time alone.
            waits_s = (LOOK_S, EXPOSED_S, HELD_BACK_S, HELD_BACK_S, MOVE_EVERY_S)[quiet]
            decided = self.pass_by(waits_s)
            quiet = 0 if decided.steps or decided.unfinished else quiet + 1
            if quiet == 5:
                return
        raise AssertionError("it does not come to rest")

    def apart(self) -> None:
        """No copy has more in common with all instances than it would have elsewhere, where there is room."""
        for copies in self.cluster.copies.by_hash.values():
            if not copies.placed:
                continue
            [held] = copies.placed.values()
            here = copies.domain_of(held.worker)
            for worker_id, info in self.cluster.memory.workers.items():
                if worker_id not in copies.placed and self.has_room(copies, worker_id):
                    assert copies.domain_of(info) >= here

    def even(self) -> None:
        """No copy could move to a host that is emptier, and would still be, and have as little in common there."""
        memory = self.cluster.memory
        for copies in self.cluster.copies.by_hash.values():
            for held in copies.placed.values():
                for worker_id, info in memory.workers.items():
                    gap = memory.host_bytes(held.worker.host) - memory.host_bytes(info.host)
                    if gap > held.copy.num_bytes and self.has_room(copies, worker_id):
                        assert copies.domain_of(info) > copies.domain_of(held.worker)

    def has_room(self, copies: ModelCopies, worker_id: str) -> bool:
        wanted = self.cluster.wanted_bytes(copies, worker_id)
        return wanted is not None and wanted <= self.cluster.memory.free_bytes(worker_id)


@st.composite
def worlds(draw: st.DrawFn, capacities: st.SearchStrategy[int]) -> World:
    sizes = draw(st.lists(st.integers(1, 100), min_size=1, max_size=6))
    models = [model(f"m{i}", weights_bytes=size) for i, size in enumerate(sizes)]
    hosts = st.sampled_from(["h0", "h1", "h2"])
    places = draw(st.lists(st.tuples(hosts, capacities), min_size=1, max_size=6))
    workers = {f"w{i}": where for i, where in enumerate(places)}
    copies: dict[str, dict[str, HostCopy]] = {}
    for worker_id, (_, capacity) in workers.items():
        chosen = st.tuples(st.sampled_from(models), st.booleans())
        mine = draw(st.lists(chosen, max_size=3, unique_by=lambda c: c[0].name))
        if sum(record.weights_bytes for record, _ in mine) <= capacity:
            copies[worker_id] = {record.model_hash: copy_of(record, cached=cached) for record, cached in mine}
    limits = draw(st.sampled_from([LoadLimits(), LoadLimits(total=1), LoadLimits(per_host=1, per_nic=1)]))
    return World(models, workers, draw(instances(models, list(workers))), copies, limits)


@st.composite
def instances(draw: st.DrawFn, models: list[ModelRecord], workers: list[str]) -> dict[str, ModelRecord]:
    served = {worker_id: draw(st.sampled_from([None, *models])) for worker_id in workers}
    return {worker_id: record for worker_id, record in served.items() if record is not None}


@settings(max_examples=120, deadline=None)
@given(st.one_of(worlds(st.just(AMPLE)), worlds(st.integers(0, 250))), st.data())
def test_copies_come_to_rest_apart_from_their_instances_and_evenly(world: World, data: st.DataObject) -> None:
    for _ in range(3):
        world.settle()
        world.apart()
        world.even()
        world.serves = data.draw(instances(world.models, list(world.workers)))
        world.report()


@settings(max_examples=50, deadline=None)
@given(worlds(st.just(AMPLE)), st.data())
def test_with_room_no_copy_shares_a_worker_with_the_only_instance_while_there_is_another(
    world: World, data: st.DataObject
) -> None:
    for _ in range(3):
        world.settle()
        several = len({host for host, _ in world.workers.values()}) > 1
        for copies in world.cluster.copies.by_hash.values():
            [held] = copies.placed.values()
            domain = copies.domain_of(held.worker)
            assert domain is not FailureDomain.WORKER or len(world.workers) == 1
            assert domain is not FailureDomain.HOST or not several
        world.serves = data.draw(instances(world.models, list(world.workers)))
        world.report()


@settings(max_examples=50, deadline=None)
@given(worlds(st.just(AMPLE)), st.data())
def test_instances_that_come_and_go_before_a_while_is_over_move_nothing(world: World, data: st.DataObject) -> None:
    world.settle()
    before, held = world.serves, world.num_holds
    for _ in range(5):
        world.serves = data.draw(instances(world.models, list(world.workers)))
        world.report()
        world.pass_by(LOOK_S)
    world.serves = before
    world.report()
    world.settle()
    assert world.num_holds == held
