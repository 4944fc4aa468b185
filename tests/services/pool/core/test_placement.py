from __future__ import annotations

from services.pool.core.steps import Drop, Hold, PlacementDecision
from shared.messages.registry import ModelRecord
from tests.records import model
from tests.services.pool.deciding import Outstanding, hopeless, place
from tests.services.pool.host_copies import copy_of, holding


def sized(name: str, weights_bytes: int = 100, **changes: object) -> ModelRecord:
    return model(name, weights_bytes=weights_bytes, **changes)


A, B, C = sized("a"), sized("b"), sized("c")


def holds(decided: PlacementDecision) -> list[tuple[str, str]]:
    return [(s.worker.id, s.record.name) for s in decided.steps if isinstance(s, Hold)]


def drops(decided: PlacementDecision) -> list[tuple[str, str]]:
    return [(s.worker.id, s.model) for s in decided.steps if isinstance(s, Drop)]


def only_hold(decided: PlacementDecision) -> Hold:
    [step] = decided.steps
    assert isinstance(step, Hold)
    return step


def test_every_model_gets_one_host_copy_spread_over_hosts_not_workers() -> None:
    workers = [holding("w0", host="x"), holding("w1", host="x"), holding("w2", host="y")]
    assert holds(place([A, B, C], workers)) == [("w0", "a"), ("w2", "b"), ("w1", "c")]


def test_a_copy_that_is_there_or_loads_is_not_placed_again() -> None:
    for state in ("ready", "loading"):
        assert place([A], [holding("w0", [copy_of(A, state)]), holding("w1")]).steps == ()


def test_a_hold_that_no_report_shows_yet_counts_with_its_bytes() -> None:
    workers = [holding("w0"), holding("w1")]
    outstanding = Outstanding(holds={("w0", A.model_hash): 100})
    assert holds(place([A, B], workers, outstanding=outstanding)) == [("w1", "b")]


def test_a_worker_that_failed_is_avoided_and_named_if_there_is_no_other() -> None:
    avoided = Outstanding(avoided={("w0", A.model_hash)})
    assert holds(place([A], [holding("w0"), holding("w1")], outstanding=avoided)) == [("w1", "a")]
    decided = place([A], [holding("w0")], outstanding=avoided)
    assert decided.steps == ()
    assert "could not be loaded on w0" in decided.unplaced[0].reason


def test_sources_are_host_copies_then_serving_gpus_then_draining_ones_near_ones_first() -> None:
    workers = [
        holding("w0", serves=A, state="draining", capacity=0),
        holding("w1", serves=A, capacity=0),
        holding("w2", serves=A, host="near", capacity=0),
        holding("w3", [copy_of(A, cached=True)], capacity=100),
        holding("w4", host="near"),
        holding("w5", serves=A, state="loading", capacity=0),
        holding("w6", [copy_of(A, "loading", cached=True)], capacity=100),
        holding("w7", [copy_of(A, "retired")], capacity=100),
    ]
    # A worker that cached the model holds it already; here the choice is left to another one.
    avoided = Outstanding(avoided={("w3", A.model_hash), ("w6", A.model_hash)})
    step = only_hold(place([A], workers, outstanding=avoided))
    assert step.worker.id == "w4"
    # The draining instance has no digest: it may have been loading when it was told to drain.
    assert [(s.worker.id, s.kind) for s in step.sources] == [("w3", "host"), ("w2", "gpu"), ("w1", "gpu")]


def test_without_any_copy_the_disk_is_the_source() -> None:
    assert only_hold(place([A], [holding("w0")])).sources == ()


def test_a_lost_host_copy_comes_back_from_a_gpu_of_another_host() -> None:
    step = only_hold(place([A], [holding("w1", serves=A, capacity=0), holding("w2")]))
    assert (step.worker.id, [s.worker.id for s in step.sources]) == ("w2", ["w1"])


def test_of_several_ready_copies_the_one_on_the_emptiest_host_stays() -> None:
    workers = [
        holding("w0", [copy_of(A), copy_of(B)]),
        holding("w1", [copy_of(A)]),
        holding("w2", [copy_of(A, "loading")]),
    ]
    assert drops(place([A, B], workers)) == [("w0", "a")]


def test_a_surplus_copy_is_dropped_only_once_the_other_is_ready() -> None:
    assert place([A], [holding("w0", [copy_of(A)]), holding("w1", [copy_of(A, "loading")])]).steps == ()


def test_copies_of_removed_and_replaced_models_are_dropped_and_of_unknown_ones_kept() -> None:
    old = sized("b", model_hash="old-b")
    workers = [holding("w0", [copy_of(A), copy_of(old), copy_of(B)])]
    assert drops(place([B], workers, removed={"a"})) == [("w0", "a"), ("w0", "b")]
    assert [s.model_hash for s in place([B], workers).steps if isinstance(s, Drop)] == ["old-b"]


def test_a_copy_of_another_layout_does_not_count_and_goes() -> None:
    other = sized("a", layout_hash="other")
    decided = place([A], [holding("w0", [copy_of(other)]), holding("w1")])
    assert (holds(decided), drops(decided)) == ([("w1", "a")], [("w0", "a")])


def test_two_names_of_the_same_weights_share_a_copy() -> None:
    twin = sized("twin", model_hash=A.model_hash)
    assert holds(place([twin, A], [holding("w0"), holding("w1")])) == [("w0", "a")]
    assert place([twin, A], [holding("w0", [copy_of(twin)]), holding("w1")]).steps == ()
    # One of the names may go.
    assert place([A], [holding("w0", [copy_of(twin)])], removed={"twin"}).steps == ()


def test_retired_and_dropped_copies_do_not_count_and_their_room_is_not_free_yet() -> None:
    workers = [holding("w0", [copy_of(B, "retired")], capacity=100)]
    decided = place([A], workers, removed={"b"})
    assert decided.steps == ()
    assert "waits for room on worker w0" in decided.unplaced[0].reason
    workers = [holding("w0", [copy_of(B)], capacity=100)]
    decided = place([A], workers, removed={"b"}, outstanding=Outstanding(drops={("w0", B.model_hash)}))
    assert decided.steps == ()


def test_without_room_the_largest_of_the_most_served_models_gives_way_to_one_without_any_copy() -> None:
    big = sized("big", 120)
    workers = [
        holding("w0", [copy_of(big), copy_of(B)], capacity=220),
        holding("w1", serves=big, capacity=0),
        holding("w2", serves=B, capacity=0),
    ]
    decided = place([A, B, big], workers)
    assert drops(decided) == [("w0", "big")]
    assert "big has to go" in decided.unplaced[0].reason


def test_cached_copies_give_way_first() -> None:
    workers = [
        holding("w0", [copy_of(B), copy_of(C, cached=True)], capacity=200),
        holding("w1", [copy_of(C)], serves=B, capacity=100),
    ]
    assert drops(place([A, B, C], workers)) == [("w0", "c")]


def test_no_more_is_evicted_than_needed() -> None:
    small, large = sized("small", 10), sized("z", 100)
    workers = [
        holding("w0", [copy_of(small, cached=True), copy_of(large)], capacity=110),
        holding("w1", [copy_of(small)], serves=large, capacity=10),
    ]
    assert drops(place([A, small, large], workers)) == [("w0", "z")]


def test_the_only_copy_of_a_model_is_never_evicted() -> None:
    decided = place([A, B], [holding("w0", [copy_of(B)], capacity=100), holding("w1", serves=B, state="loading")])
    assert holds(decided) == [("w1", "a")]
    decided = place([A, B], [holding("w0", [copy_of(B)], capacity=150)])
    assert decided.steps == ()
    assert decided.unplaced[0].reason == "needs 100 bytes of host memory; the most that is free is 50, on worker w0"


def test_a_cached_copy_that_is_the_last_is_not_evicted() -> None:
    decided = place([A, B], [holding("w0", [copy_of(B, cached=True)], capacity=100)])
    assert ("w0", "b") not in drops(decided)


def test_a_model_that_is_served_evicts_nothing() -> None:
    workers = [
        holding("w0", [copy_of(B)], capacity=100),
        holding("w1", serves=A, capacity=0),
        holding("w2", serves=B, capacity=0),
        holding("w3", serves=B, capacity=0),
    ]
    assert place([A, B], workers).steps == ()


def test_two_models_do_not_evict_for_the_same_room() -> None:
    workers = [
        holding("w0", [copy_of(C)], capacity=100),
        holding("w1", serves=C, capacity=0),
    ]
    decided = place([A, B, C], workers)
    assert drops(decided) == [("w0", "c")]
    assert [u.model for u in decided.unplaced] == ["a", "b"]
    assert "the most that is free is 0" in decided.unplaced[1].reason


def test_no_host_memory_at_all_is_said() -> None:
    decided = place([A], [holding("w0", serves=A, capacity=0)])
    assert (decided.steps, decided.unplaced[0].reason) == ((), "no worker offers host memory")


def test_it_is_said_that_all_who_offer_host_memory_leave() -> None:
    decided = place([A], [holding("w0", serves=A, capacity=100)], outstanding=Outstanding(leaving={"w0"}))
    assert decided.unplaced[0].reason == "every worker that offers host memory stops or is drained"


def test_a_cached_copy_becomes_the_placed_one_where_there_is_no_other_room() -> None:
    assert holds(place([A], [holding("w0", [copy_of(A, cached=True)], capacity=100)])) == [("w0", "a")]


def test_a_copy_that_its_worker_gives_up_is_replaced_elsewhere_and_then_dropped() -> None:
    given_up = Outstanding(given_up={("w0", A.model_hash)})
    step = only_hold(place([A], [holding("w0", [copy_of(A)]), holding("w1")], outstanding=given_up))
    assert (step.worker.id, step.sources[0].worker.id, step.sources[0].kind) == ("w1", "w0", "host")
    both = [holding("w0", [copy_of(A)]), holding("w1", [copy_of(A)])]
    assert drops(place([A], both, outstanding=given_up)) == [("w0", "a")]


def test_an_empty_host_that_joins_gets_its_share_one_copy_at_a_time() -> None:
    workers = [holding("w0", [copy_of(A), copy_of(B), copy_of(C)]), holding("w1")]
    step = only_hold(place([A, B, C], workers))
    assert (step.worker.id, step.sources[0].worker.id) == ("w1", "w0")
    # The next one only after this one is done.
    moving = Outstanding(holds={step.key: 100})
    assert place([A, B, C], workers, outstanding=moving).steps == ()


def test_nothing_moves_when_that_would_only_swap_the_fuller_and_the_emptier_host() -> None:
    assert place([A, B], [holding("w0", [copy_of(A)]), holding("w1", [copy_of(B)]), holding("w2")]).steps == ()
    assert place([A], [holding("w0", [copy_of(A)]), holding("w1")]).steps == ()


def test_room_that_a_model_waits_for_is_not_given_to_a_later_one_bit_by_bit() -> None:
    large, small = sized("large", 120), sized("small", 40)
    decided = place([large, small], [holding("w0", [copy_of(B)], capacity=150)], removed={"b"})
    assert (holds(decided), drops(decided)) == ([], [("w0", "b")])
    assert "waits for room on worker w0" in decided.unplaced[0].reason


def test_of_equal_places_the_copy_goes_where_the_serving_one_is_not() -> None:
    workers = [holding("w0", host="x", serves=A), holding("w1", host="x"), holding("w2", host="y")]
    assert holds(place([A], workers)) == [("w2", "a")]
    assert holds(place([A], workers[:2])) == [("w1", "a")]
    assert holds(place([A], workers[:1])) == [("w0", "a")]


def test_a_copy_that_loads_for_ever_is_placed_elsewhere() -> None:
    workers = [holding("w0", [copy_of(A, "loading")]), holding("w1")]
    overdue = Outstanding(overdue=True)
    assert holds(place([A], workers, outstanding=overdue)) == [("w1", "a")]


def test_what_a_leaving_worker_holds_and_serves_is_placed_elsewhere_and_it_gets_nothing() -> None:
    workers = [holding("w0", [copy_of(A)], serves=B), holding("w1")]
    leaving = Outstanding(leaving={"w0"})
    assert sorted(holds(place([A, B, C], workers, outstanding=leaving))) == [("w1", "a"), ("w1", "b"), ("w1", "c")]
    outstanding = Outstanding(leaving={"w0"}, holds={("w0", C.model_hash): 100})
    assert ("w1", "c") in holds(place([C], workers, outstanding=outstanding))


def test_of_two_copies_the_one_of_a_leaving_worker_goes() -> None:
    workers = [holding("w0", [copy_of(A)]), holding("w1", [copy_of(A), copy_of(B)])]
    assert drops(place([A, B], workers, outstanding=Outstanding(leaving={"w0"}))) == [("w0", "a")]


def test_a_leaving_workers_last_copy_is_hopeless_only_if_no_room_can_be_made() -> None:
    leaving = Outstanding(leaving={"w0"})
    gone = holding("w0", [copy_of(A)])
    assert hopeless([A], [gone, holding("w1", capacity=99)], leaving) == {A.model_hash}
    full = holding("w1", [copy_of(B)], capacity=100)
    assert hopeless([A, B], [gone, full], leaving) == {A.model_hash}
    served = [gone, full, holding("w2", serves=B, capacity=0)]
    assert hopeless([A, B], served, leaving) == frozenset()


def test_what_comes_through_a_nic_takes_at_most_half_of_the_slower_one() -> None:
    for host, cap_gbps in (("far", 5.0), ("near", 0.0)):
        step = only_hold(place([A], [holding("g", serves=A, host=host, capacity=0), holding("w", host="near")]))
        assert step.cap_gbps == cap_gbps
