"""Clusters at random: whatever they start from, the steps lead to one copy per model, evenly, and lose none."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from services.pool.core.copies import ModelCopies
from services.pool.core.steps import Drop, Hold, PlacementDecision
from shared.messages.registry import HostCopy, ModelRecord, WorkerHeartbeat
from tests.records import model, worker
from tests.services.pool.deciding import cluster_of, place
from tests.services.pool.host_copies import copy_of, holding

AMPLE = 10_000


@dataclass
class World:
    """Workers that do what they are told."""

    models: list[ModelRecord]
    workers: dict[str, tuple[str, int]]
    """Host and capacity by id."""
    serves: dict[str, ModelRecord]
    copies: dict[str, list[HostCopy]] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)

    def reports(self) -> list[WorkerHeartbeat]:
        return [
            holding(w, self.copies.get(w, []), serves=self.serves.get(w), host=host, capacity=capacity)
            for w, (host, capacity) in self.workers.items()
        ]

    def by_hash(self) -> dict[str, ModelCopies]:
        known = cluster_of(self.models, self.reports()).copies.by_hash
        return {h: copies for h, copies in known.items() if copies.record is not None}

    def complete(self) -> dict[str, int]:
        return {h: copies.num_complete for h, copies in self.by_hash().items()}

    def free(self, worker_id: str) -> int:
        return self.workers[worker_id][1] - sum(c.num_bytes for c in self.copies.get(worker_id, []))

    def step(self) -> PlacementDecision:
        """Decide and do it; checks that the steps could be done and took no last copy."""
        decided = place(self.models, self.reports(), removed=self.removed)
        assert decided == place(self.models, list(reversed(self.reports())), removed=self.removed)
        before = self.complete()
        for step in decided.steps:
            mine = self.copies.setdefault(step.worker.id, [])
            if isinstance(step, Drop):
                mine[:] = [c for c in mine if c.model_hash != step.model_hash]
        for model_hash, count in self.complete().items():
            assert count > 0 or before[model_hash] == 0
        for step in decided.steps:
            if isinstance(step, Hold):
                mine = self.copies[step.worker.id]
                mine[:] = [c for c in mine if c.model_hash != step.record.model_hash]
                assert self.free(step.worker.id) >= step.record.weights_bytes
                mine.append(copy_of(step.record))
        return decided

    def settle(self, most: int = 200) -> PlacementDecision:
        for _ in range(most):
            decided = self.step()
            if not decided.steps:
                return decided
        raise AssertionError("it does not come to rest")

    def host_bytes(self) -> dict[str, int]:
        placed = {host: 0 for host, capacity in self.workers.values() if capacity}
        for worker_id, copies in self.copies.items():
            placed[self.workers[worker_id][0]] += sum(c.num_bytes for c in copies if not c.cached)
        return placed


@st.composite
def worlds(draw: st.DrawFn, *, ample: bool) -> World:
    sizes = draw(st.lists(st.integers(1, 100), min_size=1, max_size=8))
    models = [model(f"m{i}", weights_bytes=size) for i, size in enumerate(sizes)]
    capacity = st.just(AMPLE) if ample else st.integers(0, 200)
    hosts = st.sampled_from(["h0", "h1", "h2", "h3"])
    places = draw(st.lists(st.tuples(hosts, capacity), min_size=1, max_size=7))
    world = World(models, {f"w{i}": where for i, where in enumerate(places)}, {})
    gone = model("gone", weights_bytes=30)
    world.removed = {"gone"}
    for worker_id in world.workers:
        if draw(st.booleans()):
            world.serves[worker_id] = draw(st.sampled_from(models))
        chosen = draw(st.lists(st.sampled_from([*models, gone]), max_size=4, unique_by=lambda m: m.name))
        for record in chosen:
            if record.weights_bytes <= world.free(worker_id):
                copy = copy_of(record, cached=draw(st.booleans()))
                world.copies.setdefault(worker_id, []).append(copy)
    return world


@settings(max_examples=150, deadline=None)
@given(worlds(ample=True))
def test_with_room_every_model_gets_exactly_one_placed_copy_and_hosts_hold_even_shares(world: World) -> None:
    assert world.settle().unplaced == ()
    for copies in world.by_hash().values():
        assert len(copies.placed) == 1
    assert all(c.model != "gone" for copies in world.copies.values() for c in copies)
    placed = world.host_bytes()
    if not world.serves:
        assert max(placed.values()) - min(placed.values()) <= max(m.weights_bytes for m in world.models)
    # A copy whose model's instances are all on the emptier host stays apart from them.
    for copies in world.by_hash().values():
        [held] = copies.placed.values()
        for worker_id, (host, _) in world.workers.items():
            if placed[held.worker.host] - placed[host] > held.copy.num_bytes:
                assert copies.domain_of(worker(worker_id, host=host)) > copies.domain_of(held.worker)


@settings(max_examples=150, deadline=None)
@given(worlds(ample=False))
def test_with_little_room_it_comes_to_rest_and_every_model_without_a_copy_is_named(world: World) -> None:
    decided = world.settle()
    placed = {h for h, c in world.by_hash().items() if c.placed}
    assert {u.model_hash for u in decided.unplaced} == {m.model_hash for m in world.models} - placed
    assert all(u.reason for u in decided.unplaced)


@settings(max_examples=100, deadline=None)
@given(worlds(ample=True), st.data())
def test_after_the_loss_of_a_host_the_invariant_is_there_again(world: World, data: st.DataObject) -> None:
    world.settle()
    lost = data.draw(st.sampled_from(sorted({host for host, _ in world.workers.values()})))
    for worker_id in [w for w, (host, _) in world.workers.items() if host == lost]:
        del world.workers[worker_id]
        world.copies.pop(worker_id, None)
        world.serves.pop(worker_id, None)
    if world.workers:
        assert world.settle().unplaced == ()
        assert min(world.complete().values()) > 0
