"""How many copies load at a time, and what one look does."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.pool.core.cluster import ClusterView
from services.pool.core.loads import LoadLimits
from services.pool.core.placement import MODEL_VISITS, VISITS, Placer
from services.pool.core.steps import MAX_DROPS, Drop, Hold, PlacementDecision
from shared.messages.registry import HostCopy, ModelRecord, WorkerHeartbeat
from tests.records import model
from tests.services.pool.deciding import ANY_NUMBER, LATE_S, Outstanding, cluster_of, place
from tests.services.pool.host_copies import copy_of, holding


def sized(name: str, weights_bytes: int = 100) -> ModelRecord:
    return model(name, weights_bytes=weights_bytes)


def numbered(count: int, weights_bytes: int = 100) -> list[ModelRecord]:
    return [sized(f"m{i:03}", weights_bytes) for i in range(count)]


def holds(decided: PlacementDecision) -> list[tuple[str, str]]:
    return [(s.worker.id, s.record.name) for s in decided.steps if isinstance(s, Hold)]


A, B, C = sized("a"), sized("b"), sized("c")
ONE = LoadLimits(total=1)
ONE_PER_NIC = LoadLimits(per_nic=1)
ONE_PER_HOST = LoadLimits(per_host=1)


# --- turns -------------------------------------------------------------------------------------


def test_no_more_copies_load_than_may_and_the_others_wait_their_turn() -> None:
    cluster = cluster_of([A, B, C], [holding("w0"), holding("w1")], limits=LoadLimits(total=2))
    decided = Placer(cluster).look(LATE_S)
    assert holds(decided) == [("w0", "a"), ("w1", "b")]
    assert [(u.model, u.reason) for u in decided.unplaced] == [("c", "waits its turn: 2 copies are being loaded")]
    assert decided.waiting == {"c"}
    assert not decided.unfinished


def test_models_without_any_copy_come_before_those_that_a_gpu_serves() -> None:
    workers = [holding("w0"), holding("w1", serves=A, capacity=0), holding("w2", serves=B, capacity=0)]
    assert holds(place([A, B, C], workers, limits=ONE)) == [("w0", "c")]


def test_a_copy_that_is_ready_makes_place_for_the_next() -> None:
    cluster = cluster_of([A, B], [holding("w0")], limits=ONE)
    placer = Placer(cluster)
    assert holds(placer.look(1.0)) == [("w0", "a")]
    cluster.put_report(holding("w0", [copy_of(A, "loading")], sequence=2), 1.1)
    assert holds(placer.look(1.2)) == []
    cluster.put_report(holding("w0", [copy_of(A)], sequence=3), 1.3)
    assert holds(placer.look(1.4)) == [("w0", "b")]


def test_a_hold_that_fails_makes_place_for_the_next() -> None:
    cluster = cluster_of([A, B], [holding("w0")], limits=ONE)
    placer = Placer(cluster)
    placer.look(LATE_S)
    cluster.outstanding.hold_failed(("w0", A.model_hash), LATE_S)
    assert holds(placer.look(LATE_S)) == [("w0", "b")]


def test_a_host_that_loads_as_many_as_it_may_is_passed_over() -> None:
    workers = [holding("w0"), holding("w1", [copy_of(sized("old", 500))])]
    models = [A, B, C, sized("old", 500)]
    assert holds(place(models, workers)) == [("w0", "a"), ("w0", "b"), ("w0", "c")]
    decided = place(models, workers, limits=ONE_PER_HOST)
    assert holds(decided) == [("w0", "a"), ("w1", "b")]
    assert "waits its turn: host w" in decided.unplaced[0].reason.replace("host-", "")


def test_a_copy_that_already_loads_when_the_pool_starts_takes_its_hosts_place() -> None:
    workers = [holding("w0", [copy_of(A, "loading")], host="x"), holding("w1", host="x"), holding("w2", host="y")]
    assert holds(place([A, B, C], workers, limits=ONE_PER_HOST)) == [("w2", "b")]


def test_a_copy_comes_from_a_nic_that_sends_none_and_waits_if_there_is_no_such_one() -> None:
    sending = holding("s0", [copy_of(A), copy_of(B), copy_of(C)], host="x")
    leaving = Outstanding(leaving={"s0"})
    workers = [sending, holding("w1", host="y"), holding("w2", host="z")]
    decided = place([A, B, C], workers, outstanding=leaving, limits=ONE_PER_NIC)
    assert holds(decided) == [("w1", "a")]
    assert {u.reason for u in decided.unplaced} == {"waits its turn: all that could send it send other copies"}
    also = holding("s1", serves=B, host="v", capacity=0)
    decided = place([A, B, C], [*workers, also], outstanding=leaving, limits=ONE_PER_NIC)
    assert {m: s for (_, m), s in zip(holds(decided), sources(decided), strict=True)} == {
        "a": ["s0"],
        "b": ["s1", "s0"],
    }


def sources(decided: PlacementDecision) -> list[list[str]]:
    return [[s.worker.id for s in step.sources] for step in decided.steps if isinstance(step, Hold)]


def test_a_source_whose_nic_is_idle_comes_first_and_the_preferred_one_stays_for_when_it_dies() -> None:
    workers = [
        holding("g", serves=A, host="x", capacity=0),
        holding("s", [copy_of(A, cached=True)], host="z", capacity=100),
        holding("w", host="y"),
    ]
    avoided = Outstanding(avoided={("s", A.model_hash)})
    assert sources(place([A], workers, outstanding=avoided, limits=ONE_PER_NIC)) == [["s", "g"]]
    cluster = cluster_of([A], workers, outstanding=avoided, limits=ONE_PER_NIC)
    cluster.loads.begin(("elsewhere", "other"), "far", ("z", ""))
    assert sources(Placer(cluster).look(LATE_S)) == [["g", "s"]]


def test_copies_within_a_host_and_from_disk_wait_for_no_nic() -> None:
    workers = [holding("g", serves=A, host="x"), holding("w", host="x")]
    cluster = cluster_of([A, B], workers, limits=ONE_PER_NIC)
    cluster.loads.begin(("elsewhere", "other"), "far", ("x", ""))
    assert [model for _, model in holds(Placer(cluster).look(LATE_S))] == ["b", "a"]


def test_the_room_of_a_model_that_waits_its_turn_is_kept_for_it() -> None:
    big, small = sized("a-big", 100), sized("z-small", 50)
    workers = [holding("s", [copy_of(big), copy_of(small)], host="x"), holding("w", host="y", capacity=120)]
    disk = sized("disk", 60)
    leaving = Outstanding(leaving={"s"})
    cluster = cluster_of([big, small, disk], workers, outstanding=leaving, limits=ONE_PER_NIC)
    cluster.loads.begin(("elsewhere", "other"), "far", ("x", ""))
    decided = Placer(cluster).look(LATE_S)
    assert holds(decided) == [("w", "disk")]  # it has no copy, and comes first
    cluster = cluster_of([big, small], workers, outstanding=leaving, limits=ONE_PER_NIC)
    cluster.loads.begin(("elsewhere", "other"), "far", ("x", ""))
    decided = Placer(cluster).look(LATE_S)
    assert [u.reason[:14] for u in decided.unplaced] == ["waits its turn", "needs 50 bytes"]


# --- bounds ------------------------------------------------------------------------------------


def test_a_look_at_what_did_not_change_looks_at_nobody_and_says_the_same() -> None:
    models = numbered(50)
    cluster = cluster_of(models, [holding(f"w{i}", capacity=150) for i in range(20)], limits=ANY_NUMBER)
    placer = Placer(cluster)
    first = placer.look(LATE_S, visits=1_000_000)
    assert len(first.steps) == 20
    for worker_id, name in holds(first):
        cluster.put_report(holding(worker_id, [copy_of(sized(name))], capacity=150, sequence=2), LATE_S)
    while (decided := placer.look(LATE_S)).unfinished or decided.steps or decided.asks:
        pass
    assert len(decided.unplaced) == 30
    assert placer.look(LATE_S) is decided
    assert placer.visits == 0
    # A report that says nothing new of copies is no change, either.
    cluster.put_report(holding("w0", [copy_of(sized(holds(first)[0][1]))], capacity=150, sequence=3), LATE_S)
    assert placer.look(LATE_S) is decided


def test_a_look_does_no_more_than_it_may_and_the_next_goes_on_until_every_model_had_its_turn() -> None:
    models = numbered(100)
    cluster = cluster_of(models, [holding(f"w{i}", capacity=10) for i in range(30)])
    placer = Placer(cluster)
    looks, decided = 0, PlacementDecision((), (), unfinished=True)
    while decided.unfinished:
        decided = placer.look(LATE_S, visits=200)
        assert placer.visits <= 200 + MODEL_VISITS + 4 * 30
        looks += 1
    assert looks >= 100 * MODEL_VISITS / 200
    assert {u.model for u in decided.unplaced} == {m.name for m in models}


def test_models_that_come_while_others_are_gone_through_have_their_turn_in_the_next_round() -> None:
    models = numbered(60)
    cluster = cluster_of(models, [holding("w0", capacity=10)])
    placer = Placer(cluster)
    for index in range(300):
        placer.look(LATE_S, visits=100)
        # Something changes all the time.
        cluster.put_report(holding("w0", capacity=10 + index % 2, sequence=index + 2), LATE_S)
        if index == 1:
            cluster.copies.put_model(sized("later", 5))
    assert cluster.outstanding.assigned_workers("hash-of-later") == ["w0"]


def test_a_look_drops_no_more_than_it_may_and_goes_on() -> None:
    gone = [sized(f"g{i:03}", 1) for i in range(MAX_DROPS + 10)]
    workers = [holding("w0", [copy_of(m) for m in gone])]
    placer = Placer(cluster_of([], workers, removed={m.name for m in gone}))
    first, second = placer.look(LATE_S), placer.look(LATE_S)
    assert [len(first.steps), len(second.steps)] == [MAX_DROPS, 10]
    assert (first.unfinished, second.unfinished) == (True, False)


def test_five_hundred_homeless_models_among_a_thousand_full_workers_are_looked_at_bit_by_bit() -> None:
    held = numbered(1000, 1000)
    models = [sized(f"x{i:03}") for i in range(500)]
    served = [
        holding(f"w{i:04}", [copy_of(m)], serves=m if i % 10 else None, host=f"h{i // 8:03}")
        for i, m in enumerate(held)
    ]
    cluster = cluster_of([*held, *models], served, limits=LoadLimits())
    placer = Placer(cluster)
    evicted: Counter[str] = Counter()
    decided = placer.look(LATE_S)
    looks = 1
    while decided.unfinished:
        evicted.update(s.worker.id for s in decided.steps if isinstance(s, Drop))
        assert placer.visits <= VISITS + MODEL_VISITS + 5 * 1000
        decided = placer.look(LATE_S)
        looks += 1
    assert looks < 500
    # Ten models wait for the room of one copy.
    assert sum(evicted.values()) == 50
    assert max(evicted.values()) == 1


# --- as many looks as it takes -------------------------------------------------------------------


class Workers:
    """Workers that load what they are told to, one report later."""

    def __init__(self, cluster: ClusterView, workers: dict[str, tuple[str, int]]) -> None:
        self.cluster = cluster
        self.workers = workers
        self.copies: dict[str, dict[str, HostCopy]] = {worker_id: {} for worker_id in workers}
        self.sequence = 1
        self.most_loading = 0

    def report(self, worker_id: str) -> WorkerHeartbeat:
        host, capacity = self.workers[worker_id]
        copies = self.copies[worker_id].values()
        return holding(worker_id, copies, host=host, capacity=capacity, sequence=self.sequence)

    def do(self, decided: PlacementDecision, now_s: float) -> None:
        for mine in self.copies.values():
            for model_hash, copy in list(mine.items()):
                if copy.state == "loading":
                    mine[model_hash] = copy_of(sized(copy.model, copy.num_bytes))
        for step in decided.steps:
            if isinstance(step, Hold):
                self.copies[step.worker.id][step.record.model_hash] = copy_of(step.record, "loading")
            else:
                self.copies[step.worker.id].pop(step.model_hash, None)
        self.sequence += 1
        loading = sum(c.state == "loading" for mine in self.copies.values() for c in mine.values())
        self.most_loading = max(self.most_loading, loading)
        for worker_id in self.workers:
            self.cluster.put_report(self.report(worker_id), now_s)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=12),
    hosts=st.lists(st.sampled_from(["h0", "h1", "h2"]), min_size=1, max_size=5),
    total=st.integers(1, 4),
    visits=st.integers(1, 60),
)
def test_with_bounds_too_every_model_gets_one_copy_evenly_and_no_more_load_than_may(
    sizes: list[int], hosts: list[str], total: int, visits: int
) -> None:
    cluster = ClusterView((), LoadLimits(total=total))
    workers = Workers(cluster, {f"w{i}": (host, 10_000) for i, host in enumerate(hosts)})
    for index, size in enumerate(sizes):
        cluster.copies.put_model(sized(f"m{index}", size))
    placer = Placer(cluster)
    workers.do(PlacementDecision((), ()), 0.0)
    quiet, looks = 0, 0
    while quiet < 3:
        looks += 1
        assert looks < 1000
        decided = placer.look(float(looks) / 100, visits=visits)
        workers.do(decided, float(looks) / 100)
        quiet = 0 if decided.steps or decided.unfinished else quiet + 1
    assert workers.most_loading <= total
    held = Counter(c.model for mine in workers.copies.values() for c in mine.values())
    assert set(held.values()) == {1}
    assert len(held) == len(sizes)
    used = Counter(dict.fromkeys(hosts, 0))
    for worker_id, mine in workers.copies.items():
        used[workers.workers[worker_id][0]] += sum(c.num_bytes for c in mine.values())
    assert max(used.values()) - min(used.values()) <= max(sizes)
