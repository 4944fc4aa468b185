from __future__ import annotations

from collections import Counter

import pytest

from bench.chaos.plan import (
    KINDS,
    VLLM_KINDS,
    DrainWish,
    Plan,
    Scalable,
    ScaleWish,
    ServingWish,
    make_plan,
    parse_kinds,
    worker_of,
)
from shared.errors import BadRequest

MEMBERS = ("nats", "redis", "pool", "planner", "monitor", "gateway", "worker-0", "worker-1", "worker-2")
SCALABLES = (Scalable("demo", "colocated", 1, 3), Scalable("demo-split", "decode", 1, 2))


def plan(seed: int, *, scalables: tuple[Scalable, ...] = SCALABLES) -> Plan:
    return make_plan(seed, seconds=120, every_s=3, kinds=KINDS, members=MEMBERS, how="KILL", scalables=scalables)


def test_a_seed_decides_everything_and_another_something_else() -> None:
    assert plan(1) == plan(1)
    assert plan(1) != plan(2)


def test_what_is_scaled_changes_no_kill() -> None:
    assert plan(1).kills == plan(1, scalables=()).kills


def test_kills_are_within_the_time_and_as_many_as_asked_for() -> None:
    kills = plan(3).kills
    assert 30 <= len(kills) <= 50
    assert all(0 < kill.at_s <= 120 for kill in kills)
    assert [kill.at_s for kill in kills] == sorted(kill.at_s for kill in kills)
    assert all(kill.stopped_s == 0 for kill in kills)


def test_every_kind_has_its_turn() -> None:
    counts = Counter(kill.kind for kill in plan(4).kills)
    assert set(counts) == set(KINDS)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_scale_operations_are_between_the_kills_and_within_their_numbers() -> None:
    wishes = [w for w in plan(5).wishes if isinstance(w, ScaleWish)]
    assert {(w.model, w.role) for w in wishes} == {("demo", "colocated"), ("demo-split", "decode")}
    assert all(1 <= w.instances <= (3 if w.role == "colocated" else 2) for w in wishes)


def test_a_fleet_is_served_the_one_way_and_the_other_and_loses_workers_for_a_while() -> None:
    made = make_plan(
        5,
        seconds=120,
        every_s=3,
        kinds=KINDS,
        members=MEMBERS,
        how="KILL",
        scalables=SCALABLES,
        switched=("demo-switched",),
        drained=("worker-0", "worker-1"),
    )
    assert made.kills == plan(5).kills
    assert {type(w) for w in made.wishes} == {ScaleWish, ServingWish, DrainWish}
    assert {w.serving for w in made.wishes if isinstance(w, ServingWish)} == {"colocated", "disaggregated"}
    assert {w.worker for w in made.wishes if isinstance(w, DrainWish)} == {"worker-0", "worker-1"}


def test_stopped_members_are_continued_after_a_while() -> None:
    made = make_plan(0, seconds=30, every_s=3, kinds=("worker",), members=MEMBERS, how="STOP", scalables=())
    assert made.kills
    assert all(5 <= kill.stopped_s <= 8 for kill in made.kills)


def test_kinds_that_do_not_exist_are_refused() -> None:
    assert parse_kinds("worker, nats") == ("worker", "nats")
    with pytest.raises(BadRequest, match="'wroker'"):
        parse_kinds("worker,wroker")
    with pytest.raises(BadRequest, match="no gateway"):
        make_plan(0, seconds=9, every_s=1, kinds=("gateway",), members=("nats",), how="KILL", scalables=())


def test_what_is_of_vllm_is_killed_where_the_stack_has_it() -> None:
    kinds = parse_kinds("vllm_core,vllm_idle,worker")
    members = (*MEMBERS, *(f"{kind}-{index}" for kind in VLLM_KINDS for index in range(3)))
    kills = make_plan(0, seconds=60, every_s=3, kinds=kinds, members=members, how="KILL", scalables=()).kills
    assert {kill.kind for kill in kills} == set(kinds)
    assert {worker_of(kill.member) for kill in kills} == {"worker-0", "worker-1", "worker-2"}
    assert worker_of("planner") == worker_of("nats-1") == ""
    with pytest.raises(BadRequest, match="no vllm_core"):
        make_plan(0, seconds=9, every_s=1, kinds=kinds, members=MEMBERS, how="KILL", scalables=())


def test_of_several_nats_servers_one_stands_still_for_long_and_the_next_is_killed() -> None:
    members = ("nats-0", "nats-1", "nats-2", *MEMBERS[1:])
    made = make_plan(1, seconds=300, every_s=3, kinds=KINDS, members=members, how="KILL", scalables=())
    nats = [kill for kill in made.kills if kill.kind == "nats"]
    assert [(kill.how, kill.stopped_s) for kill in nats[:3]] == [("STOP", 60.0), ("KILL", 0.0), ("STOP", 60.0)]
    others = [kill for kill in made.kills if kill.kind != "nats"]
    assert {kill.how for kill in others} == {"KILL"}


def test_clocks_are_ahead_then_behind_then_right_one_after_the_other() -> None:
    made = make_plan(
        1,
        seconds=40,
        every_s=3,
        kinds=KINDS,
        members=MEMBERS,
        how="KILL",
        scalables=(),
        skewed=("pool", "w"),
        skew_s=30,
    )
    assert [(step.at_s, step.member, step.ahead_s) for step in made.steps] == [
        (0, "pool", 30), (10, "pool", -30), (20, "pool", 0), (20, "w", 30), (30, "w", -30), (40, "w", 0),
    ]  # fmt: skip
    assert (
        made.kills == make_plan(1, seconds=40, every_s=3, kinds=KINDS, members=MEMBERS, how="KILL", scalables=()).kills
    )
