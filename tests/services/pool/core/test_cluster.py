"""What follows from many changes, one after the other, is what follows from the state that they lead to."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from services.pool.core.cluster import ClusterView
from services.pool.core.loads import LoadLimits
from shared.messages.registry import ModelRecord, WorkerHeartbeat
from tests.records import model
from tests.services.pool.host_copies import State, copy_of, holding

MODELS = [
    *(model(f"m{i}", weights_bytes=10 * (i + 1)) for i in range(4)),
    model("twin", model_hash="hash-of-m0", weights_bytes=10),
    model("m1", model_hash="another-m1", weights_bytes=25),
    model("m2", layout_hash="other", weights_bytes=30),
]
WORKERS = [f"w{i}" for i in range(5)]
HASHES = sorted({m.model_hash for m in MODELS})


class Twice:
    """A cluster that follows changes, and what another one can be made of."""

    def __init__(self) -> None:
        self.removed: dict[str, None] = {}
        self.models: dict[str, ModelRecord] = {}
        self.reports: dict[str, WorkerHeartbeat] = {}
        self.cluster = ClusterView(self.removed, LoadLimits())

    def anew(self) -> ClusterView:
        cluster = ClusterView(self.removed, LoadLimits())
        for record in self.models.values():
            cluster.copies.put_model(record)
        for report in self.reports.values():
            cluster.put_report(report, 0.0)
        known = self.cluster.outstanding
        for worker_id, report in self.reports.items():
            if known.is_leaving(worker_id):
                cluster.outstanding.leaves(worker_id, report.worker.incarnation, 0.0)
            for key in ((worker_id, model_hash) for model_hash in HASHES):
                if known.is_avoided(key):
                    cluster.outstanding.hold_failed(key, 0.0)
                if key[1] in (holds := known.holds(worker_id)):
                    cluster.outstanding.hold_sent(key, holds[key[1]], 0.0)
                if known.is_dropped(key):
                    cluster.outstanding.drop_sent(key, 0.0)
                if known.is_going(key):
                    cluster.outstanding.give_up(key, 0.0)
        return cluster

    def put_model(self, record: ModelRecord) -> None:
        self.removed.pop(record.name, None)
        self.models[record.name] = record
        self.cluster.copies.put_model(record)

    def remove_model(self, name: str) -> None:
        if self.models.pop(name, None) is not None:
            self.removed[name] = None
            self.cluster.copies.remove_model(name)

    def report(self, report: WorkerHeartbeat) -> None:
        self.reports[report.worker.worker_id] = report
        self.cluster.put_report(report, 0.0)

    def forget(self, worker_id: str) -> None:
        self.reports.pop(worker_id, None)
        self.cluster.forget(worker_id)

    def ask(self, key: tuple[str, str], what: str) -> None:
        """If it makes sense: what is held can be dropped, what is not can be."""
        held = self.cluster.copies.host_copy(key) is not None
        if key[0] in self.reports and held == (what in ("drop", "give up")):
            steps = self.cluster.outstanding
            how = {"drop": steps.drop_sent, "avoid": steps.hold_failed, "give up": steps.give_up}
            if what == "hold":
                steps.hold_sent(key, 7, 0.0)
            else:
                how[what](key, 0.0)


def derived(cluster: ClusterView) -> dict[str, Any]:
    cluster.refresh()
    cluster.find_evictable()
    memory, index = cluster.memory, cluster.copies
    return {
        "needy": cluster.needy,
        "surplus": cluster.surplus,
        "strangers": {w: {(h.key, why) for h, why in found} for w, found in cluster.strangers.items()},
        "exposed": {h: cluster.exposed.of(h) for h in index.by_hash},
        "without": (cluster.without_copy, cluster.without_host_copy),
        "evictable": {w: {h.key for h, _ in cluster.evictable(w)} for w in index.workers()},
        "rankings": [
            list(r)
            for r in (
                memory.by_bytes,
                memory.by_free_bytes,
                memory.by_free_after_drops,
                memory.by_free_after_evictions,
                index.capacities,
            )
        ],
        "hosts": memory.hosts,
        "host bytes": dict(index.host_bytes.items()),
        "placed": {host: memory.host_bytes(host) for host in index.host_bytes},
        "copies": {
            h: (c.record, c.serving, c.draining, c.present, c.placed, c.cached, c.num_complete)
            for h, c in index.by_hash.items()
        },
        "loads": len(cluster.loads),
    }


reports = st.builds(
    lambda worker_id, host, capacity, copies, serves, state: holding(
        worker_id,
        [copy_of(MODELS[i], copy_state, cached=cached) for i, copy_state, cached in copies],
        host=host,
        capacity=capacity,
        serves=serves,
        state=state,
    ),
    st.sampled_from(WORKERS),
    st.sampled_from(["x", "y", "z"]),
    st.sampled_from([0, 40, 100]),
    st.lists(
        st.tuples(st.integers(0, len(MODELS) - 1), st.sampled_from(get_args(State)), st.booleans()),
        max_size=3,
        unique_by=lambda c: MODELS[c[0]].model_hash,
    ),
    st.sampled_from([None, *MODELS]),
    st.sampled_from(["serving", "draining", "loading"]),
)
changes = st.one_of(
    st.tuples(st.just("report"), reports),
    st.tuples(st.just("report"), reports),
    st.tuples(st.just("forget"), st.sampled_from(WORKERS)),
    st.tuples(st.just("put"), st.sampled_from(MODELS)),
    st.tuples(st.just("remove"), st.sampled_from([m.name for m in MODELS])),
    st.tuples(st.just("leave"), st.sampled_from(WORKERS)),
    st.tuples(st.sampled_from(["drop", "give up"]), st.tuples(st.sampled_from(WORKERS), st.sampled_from(HASHES))),
    st.tuples(st.sampled_from(["hold", "avoid"]), st.tuples(st.sampled_from(WORKERS), st.sampled_from(HASHES))),
    st.tuples(st.just("look"), st.none()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(changes, max_size=30))
def test_a_cluster_that_followed_changes_knows_what_one_that_was_told_the_outcome_does(
    made: list[tuple[str, Any]],
) -> None:
    twice = Twice()
    for what, about in made:
        apply(twice, what, about)
    assert derived(twice.cluster) == derived(twice.anew())


def apply(twice: Twice, what: str, about: Any) -> None:
    if what == "report":
        twice.report(about)
    elif what == "forget":
        twice.forget(about)
    elif what == "put":
        twice.put_model(about)
    elif what == "remove":
        twice.remove_model(about)
    elif what == "leave":
        if (report := twice.reports.get(about)) is not None:
            twice.cluster.outstanding.leaves(about, report.worker.incarnation, 0.0)
    elif what == "look":
        derived(twice.cluster)
    else:
        twice.ask(about, what)


def test_claims_and_changes_do_not_disturb_each_other() -> None:
    cluster = ClusterView((), LoadLimits())
    cluster.put_report(holding("w0", capacity=100), 0.0)
    cluster.put_report(holding("w1", capacity=100), 0.0)
    cluster.refresh()
    memory = cluster.memory
    memory.claim("w0", 30)
    memory.claim("w1", 40)
    cluster.put_report(holding("w0", [copy_of(MODELS[0])], capacity=100), 0.0)
    cluster.forget("w1")
    cluster.refresh()
    assert list(memory.by_free_bytes) == [(60, "w0")]
    memory.drop_claims()
    assert list(memory.by_free_bytes) == [(90, "w0")]


def test_traffic_on_a_nic_is_no_change() -> None:
    cluster = ClusterView((), LoadLimits())
    cluster.put_report(holding("w0"), 0.0)
    cluster.refresh()
    version = cluster.version
    cluster.put_report(holding("w0", sequence=2), 0.0)
    cluster.refresh()
    assert cluster.version == version
