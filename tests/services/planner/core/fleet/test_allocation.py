"""Who makes room for whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.fleet.allocation import IDLE_S, Holding, Taking, Want, allocate

NOW_S = 1000.0


def want(model: str, missing: int = 1, *, has_instances: bool = False) -> Want:
    return Want(model, "colocated", missing, has_instances)


def holding(
    model: str, idle: int = 1, *, idle_s: float = 5.0, spendable: int | None = None, slice_ends_in_s: float = 1e9
) -> Holding:
    """``idle`` instances for so long, of ``spendable``."""
    return Holding(
        model,
        "colocated",
        idle,
        NOW_S - idle_s,
        idle if spendable is None else spendable,
        NOW_S + slice_ends_in_s,
        {f"w-{model}": 100},
    )


def moved(takings: tuple[Taking, ...]) -> list[tuple[str, int, str]]:
    return [(t.model, t.instances, t.for_model) for t in takings]


def test_a_model_without_an_instance_gets_the_one_that_has_been_idle_for_longest_at_once() -> None:
    takings = allocate([want("a")], [holding("b", idle_s=0.0), holding("c", idle_s=0.1)], 0, NOW_S)
    assert moved(takings) == [("c", 1, "a")]
    assert "idle for 0.1 s, while a has requests and no instance and no worker is spare" in takings[0].why
    assert "otherwise it would wait" in takings[0].why


def test_one_more_instance_comes_from_those_that_have_been_idle_for_a_while() -> None:
    wants = [want("a", 2, has_instances=True)]
    assert moved(allocate(wants, [holding("b", 2, idle_s=IDLE_S - 0.1)], 0, NOW_S)) == []
    assert moved(allocate(wants, [holding("b", 3, idle_s=IDLE_S)], 0, NOW_S)) == [("b", 2, "a")]


def test_workers_that_become_spare_anyway_are_waited_for() -> None:
    holdings = [holding("x", 1), holding("y", 1, idle_s=1.0)]
    assert moved(allocate([want("a"), want("b")], holdings, 2, NOW_S)) == []
    # The first is to have the worker that comes; for the second room is made.
    assert moved(allocate([want("a"), want("b")], holdings, 1, NOW_S)) == [("x", 1, "b")]


def test_the_most_urgent_is_served_first_and_nothing_is_given_twice() -> None:
    takings = allocate([want("a"), want("b")], [holding("x", 1)], 0, NOW_S)
    assert moved(takings) == [("x", 1, "a")]


def test_what_is_missing_comes_from_several() -> None:
    takings = allocate([want("a", 3)], [holding("x", 2, idle_s=9.0), holding("y", 5, idle_s=8.0)], 0, NOW_S)
    assert moved(takings) == [("x", 2, "a"), ("y", 1, "a")]


def test_a_busy_instance_goes_when_its_models_time_slice_is_over() -> None:
    busy = holding("b", 0, spendable=2, slice_ends_in_s=0.1)
    assert moved(allocate([want("a")], [busy], 0, NOW_S)) == []
    takings = allocate([want("a", 3)], [busy], 0, NOW_S + 0.2)
    assert moved(takings) == [("b", 1, "a")], "one at a time"
    assert "its share of the time is over" in takings[0].why


def test_a_model_that_serves_takes_no_busy_instance() -> None:
    busy = holding("b", 0, spendable=2, slice_ends_in_s=-1.0)
    assert moved(allocate([want("a", has_instances=True)], [busy], 0, NOW_S)) == []


def test_the_model_that_served_longest_gives_and_only_once_in_a_round() -> None:
    holdings = [
        holding("b", 0, spendable=2, slice_ends_in_s=-1.0),
        holding("c", 0, spendable=2, slice_ends_in_s=-2.0),
    ]
    assert moved(allocate([want("a"), want("d"), want("e")], holdings, 0, NOW_S)) == [("c", 1, "a"), ("b", 1, "d")]


def test_an_instance_that_went_as_idle_is_not_taken_as_busy_as_well() -> None:
    holdings = [holding("b", 1, spendable=1, slice_ends_in_s=-1.0)]
    assert moved(allocate([want("a"), want("c")], holdings, 0, NOW_S)) == [("b", 1, "a")]


def test_nobody_makes_room_for_itself() -> None:
    assert allocate([want("a")], [holding("a", 2, slice_ends_in_s=-1.0)], 0, NOW_S) == ()


def test_room_is_made_only_where_it_is_of_use() -> None:
    holdings = [holding("b", slice_ends_in_s=-1.0), holding("c", idle_s=0.0)]
    assert moved(allocate([Want("a", "colocated", 1, False, 101)], holdings, 0, NOW_S)) == []
    assert moved(allocate([Want("a", "colocated", 1, False, 100, {"w-b": "it failed"})], holdings, 0, NOW_S)) == [
        ("c", 1, "a")
    ]


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
def test_what_is_taken_is_wanted_and_there(wants: list[Want], holdings: list[Holding], freeing: int, random) -> None:  # type: ignore[no-untyped-def]
    takings = allocate(wants, holdings, freeing, NOW_S)
    taken = sum(t.instances for t in takings)
    assert taken <= max(0, sum(w.missing for w in wants) - freeing)
    for given_by in holdings:
        assert sum(t.instances for t in takings if t.model == given_by.model) <= max(given_by.idle, given_by.spendable)
    for asked in wants:
        got = sum(t.instances for t in takings if t.for_model == asked.model)
        assert got <= asked.missing
    assert all(t.instances > 0 and t.model != t.for_model for t in takings)
    # Whatever order the holdings come in.
    shuffled = list(holdings)
    random.shuffle(shuffled)
    assert allocate(wants, shuffled, freeing, NOW_S) == takings
