"""Requests that leave a simulated instance before they end."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from bench.sim.compute import Compute
from bench.sim.instance import SimInstance
from services.worker.core.kv_admission.move_history import AGAIN_S
from services.worker.core.scheduling.leaving import REFUSED_S
from services.worker.core.scheduling.schedule import SchedulerConfig
from shared.errors import BlitzError, SentBack
from shared.messages.common import Role
from shared.messages.destinations import Destination, SendBack
from shared.messages.plans import MigratePlan
from tests.bench.sim.instances import CONFIG, GPU, Asked, World
from tests.processes import INCARNATION

MESSAGE_S = 0.001
NOTICE_S = 0.2
FEW = SchedulerConfig(num_blocks=4096, block_size=16, max_num_sequences=1, max_batch_tokens=2048)
ALL = 10**6
"""Tokens of KV: more than anything has."""


def world(gbps: float = 10.0, role: Role = "colocated", **others: SchedulerConfig) -> World:
    """Instance ``a``, whose requests may go to the others."""
    made = World(gbps, MESSAGE_S, NOTICE_S)
    made.instance("a", role)
    for name, config in (others or {"b": CONFIG}).items():
        made.instance(name, role, config)
    return made


def destinations(made: World, kv_tokens: int = ALL) -> tuple[Destination, ...]:
    return tuple(
        Destination(worker_id=instance.worker_id, incarnation=INCARNATION, instance_id=name, kv_tokens=kv_tokens)
        for name, instance in made.instances.items()
        if name != "a"
    )


def drain(made: World, *, send_back: SendBack = "waiting", at_s: float = 1.0) -> None:
    """``a`` goes."""

    def go() -> None:
        made.instances["a"].drain()
        made.instances["a"].leave(destinations(made), send_back)

    made.clock.at(at_s, go)


def order(
    made: World,
    kv_tokens: int,
    *,
    at_s: float = 1.0,
    for_head: bool = False,
    valid_s: float = 99.0,
    stored_s: float = 0.0,
) -> None:
    """``a`` gives requests away."""
    plan = MigratePlan(
        plan_id="move",
        model="m",
        worker_id="worker of a",
        incarnation=INCARNATION,
        instance_id="a",
        destinations=destinations(made, kv_tokens),
        valid_s=valid_s,
        for_head=for_head,
        term=1,
    )
    made.clock.at(at_s, made.instances["a"].on_migrate_plan, plan, stored_s)


def submit(made: World, name: str, prompt_tokens: int, max_tokens: int, at: str = "a") -> None:
    made.instances[at].submit(Asked(name, prompt_tokens, max_tokens))


def kv_s(num_tokens: int, gbps: float = 10.0) -> float:
    return num_tokens * GPU.kv_bytes_per_token / (gbps * 1e9 / 8)


def step_s(context_tokens: int, num: int = 1) -> float:
    return Compute(GPU).step_s(0, 0, num, context_tokens)


def longest_gap_s(made: World, name: str) -> float:
    return max(after - before for before, after in pairwise(made.heard.times_s[name]))


def check_empty(made: World) -> None:
    for instance in made.instances.values():
        if instance.state != "failed":
            instance.check_empty()
    assert not any(made.network.running().values())


def test_a_drained_instance_is_gone_once_the_kv_of_its_requests_is_elsewhere() -> None:
    made = world()
    submit(made, "r", 2000, 3000)
    idle: list[tuple[SimInstance, float]] = []
    made.on_idle = lambda instance: idle.append((instance, made.clock.now_s))
    drain(made)
    made.clock.run()
    ((instance, at_s),) = idle
    assert instance is made.instances["a"]
    assert kv_s(2000) < at_s - 1.0 < 1.1 * kv_s(2000) + 20 * MESSAGE_S + 2 * step_s(2100)
    assert made.heard.where["r"] == ["a", "b"]
    assert len(made.heard.times_s["r"]) == 3000
    assert "r" in made.heard.ended
    check_empty(made)


def test_the_stream_stops_for_what_was_decoded_meanwhile_only() -> None:
    made = world()
    submit(made, "r", 2000, 3000)
    drain(made)
    made.clock.run()
    moved_s = made.heard.taken_over["r"] - 1.0
    meanwhile = int(moved_s / step_s(2000)) + 1
    most_s = kv_s(meanwhile) + 10 * MESSAGE_S + 2 * step_s(2100)
    assert longest_gap_s(made, "r") < most_s < kv_s(2000) / 2
    kv_bytes = sum(num for (purpose, _), num in made.network.carried.items() if purpose == "kv")
    least = 2000 * GPU.kv_bytes_per_token
    assert least < kv_bytes < least + (meanwhile + 200) * GPU.kv_bytes_per_token


def test_many_spread_over_those_that_take_them() -> None:
    made = world(100.0, b=CONFIG, c=CONFIG)
    for index in range(8):
        submit(made, f"r{index}", 100 + 10 * index, 2000)
    drain(made)
    made.clock.run()
    assert sorted(where[1] for where in made.heard.where.values()) == ["b"] * 4 + ["c"] * 4
    assert {len(times_s) for times_s in made.heard.times_s.values()} == {2000}
    check_empty(made)


def test_without_room_they_are_decoded_where_they_are_and_ask_again() -> None:
    made = world(b=FEW)
    submit(made, "other", 100, 900, at="b")
    submit(made, "r", 100, 600)
    drain(made)
    made.clock.run()
    assert made.heard.where["r"] == ["a"]
    assert made.idle == [made.instances["a"]]
    assert longest_gap_s(made, "r") < 2 * step_s(800)
    check_empty(made)


def test_who_was_refused_asks_again_when_there_may_be_room() -> None:
    made = world(b=FEW)
    submit(made, "other", 100, 200, at="b")
    submit(made, "r", 100, 3000)
    drain(made)
    made.clock.run()
    assert 1.0 + AGAIN_S < made.heard.taken_over["r"] < 1.0 + AGAIN_S + REFUSED_S
    assert made.heard.where["r"] == ["a", "b"]
    check_empty(made)


@pytest.mark.parametrize("send_back", ["none", "waiting", "all"])
def test_what_has_not_begun_goes_back_at_once(send_back: SendBack) -> None:
    made = World(10.0, MESSAGE_S)
    made.instance("a", config=FEW)
    submit(made, "runs", 100, 900)
    made.clock.run(0.5)
    submit(made, "waits", 100, 5)
    drain(made, send_back=send_back)
    made.clock.run(1.1)
    sent_back = {name for name, error in made.heard.failed.items() if isinstance(error, SentBack)}
    assert sent_back == {"none": set(), "waiting": {"waits"}, "all": {"runs", "waits"}}[send_back]
    made.clock.run()
    assert set(made.heard.ended) == {"runs", "waits"} - sent_back
    check_empty(made)


def disaggregated() -> World:
    """``a`` computes prompts, ``d`` decodes."""
    made = World(10.0, MESSAGE_S)
    made.instance("a", "prefill")
    made.instance("d", "decode")
    return made


def test_a_prompt_that_is_soon_computed_leaves_with_its_kv() -> None:
    made = disaggregated()
    made.instances["a"].submit(Asked("r", 3000, 5), decode_at=made.place("d"))
    drain(made, at_s=0.01)
    made.clock.run()
    assert made.heard.where["r"] == ["a", "d"]
    assert not made.heard.failed
    check_empty(made)


def test_a_prompt_that_is_far_from_its_end_goes_back_and_keeps_no_room_elsewhere() -> None:
    made = disaggregated()
    made.instances["a"].submit(Asked("r", 60_000, 5), decode_at=made.place("d"))
    drain(made, at_s=0.1)
    made.clock.run(0.1)
    assert made.instances["d"].num_requests == 1
    made.clock.run(0.3)
    assert made.instances["d"].num_requests == 0
    assert isinstance(made.heard.failed["r"], SentBack)
    made.clock.run()
    check_empty(made)


def test_what_would_end_sooner_than_it_moves_stays() -> None:
    made = world(1.0)
    submit(made, "r", 4000, 100)
    drain(made, at_s=0.5)
    made.clock.run()
    assert made.heard.where["r"] == ["a"]
    assert not made.network.carried
    check_empty(made)


def test_what_ends_while_its_kv_travels_leaves_nothing() -> None:
    made = world(0.5)
    submit(made, "r", 4000, 300)
    drain(made, at_s=0.5)
    made.clock.run()
    assert made.heard.where["r"] == ["a"]
    assert made.network.carried, "it was on its way"
    assert made.heard.ended["r"] < 0.5 + kv_s(4000, 0.5)
    check_empty(made)


def test_an_order_moves_some_and_the_instance_serves_on() -> None:
    made = world(100.0)
    for name in "abc":
        submit(made, name, 500, 2000)
    order(made, int(2.5 * (500 + 1.0 / step_s(500, 3))))
    order(made, ALL, at_s=1.5, valid_s=1.4)
    made.clock.run()
    assert sorted(len(where) for where in made.heard.where.values()) == [1, 2, 2]
    assert made.instances["a"].state == "serving"
    check_empty(made)


def test_just_enough_moves_for_a_prompt_that_waits_for_kv() -> None:
    made = World(100.0, MESSAGE_S)
    made.instance("a", config=SchedulerConfig(num_blocks=400, block_size=16, max_batch_tokens=2048))
    made.instance("b")
    for name, prompt_tokens in (("small", 500), ("middle", 2000), ("large", 3000)):
        submit(made, name, prompt_tokens, 400)
    made.clock.run(0.9)
    submit(made, "waits", 1500, 5)
    order(made, ALL, for_head=True)
    made.clock.run(1.5)
    assert len(made.heard.times_s["waits"]) == 5
    made.clock.run()
    assert [len(made.heard.where[name]) for name in ("small", "middle", "large")] == [1, 2, 1]
    check_empty(made)


def test_an_order_moves_nothing_if_nothing_lacks_kv() -> None:
    made = world()
    submit(made, "r", 500, 500)
    order(made, ALL, for_head=True)
    made.clock.run()
    assert made.heard.where["r"] == ["a"]


@pytest.mark.parametrize("to", ["a", "c"])
def test_who_has_come_rests_and_who_has_left_does_not_come_back(to: str) -> None:
    made = world(100.0)
    submit(made, "r", 500, 4000)
    drain(made)
    made.clock.run(1.5)
    came_s = made.heard.taken_over["r"]
    made.instances["a"].revive()
    made.instance("c")

    def leave() -> None:
        made.instances["b"].drain()
        place = Destination(worker_id=f"worker of {to}", incarnation=INCARNATION, instance_id=to, kv_tokens=ALL)
        made.instances["b"].leave((place,), "none")

    made.clock.at(2.0, leave)
    made.clock.run()
    if to == "a":
        assert made.heard.taken_over["r"] == came_s
    else:
        assert AGAIN_S < made.heard.taken_over["r"] - came_s < AGAIN_S + 0.5
    assert len(made.heard.times_s["r"]) == 4000
    check_empty(made)


def test_where_a_destination_dies_it_is_decoded_on_and_may_move_again() -> None:
    made = world()
    submit(made, "r", 2000, 3000)
    drain(made)
    made.clock.run(1.1)
    assert made.instances["b"].num_requests == 1
    assert made.instances["b"].kill() == []
    assert not any(made.network.running().values())
    made.clock.run(1.5)
    made.instances["a"].revive()
    made.clock.run(2.0)
    del made.instances["b"]
    made.instance("c")
    drain(made, at_s=2.0)
    made.clock.run()
    assert AGAIN_S < made.heard.taken_over["r"] - 1.0 < AGAIN_S + REFUSED_S
    assert made.heard.where["r"] == ["a", "c"]
    assert len(made.heard.times_s["r"]) == 3000
    check_empty(made)


def test_what_is_preempted_while_its_kv_travels_is_computed_again_here() -> None:
    made = World(0.5, MESSAGE_S)
    made.instance("a", config=SchedulerConfig(num_blocks=300, block_size=16, max_batch_tokens=2048))
    made.instance("b")
    for name in ("first", "last"):
        submit(made, name, 2200, 400)
    drain(made, send_back="none")
    made.clock.run()
    assert made.instances["a"].scheduler.table.preemptions_total == 1
    assert made.heard.where["last"] == ["a"]
    assert {len(times_s) for times_s in made.heard.times_s.values()} == {400}
    check_empty(made)


@pytest.mark.parametrize("at_s", [0.0005, 0.0015, 0.0045, 0.1, 0.21, 0.2225, 0.2275, 0.229, 0.23, 0.232, 0.234, 0.25])
@pytest.mark.parametrize("what", ["cancel", "kill a", "kill b"])
def test_nothing_is_left_of_what_ends_in_any_phase(what: str, at_s: float) -> None:
    made = world()
    submit(made, "r", 2000, 500)
    drain(made)
    made.clock.run(1.0 + at_s)
    gone: list[str] = []
    if what == "cancel":
        for name in "ab":
            made.instances[name].cancel(("r", 0))
        made.clock.run(1.0 + at_s + 4 * MESSAGE_S + 2 * step_s(2100))
        assert not any(made.network.running().values())
    else:
        gone = made.instances[what[-1]].kill()
    made.clock.run()
    served = len(made.heard.times_s["r"]) == 500
    assert served == ("r" in made.heard.ended)
    if what == "cancel":
        assert not served
    else:
        assert served != (gone == ["r"]), "it goes on where it is not lost"
    check_empty(made)


@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_once(seed: int) -> None:
    """Colocated instances that drain, come back, give requests away and die."""
    numbers = random.Random(seed)
    little = SchedulerConfig(num_blocks=300, block_size=16, max_num_sequences=6, max_batch_tokens=2048)
    made = World(numbers.choice([2.0, 20.0]), MESSAGE_S, NOTICE_S)
    for name in "abcd":
        made.instance(name, config=little)
    refused: set[str] = set()
    gone: list[str] = []

    def arrive(name: str) -> None:
        try:
            submit(made, name, numbers.randint(1, 1200), numbers.randint(1, 600), numbers.choice("abcd"))
        except BlitzError:
            refused.add(name)

    def turn(name: str) -> None:
        instance = made.instances[name]
        others = tuple(
            Destination(
                worker_id=other.worker_id, incarnation=INCARNATION, instance_id=other.instance_id, kv_tokens=ALL
            )
            for other in made.instances.values()
            if other is not instance
        )
        if instance.state == "draining":
            instance.revive()
        elif instance.state == "serving" and numbers.random() < 0.6:
            instance.drain()
            instance.leave(others, numbers.choice(["none", "waiting", "all"]))
        elif instance.state == "serving":
            plan = MigratePlan(
                plan_id="",
                model="m",
                worker_id="",
                incarnation=INCARNATION,
                instance_id=name,
                destinations=others,
                valid_s=99.0,
                term=1,
            )
            instance.on_migrate_plan(plan, 0.0)

    for index in range(150):
        made.clock.at(numbers.uniform(0.0, 20.0), arrive, f"r{index}")
    for _ in range(25):
        made.clock.at(numbers.uniform(1.0, 22.0), turn, numbers.choice("abcd"))
    made.clock.at(15.0, lambda: gone.extend(made.instances["c"].kill()))
    made.clock.run()
    sent_back = set(made.heard.failed)
    assert len(refused) + len(gone) + len(made.heard.ended) + len(sent_back) == 150
    assert not (refused | sent_back) & set(gone)
    assert made.heard.taken_over
    check_empty(made)
