"""Who makes room for whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.placement.allocation import IDLE_S, MAX_FAILED, Holding, Room, Taking, Want, allocate

NOW_S = 1000.0


def want(model: str, missing: int = 1, *, has_instances: bool = False, weights_bytes: int = 0) -> Want:
    return Want(model, "colocated", missing, has_instances, weights_bytes)


def holding(
    model: str, idle: int = 1, *, idle_s: float = 5.0, spendable: int | None = None, slice_ends_in_s: float = 1e9
) -> Holding:
    """``idle`` instances for so long, of ``spendable``."""
    spendable = idle if spendable is None else spendable
    rooms = [Room(f"w{number}-{model}", 100) for number in range(spendable)]
    return Holding(model, "colocated", idle, NOW_S - idle_s, spendable, NOW_S + slice_ends_in_s, rooms)


def freeing(count: int) -> list[Room]:
    return [Room(f"f{number}", 100) for number in range(count)]


def moved(takings: tuple[Taking, ...]) -> list[tuple[str, int, str]]:
    return [(t.model, len(t.workers), t.for_model) for t in takings]


def test_a_model_without_an_instance_gets_the_one_that_has_been_idle_for_longest_at_once() -> None:
    takings = allocate([want("a")], [holding("b", idle_s=0.0), holding("c", idle_s=0.1)], (), NOW_S)
    assert moved(takings) == [("c", 1, "a")]
    assert "idle for 0.1 s, while a has requests and no instance and no worker is spare" in takings[0].why
    assert "otherwise it would wait" in takings[0].why


def test_one_more_instance_comes_from_those_that_have_been_idle_for_a_while() -> None:
    wants = [want("a", 2, has_instances=True)]
    assert moved(allocate(wants, [holding("b", 2, idle_s=IDLE_S - 0.1)], (), NOW_S)) == []
    assert moved(allocate(wants, [holding("b", 3, idle_s=IDLE_S)], (), NOW_S)) == [("b", 2, "a")]


def test_workers_that_become_spare_anyway_are_waited_for() -> None:
    holdings = [holding("x", 1), holding("y", 1, idle_s=1.0)]
    assert moved(allocate([want("a"), want("b")], holdings, freeing(2), NOW_S)) == []
    # The first is to have the worker that comes; for the second room is made.
    assert moved(allocate([want("a"), want("b")], holdings, freeing(1), NOW_S)) == [("x", 1, "b")]


def test_what_nothing_is_taken_for_still_gets_the_worker_that_comes_and_the_next_one_does_not_wait_for_it() -> None:
    too_large = want("a", weights_bytes=200)
    fails = Want("a", "colocated", 1, False, 0, [f"w{number}-elsewhere" for number in range(MAX_FAILED)])
    for first in (too_large, fails):
        coming = [Room("f0", 200)]
        assert moved(allocate([first, want("b")], [holding("x")], coming, NOW_S)) == [("x", 1, "b")]
        assert moved(allocate([first], [holding("x")], (), NOW_S)) == []


def test_the_most_urgent_is_served_first_and_nothing_is_given_twice() -> None:
    takings = allocate([want("a"), want("b")], [holding("x", 1)], (), NOW_S)
    assert moved(takings) == [("x", 1, "a")]


def test_what_is_missing_comes_from_several() -> None:
    takings = allocate([want("a", 3)], [holding("x", 2, idle_s=9.0), holding("y", 5, idle_s=8.0)], (), NOW_S)
    assert moved(takings) == [("x", 2, "a"), ("y", 1, "a")]


def test_a_busy_instance_goes_when_its_models_time_slice_is_over() -> None:
    busy = holding("b", 0, spendable=2, slice_ends_in_s=0.1)
    assert moved(allocate([want("a")], [busy], (), NOW_S)) == []
    takings = allocate([want("a", 3)], [busy], (), NOW_S + 0.2)
    assert moved(takings) == [("b", 1, "a")], "one at a time"
    assert "its share of the time is over" in takings[0].why


def test_a_model_that_serves_takes_no_busy_instance() -> None:
    busy = holding("b", 0, spendable=2, slice_ends_in_s=-1.0)
    assert moved(allocate([want("a", has_instances=True)], [busy], (), NOW_S)) == []


def test_the_model_that_served_longest_gives_and_only_once_in_a_round() -> None:
    holdings = [
        holding("b", 0, spendable=2, slice_ends_in_s=-1.0),
        holding("c", 0, spendable=2, slice_ends_in_s=-2.0),
    ]
    assert moved(allocate([want("a"), want("d"), want("e")], holdings, (), NOW_S)) == [("c", 1, "a"), ("b", 1, "d")]


def test_an_instance_that_went_as_idle_is_not_taken_as_busy_as_well() -> None:
    holdings = [holding("b", 1, spendable=1, slice_ends_in_s=-1.0)]
    assert moved(allocate([want("a"), want("c")], holdings, (), NOW_S)) == [("b", 1, "a")]


def test_nobody_makes_room_for_itself() -> None:
    assert allocate([want("a")], [holding("a", 2, slice_ends_in_s=-1.0)], (), NOW_S) == ()


def test_room_is_made_only_where_it_is_of_use() -> None:
    holdings = [holding("b", slice_ends_in_s=-1.0), holding("c", idle_s=0.0)]
    assert moved(allocate([Want("a", "colocated", 1, False, 101)], holdings, (), NOW_S)) == []
    assert moved(allocate([Want("a", "colocated", 1, False, 100, {"w0-b": "it failed"})], holdings, (), NOW_S)) == [
        ("c", 1, "a")
    ]


def test_of_several_workers_one_that_is_of_use_goes() -> None:
    rooms = [Room("small", 10), Room("large", 100)]
    for idle, slice_ends_s in ((1, NOW_S + 1e9), (0, NOW_S - 1.0)):
        two = Holding("b", "colocated", idle, NOW_S - 5.0, 2, slice_ends_s, rooms)
        (taking,) = allocate([want("a", weights_bytes=50)], [two], (), NOW_S)
        assert taking.workers == ("large",)


def test_a_worker_that_is_on_its_way_to_being_spare_is_waited_for_only_if_it_is_of_use() -> None:
    holdings = [holding("b")]
    for room in (Room("f", 49), Room("f", 100, promised=("c", "colocated"))):
        assert moved(allocate([want("a", weights_bytes=50)], holdings, [room], NOW_S)) == [("b", 1, "a")]
    mine = Room("f", 100, promised=("a", "colocated"))
    assert moved(allocate([want("c"), want("a")], holdings, [mine], NOW_S)) == [("b", 1, "c")]


def test_long_answers_are_not_waited_for_while_another_instance_is_idle() -> None:
    late = [Room("f", 100, late=True)]
    assert moved(allocate([want("a")], [holding("b")], late, NOW_S)) == [("b", 1, "a")]
    busy = holding("b", 0, spendable=1, slice_ends_in_s=-1.0)
    assert moved(allocate([want("a")], [busy], late, NOW_S)) == [], "or in the end everything would drain"


def test_no_room_is_made_for_a_model_that_fails_wherever_it_is_loaded() -> None:
    failed = {"f0": "it does not fit", "f1": "it does not fit"}
    assert moved(allocate([Want("a", "colocated", 1, False, 0, failed)], [holding("b")], (), NOW_S)) == [("b", 1, "a")]
    failed["f2"] = "it does not fit"
    assert moved(allocate([Want("a", "colocated", 1, False, 0, failed)], [holding("b")], (), NOW_S)) == []


names = st.sampled_from("abcdef")
wants_drawn = st.lists(
    st.builds(want, names, st.integers(0, 4), has_instances=st.booleans()), max_size=6, unique_by=lambda w: w.model
)
holdings_drawn = st.lists(
    st.builds(
        lambda name, idle, more, idle_s, ends: holding(
            name, idle, idle_s=idle_s, spendable=idle + more, slice_ends_in_s=ends
        ),
        names,
        st.integers(0, 4),
        st.integers(0, 3),
        st.floats(0, 10),
        st.floats(-5, 5),
    ),
    max_size=6,
    unique_by=lambda h: h.model,
)


@given(wants_drawn, holdings_drawn, st.integers(0, 6), st.randoms())
def test_what_is_taken_is_wanted_and_there(wants: list[Want], holdings: list[Holding], leaving: int, random) -> None:  # type: ignore[no-untyped-def]
    takings = allocate(wants, holdings, freeing(leaving), NOW_S)
    taken = [worker for t in takings for worker in t.workers]
    assert len(taken) <= max(0, sum(w.missing for w in wants) - leaving)
    assert len(set(taken)) == len(taken)
    for given_by in holdings:
        assert sum(len(t.workers) for t in takings if t.model == given_by.model) <= max(
            given_by.idle, given_by.spendable
        )
    for asked in wants:
        got = sum(len(t.workers) for t in takings if t.for_model == asked.model)
        assert got <= asked.missing
    assert all(t.workers and t.model != t.for_model for t in takings)
    # Whatever order the holdings come in.
    shuffled = list(holdings)
    random.shuffle(shuffled)
    assert allocate(wants, shuffled, freeing(leaving), NOW_S) == takings


def test_only_workers_that_offer_the_engine_make_room_for_its_model() -> None:
    theirs = Want("v", "colocated", 1, False, engine="vllm")
    rooms = [Room("w0", 100), Room("w1", 100, engines=("vllm",))]
    found = Holding("b", "colocated", 2, NOW_S - 5.0, 2, rooms=rooms)
    (taking,) = allocate([theirs], [found], (), NOW_S)
    assert taking.workers == ("w1",)
    (taking,) = allocate([want("a")], [found], (), NOW_S)
    assert taking.workers == ("w0",)
    assert allocate([theirs], [Holding("b", "colocated", 1, NOW_S, 1, rooms=rooms[:1])], (), NOW_S) == ()
    # What becomes spare without the engine is not waited for.
    (taking,) = allocate([theirs], [found], [Room("f", 100)], NOW_S)
    assert taking.workers == ("w1",)
    assert allocate([theirs], [found], [Room("f", 100, engines=("vllm",))], NOW_S) == ()
