"""A copy of every model on every host."""

from __future__ import annotations

from services.pool.core.allcache import AllCacheRules
from services.pool.core.copies_policy import copy_rules
from services.pool.core.loads import LoadLimits
from services.pool.core.steps import Drop, Hold, PlacementDecision
from shared.messages.registry import ModelRecord, WorkerHeartbeat
from tests.records import model
from tests.services.pool.deciding import LATE_S, Outstanding, cluster_of
from tests.services.pool.host_copies import copy_of, holding

A, B = model("a", weights_bytes=100), model("b", weights_bytes=100)


def holds(decided: PlacementDecision) -> list[tuple[str, str]]:
    return [(s.worker.id, s.record.name) for s in decided.steps if isinstance(s, Hold)]


def drops(decided: PlacementDecision) -> list[tuple[str, str]]:
    return [(s.worker.id, s.model) for s in decided.steps if isinstance(s, Drop)]


def look(
    models: list[ModelRecord], *workers: WorkerHeartbeat, outstanding: Outstanding | None = None
) -> PlacementDecision:
    return copy_rules("every-host", cluster_of(models, workers, outstanding=outstanding)).look(LATE_S)


def test_every_host_gets_one_of_every_model_on_one_of_its_workers() -> None:
    decided = look([A, B], holding("w0", host="x"), holding("w1", host="x"), holding("w2", host="y"))
    assert holds(decided) == [("w0", "a"), ("w2", "a"), ("w1", "b"), ("w2", "b")]


def test_hosts_that_have_one_or_get_one_are_left_alone() -> None:
    outstanding = Outstanding(holds={("w2", A.model_hash): 100})
    workers = [holding("w0", [copy_of(A)]), holding("w1", [copy_of(A, "loading")]), holding("w2")]
    assert look([A], *workers, outstanding=outstanding).steps == ()


def test_what_a_worker_cached_becomes_the_hosts_copy() -> None:
    workers = [holding("w0", host="x"), holding("w1", [copy_of(A, cached=True)], host="x")]
    assert holds(look([A], *workers)) == [("w1", "a")]


def test_of_several_on_one_host_one_stays_and_not_the_cached_one() -> None:
    decided = look([A], holding("w0", [copy_of(A, cached=True)], host="x"), holding("w1", [copy_of(A)], host="x"))
    assert drops(decided) == [("w0", "a")]


def test_a_host_whose_copy_goes_with_its_worker_gets_another() -> None:
    workers = [holding("w0", [copy_of(A)], host="x"), holding("w1", host="x")]
    assert holds(look([A], *workers, outstanding=Outstanding(leaving={"w0"}))) == [("w1", "a")]


def test_a_host_without_room_has_none_and_a_model_without_any_is_named() -> None:
    decided = look([A], holding("w0", capacity=99), holding("w1"))
    assert (holds(decided), decided.unplaced) == ([("w1", "a")], ())
    [unplaced] = look([A], holding("w0", capacity=99)).unplaced
    assert (unplaced.model, "needs 100 bytes" in unplaced.reason) == ("a", True)


def test_whether_a_model_without_room_is_on_disk_is_asked_so_that_its_last_instance_may_go() -> None:
    cluster = cluster_of([A, B], [holding("w0", [copy_of(B)], serves=A, capacity=100)])
    rules = copy_rules("every-host", cluster)
    assert [ask.record.name for ask in rules.look(LATE_S).asks] == ["a"]
    cluster.disk_answered(A.model_hash, LATE_S, readable=True)
    assert [entry.on_disk for entry in rules.look(LATE_S).unplaced] == [True]
    assert not rules.could_take(A.model_hash)
    assert rules.look(LATE_S + 50.0).asks == ()
    assert [ask.record.name for ask in rules.look(LATE_S + 70.0).asks] == ["a"], "the answer has grown old"


def test_copies_come_in_turns_those_of_models_without_any_first() -> None:
    workers = [holding(f"w{i}", [copy_of(A)] if i == 0 else []) for i in range(3)]
    cluster = cluster_of([A, B], workers, limits=LoadLimits(total=2))
    rules = copy_rules("every-host", cluster)
    assert holds(rules.look(LATE_S)) == [("w0", "b"), ("w1", "b")]
    assert rules.look(LATE_S).steps == ()
    cluster.put_report(holding("w0", [copy_of(A), copy_of(B)], sequence=2), LATE_S)
    cluster.put_report(holding("w1", [copy_of(B)], sequence=2), LATE_S)
    assert holds(rules.look(LATE_S)) == [("w1", "a"), ("w2", "a")]


def test_a_look_is_bounded_where_every_host_has_what_it_should() -> None:
    rules = AllCacheRules(cluster_of([A, B], [holding(f"w{i}", [copy_of(A), copy_of(B)]) for i in range(4)]), 0.0)
    assert [rules.look(LATE_S, visits=4).unfinished for _ in range(3)] == [True, False, False]


def test_a_look_that_could_not_see_all_says_so_and_the_next_continues() -> None:
    cluster = cluster_of([A, B], [holding(f"w{i}") for i in range(4)])
    rules = AllCacheRules(cluster, 0.0)
    first = rules.look(LATE_S, visits=1)
    assert (len(first.steps), first.unfinished) == (4, True)
    second = rules.look(LATE_S, visits=1)
    assert (len(second.steps), second.unfinished) == (4, False)


def test_a_host_that_can_load_no_more_now_counts_as_looked_at() -> None:
    other = model("c", weights_bytes=100)
    workers = [holding("w9", [copy_of(A), copy_of(B), copy_of(other)]), *(holding(f"w{i}") for i in range(4))]
    rules = AllCacheRules(cluster_of([A, B, other], workers, limits=LoadLimits(per_host=1, per_nic=9)), 0.0)
    first = rules.look(LATE_S, visits=1)
    assert (len(first.steps), first.unfinished) == (4, True)
    assert [rules.look(LATE_S, visits=4).unfinished for _ in range(2)] == [True, False]


def test_no_copy_stays_on_disk_only_and_others_can_take_one() -> None:
    workers = [holding("w0", [copy_of(A)]), holding("w1", capacity=0)]
    rules = copy_rules("every-host", cluster_of([A], workers))
    assert not rules.may_stay_on_disk(("w0", A.model_hash))
    assert rules.could_take(A.model_hash)
    last = copy_rules("every-host", cluster_of([A], workers, outstanding=Outstanding(leaving={"w0"})))
    assert not last.could_take(A.model_hash)
