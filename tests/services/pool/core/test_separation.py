"""A model's only copy and its instances: apart from the first, and apart again after a while when they are not."""

from __future__ import annotations

import msgspec

from services.pool.core.cluster import ClusterView
from services.pool.core.loads import LoadLimits
from services.pool.core.placement import MODEL_VISITS, Placer
from services.pool.core.rebalance import HELD_BACK_S
from services.pool.core.separation import EXPOSED_S, MOVE_EVERY_S
from services.pool.core.steps import Drop, Hold, PlacementDecision
from shared.messages.registry import WorkerHeartbeat
from tests.records import model
from tests.services.pool.deciding import ANY_NUMBER, LATE_S, Outstanding, cluster_of, place
from tests.services.pool.host_copies import copy_of, holding

A, B, C = (model(name, weights_bytes=100) for name in "abc")
DUE_S = LATE_S + EXPOSED_S


def steps(decided: PlacementDecision) -> list[tuple[str, str, str]]:
    return [
        ("hold", s.worker.id, s.record.name) if isinstance(s, Hold) else ("drop", s.worker.id, s.model)
        for s in decided.steps
    ]


def placer_of(*reports: WorkerHeartbeat, outstanding: Outstanding | None = None) -> tuple[ClusterView, Placer]:
    """It has looked once."""
    cluster = cluster_of([A, B, C], reports, outstanding=outstanding, limits=ANY_NUMBER)
    for record in (A, B, C):
        if not any(c.model == record.name for report in reports for c in report.host_copies):
            cluster.copies.remove_model(record.name)
    placer = Placer(cluster)
    assert placer.look(LATE_S).steps == ()
    return cluster, placer


# --- which copies, when and where to -----------------------------------------------------------


def test_a_copy_on_the_worker_of_the_only_instance_moves_to_another_host_after_a_while() -> None:
    first = holding("w0", [copy_of(A)], serves=A, host="x")
    others = holding("w1", host="x"), holding("w2", host="y")
    cluster, placer = placer_of(first, *others)
    assert placer.look(DUE_S - 0.1).steps == ()
    [step] = placer.look(DUE_S).steps
    assert isinstance(step, Hold)
    assert (step.worker.id, step.record, step.sources[0].worker_id) == ("w2", A, "w0")
    assert "w0" in step.reason
    assert placer.look(DUE_S + 60.0).steps == (), "it is on its way"
    cluster.put_report(holding("w2", [copy_of(A)], host="y", sequence=2), DUE_S + 61.0)
    assert steps(placer.look(DUE_S + 61.0)) == [("drop", "w0", "a")]
    cluster.put_report(holding("w0", serves=A, host="x", sequence=2), DUE_S + 62.0)
    assert placer.look(DUE_S + 62.0).steps == ()
    assert placer.look(DUE_S + 1000.0).steps == ()


def test_the_copy_of_a_model_that_wakes_beside_it_again_and_again_moves_once_in_a_while() -> None:
    cluster, placer = placer_of(holding("w0", [copy_of(A)], serves=A), holding("w1"))
    assert steps(placer.look(DUE_S)) == [("hold", "w1", "a")]
    cluster.put_report(holding("w1", [copy_of(A)], sequence=2), DUE_S + 1.0)
    assert steps(placer.look(DUE_S + 1.0)) == [("drop", "w0", "a")]
    cluster.put_report(holding("w0", sequence=3), DUE_S + 2.0)
    cluster.put_report(holding("w1", [copy_of(A)], serves=A, sequence=3), DUE_S + 2.0)
    for after_s in (2.0, 2.0 + EXPOSED_S, MOVE_EVERY_S - 0.1):
        assert placer.look(DUE_S + after_s).steps == ()
    assert steps(placer.look(DUE_S + MOVE_EVERY_S)) == [("hold", "w0", "a")]


def test_a_move_that_failed_is_none() -> None:
    cluster, placer = placer_of(holding("w0", [copy_of(A)], serves=A), holding("w1"), holding("w2"))
    assert steps(placer.look(DUE_S)) == [("hold", "w1", "a")]
    cluster.outstanding.hold_failed(("w1", A.model_hash), DUE_S + 1.0)
    assert placer.look(DUE_S + 1.0).steps == ()
    assert steps(placer.look(DUE_S + 1.0 + EXPOSED_S)) == [("hold", "w2", "a")]


def test_another_worker_of_the_host_is_better_than_none() -> None:
    _, placer = placer_of(
        holding("w0", [copy_of(A)], serves=A, host="x"), holding("w1", host="x"), holding("w2", host="y", capacity=99)
    )
    assert steps(placer.look(DUE_S)) == [("hold", "w1", "a")]


def test_a_copy_on_the_host_of_all_instances_moves_to_another_host_and_only_there() -> None:
    beside = holding("w0", [copy_of(A)], host="x"), holding("w1", serves=A, host="x"), holding("w2", host="x")
    _, placer = placer_of(*beside, holding("w3", host="y"))
    assert steps(placer.look(DUE_S)) == [("hold", "w3", "a")]
    _, placer = placer_of(*beside, holding("w3", host="y", capacity=99))
    assert placer.look(DUE_S).steps == ()


def test_a_copy_stays_while_an_instance_serves_elsewhere_or_none_does() -> None:
    here = holding("w0", [copy_of(A)], serves=A)
    for other in (holding("w1", serves=A), holding("w1", [copy_of(A, cached=True)], serves=A)):
        _, placer = placer_of(here, other)
        assert placer.look(DUE_S).steps == ()
    for state in ("loading", "draining"):
        _, placer = placer_of(holding("w0", [copy_of(A)], serves=A, state=state), holding("w1"))
        assert placer.look(DUE_S).steps == ()
    going = holding("w1", serves=A, state="draining")
    assert going.instance is not None
    going = msgspec.structs.replace(going, instance=msgspec.structs.replace(going.instance, weights_digest="whole"))
    _, placer = placer_of(here, going)
    assert steps(placer.look(DUE_S)) == [("hold", "w1", "a")]


def test_scaling_begins_the_while_anew() -> None:
    cluster, placer = placer_of(holding("w0", [copy_of(A)], serves=A), holding("w1"))
    cluster.put_report(holding("w1", serves=A, sequence=2), LATE_S + 1.0)
    assert placer.look(LATE_S + 1.0).steps == ()
    cluster.put_report(holding("w1", sequence=3), LATE_S + 2.0)
    assert placer.look(LATE_S + 2.0).steps == ()
    assert placer.look(LATE_S + 1.0 + EXPOSED_S).steps == ()
    assert steps(placer.look(LATE_S + 2.0 + EXPOSED_S)) == [("hold", "w1", "a")]


def test_while_an_instance_loads_nothing_moves_however_long_that_takes() -> None:
    coming = holding("w1", serves=A, state="loading")
    cluster, placer = placer_of(holding("w0", [copy_of(A)], serves=A), coming)
    assert placer.look(DUE_S + 100.0).steps == ()
    cluster.put_report(holding("w1", sequence=2), DUE_S + 101.0)
    assert placer.look(DUE_S + 102.0).steps == ()
    assert steps(placer.look(DUE_S + 102.0 + EXPOSED_S)) == [("hold", "w1", "a")]


def test_nothing_is_evicted_for_it_and_it_moves_once_there_is_room() -> None:
    full = holding("w1", [copy_of(B)], serves=C, capacity=100)
    away = holding("w2", serves=B, capacity=0)
    cluster, placer = placer_of(holding("w0", [copy_of(A)], serves=A), full, away)
    assert placer.look(DUE_S).steps == ()
    assert placer.look(DUE_S + 1.0).steps == ()
    cluster.put_report(holding("w3", sequence=1), DUE_S + 2.0)
    assert steps(placer.look(DUE_S + 2.0)) == [("hold", "w3", "a")]


def test_it_moves_to_no_worker_that_leaves_or_has_just_failed_to_hold_it() -> None:
    workers = [holding("w0", [copy_of(A)], serves=A), holding("w1"), holding("w2"), holding("w3")]
    outstanding = Outstanding(leaving={"w1"}, avoided={("w2", A.model_hash)})
    _, placer = placer_of(*workers, outstanding=outstanding)
    assert steps(placer.look(DUE_S)) == [("hold", "w3", "a")]


def test_a_worker_that_fails_to_hold_it_is_not_asked_at_once_again() -> None:
    cluster, placer = placer_of(holding("w0", [copy_of(A)], serves=A), holding("w1"))
    assert steps(placer.look(DUE_S)) == [("hold", "w1", "a")]
    cluster.outstanding.hold_failed(("w1", A.model_hash), DUE_S)
    for after_s in (0.5, 5.0, EXPOSED_S - 0.1):
        cluster.outstanding.expire(DUE_S + after_s)
        assert placer.look(DUE_S + after_s).steps == ()
    cluster.outstanding.expire(DUE_S + EXPOSED_S + 1.0)
    assert steps(placer.look(DUE_S + EXPOSED_S + 1.0)) == [("hold", "w1", "a")]


def test_what_a_worker_cached_for_itself_becomes_the_copy_that_is_apart() -> None:
    cached = holding("w1", [copy_of(A, cached=True)], capacity=100)
    _, placer = placer_of(holding("w0", [copy_of(A)], serves=A), cached)
    assert steps(placer.look(DUE_S)) == [("hold", "w1", "a")]


# --- one order for all rules -------------------------------------------------------------------


def test_the_first_copy_is_apart_even_where_others_are_emptier() -> None:
    served = holding("w0", serves=A, host="x")
    fuller = holding("w2", [copy_of(B)], host="y")
    assert steps(place([A, B], [served, holding("w1", host="x"), fuller])) == [("hold", "w2", "a")]
    tight = holding("w2", [copy_of(B)], host="y", capacity=100)
    assert steps(place([A, B, C], [served, holding("w1", [copy_of(C)], host="x"), tight])) == [("hold", "w1", "a")]


def test_the_first_copy_is_apart_among_more_workers_than_are_compared_one_by_one() -> None:
    held = [model(f"m{i:02}", weights_bytes=10) for i in range(80)]
    others = [holding(f"w{i:02}", [copy_of(m)], host=f"h{i // 4:02}") for i, m in enumerate(held)]
    here = [holding("a0", serves=A, host="a"), holding("a1", host="a")]
    assert steps(place([A, *held], [*here, *others]))[0] == ("hold", "w00", "a")
    filled = [holding(f"w{i:02}", [copy_of(m)], host=f"h{i // 4:02}", capacity=10) for i, m in enumerate(held)]
    large = [holding(f"b{i:02}", host="a", capacity=1000) for i in range(70)]
    assert steps(place([A, *held], [*here, *filled, *large])) == [("hold", "a1", "a")]


def test_of_two_copies_the_one_stays_that_is_apart_though_its_host_is_fuller() -> None:
    workers = [
        holding("w0", [copy_of(A)], serves=A, host="x"),
        holding("w1", [copy_of(A), copy_of(B)], host="x"),
        holding("w2", [copy_of(A), copy_of(B), copy_of(C)], host="y"),
    ]
    assert ("drop", "w2", "a") not in steps(place([A, B, C], workers))
    assert steps(place([A, B], workers[:2])) == [("drop", "w0", "a")]


def test_no_copy_moves_beside_the_only_instance_so_that_hosts_hold_equal_shares() -> None:
    full = holding("w0", [copy_of(A), copy_of(B)], host="x")
    assert steps(place([A, B], [full, holding("w1", host="y")])) == [("hold", "w1", "a")]
    served = holding("w1", serves=A, host="y")
    assert steps(place([A, B], [full, served])) == [("hold", "w1", "b")]
    only = holding("w0", [copy_of(A), copy_of(C)], host="x")
    assert place([A, C], [only, served, holding("w2", serves=C, host="y")]).steps == ()


def test_what_an_instance_held_back_moves_a_while_after_that_is_gone() -> None:
    full = holding("w0", [copy_of(A), copy_of(C)], host="x")
    cluster, placer = placer_of(full, holding("w1", serves=A, host="y"), holding("w2", serves=C, host="y"))
    cluster.put_report(holding("w1", host="y", sequence=2), LATE_S + 1.0)
    assert placer.look(LATE_S + 1.0).steps == ()
    assert steps(placer.look(LATE_S + HELD_BACK_S)) == [("hold", "w1", "a")]


# --- bounds ------------------------------------------------------------------------------------


def test_no_more_copies_move_at_a_time_than_may_load() -> None:
    models, other = [model(f"m{i}", weights_bytes=10) for i in range(4)], model("other", weights_bytes=40)
    here = [holding(f"w{i}", [copy_of(m)], serves=m, host="x") for i, m in enumerate(models)]
    there = holding("w9", [copy_of(other)], host="y")
    cluster = cluster_of([*models, other], [*here, there], limits=LoadLimits(per_host=2))
    placer = Placer(cluster)
    assert placer.look(LATE_S).steps == ()
    assert steps(placer.look(DUE_S)) == [("hold", "w9", "m0"), ("hold", "w9", "m1")]
    assert placer.look(DUE_S + 0.5).steps == ()
    cluster.put_report(holding("w9", [copy_of(other), copy_of(models[0])], host="y", sequence=2), DUE_S + 1.0)
    assert steps(placer.look(DUE_S + 1.0)) == [("drop", "w0", "m0"), ("hold", "w9", "m2")]


def test_copies_that_have_nowhere_to_go_are_looked_at_bit_by_bit_and_once_per_change() -> None:
    models = [model(f"m{i:03}", weights_bytes=10) for i in range(300)]
    reports = [holding(f"w{i:03}", [copy_of(m)], serves=m, host=f"h{i:03}", capacity=10) for i, m in enumerate(models)]
    cluster = cluster_of(models, reports)
    placer = Placer(cluster)
    assert placer.look(LATE_S).steps == ()

    def searched() -> int:
        looks, visits = 0, 1
        while visits:
            visits = placer_visits(placer)
            looks += 1
        return looks - 1

    assert searched() >= 300 * MODEL_VISITS / 200
    assert placer_visits(placer) == 0
    cluster.put_report(holding("late", host="late", capacity=9), DUE_S)
    assert searched() >= 300 * MODEL_VISITS / 200


def placer_visits(placer: Placer) -> int:
    decided = placer.look(DUE_S, visits=200)
    assert not any(isinstance(step, Hold | Drop) for step in decided.steps)
    assert placer.visits <= 200 + MODEL_VISITS
    return placer.visits
