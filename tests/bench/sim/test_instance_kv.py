"""Requests that one simulated instance computes and another decodes."""

from __future__ import annotations

import random

import pytest

from bench.sim.arrivals import Reservation
from bench.sim.compute import Compute
from bench.sim.engine import TOKEN
from bench.sim.kv import Departures, KvTransfer
from services.worker.core.kv_admission import room
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.errors import BlitzError
from tests.bench.sim.instances import CONFIG, GPU, Asked, World

MESSAGE_S = 0.001
LITTLE = SchedulerConfig(num_blocks=64, block_size=16, max_num_sequences=2, max_batch_tokens=2048)


def pair(gbps: float = 100.0, decoder: SchedulerConfig = CONFIG) -> World:
    world = World(gbps, MESSAGE_S)
    world.instance("p", "prefill")
    world.instance("d", "decode", decoder)
    return world


def submit(world: World, name: str, prompt_tokens: int, max_tokens: int, at: str = "p", to: str = "d") -> None:
    world.instances[at].submit(Asked(name, prompt_tokens, max_tokens), decode_at=world.place(to))


def prompt_s(prompt_tokens: int) -> float:
    return Compute(GPU).step_s(prompt_tokens, prompt_tokens * (prompt_tokens + 1) // 2, 0, 0)


def check_empty(world: World) -> None:
    for instance in world.instances.values():
        if instance.state != "failed":
            instance.scheduler.check()
            assert instance.num_requests == 0
            assert instance.scheduler.pool.num_used == 0
            assert instance.scheduler.reservations.free_slots == instance.scheduler.config.max_num_sequences


@pytest.mark.parametrize("gbps", [400.0, 10.0])
def test_kv_leaves_while_the_prompt_is_computed(gbps: float) -> None:
    """Where the network is faster than prefill, the last layer's KV is left when the prompt is computed; else all but
    what was sent since the first layer had run and room was found."""
    world = pair(gbps)
    submit(world, "r", 512, 5)
    world.clock.run()
    first_s, computed_s = world.heard.times_s["r"][0], prompt_s(512)
    assert first_s == pytest.approx(computed_s)
    kv_s = 512 * GPU.kv_bytes_per_token / (gbps * 1e9 / 8)
    begins_s = computed_s / 32 + 2 * MESSAGE_S
    whole_s = computed_s + kv_s / 32 if gbps == 400.0 else begins_s + kv_s
    assert world.heard.taken_over["r"] == pytest.approx(whole_s + 2 * MESSAGE_S)
    assert world.heard.times_s["r"][1] == pytest.approx(whole_s + 2 * MESSAGE_S + Compute(GPU).step_s(0, 0, 1, 513))
    assert world.heard.where["r"] == ["p", "d"]
    assert len(world.heard.times_s["r"]) == 5
    assert "r" in world.heard.ended
    check_empty(world)


def test_of_a_prompt_in_chunks_little_is_left_at_its_end() -> None:
    world = pair(400.0)
    submit(world, "r", 1500, 3)
    world.clock.run()
    exposed_s = world.heard.taken_over["r"] - world.heard.times_s["r"][0]
    last_layer_s = 512 * GPU.kv_bytes_per_token / 32 / (400e9 / 8)
    assert 2 * MESSAGE_S < exposed_s <= 2 * MESSAGE_S + 1.01 * last_layer_s
    assert len(world.heard.times_s["r"]) == 3
    check_empty(world)


def test_who_finds_no_room_in_time_is_decoded_where_it_is() -> None:
    world = pair(decoder=LITTLE)
    for name in ("a", "b", "c"):
        submit(world, name, 100, 900)
    world.clock.run()
    assert [world.heard.where[name] for name in "abc"] == [["p", "d"], ["p", "d"], ["p"]]
    waited_s = world.heard.times_s["c"][1] - world.heard.times_s["c"][0]
    assert room.ROOM_PATIENCE_S < waited_s < room.ROOM_PATIENCE_S + 2 * room.MAX_RETRY_S
    assert {len(times_s) for times_s in world.heard.times_s.values()} == {900}
    check_empty(world)


def test_room_that_comes_in_time_is_taken() -> None:
    world = pair(decoder=LITTLE)
    for name in ("a", "b", "c"):
        submit(world, name, 100, 60)
    world.clock.run()
    assert [world.heard.where[name] for name in "abc"] == [["p", "d"]] * 3
    check_empty(world)


@pytest.mark.parametrize("state", ["draining", "gone", "unknown"])
def test_a_decode_instance_that_takes_nothing_is_not_waited_for(state: str) -> None:
    world = pair()
    if state == "draining":
        world.instances["d"].drain()
    elif state == "gone":
        world.instances["d"].kill()
    submit(world, "r", 100, 5, to="x" if state == "unknown" else "d")
    world.clock.run()
    assert world.heard.where["r"] == ["p"]
    gap_s = world.heard.times_s["r"][1] - world.heard.times_s["r"][0]
    assert gap_s == pytest.approx(Compute(GPU).step_s(0, 0, 1, 101))
    check_empty(world)


@pytest.mark.parametrize("at_s", [0.001, 0.004, 0.0095, 0.012, 0.02, 0.03, 0.05, 0.1])
@pytest.mark.parametrize("what", ["cancel", "kill p", "kill d"])
def test_nothing_is_left_of_what_ends_in_any_phase(what: str, at_s: float) -> None:
    world = pair(25.0)
    submit(world, "r", 600, 20)
    world.clock.run(at_s)
    gone: list[str] = []
    if what == "cancel":
        world.instances["p"].cancel(("r", 0))
        world.instances["d"].cancel(("r", 0))
    else:
        gone = world.instances[what[-1]].kill()
    world.clock.run()
    served = len(world.heard.times_s["r"]) == 20
    assert served == ("r" in world.heard.ended)
    if what == "cancel":
        assert not served
    else:
        assert served != (gone == ["r"]), "it goes on where it is not lost"
    check_empty(world)


@pytest.mark.parametrize("layers", [(), (0, 8, 16, 32)])
def test_what_is_computed_outside_of_steps_leaves_too(layers: tuple[int, ...]) -> None:
    """Layer by layer if that is told, else at its end."""
    world = pair(10.0)
    instance = world.instances["p"]
    instance.scheduler.table.lending = True
    submit(world, "r", 500, 5)
    (sequence,) = instance.scheduler.lend()
    reservations = instance.scheduler.reservations
    assert reservations.reserve([sequence])
    for index, num_layers in enumerate(layers):
        world.clock.at(0.05 * index, instance.ran_layers, sequence, 0, num_layers)

    def computed() -> None:
        output = reservations.adopt(sequence, TOKEN, world.clock.now_s)
        instance.tell([output] if output else [])

    world.clock.at(0.2, instance.call, computed)
    world.clock.run()
    assert world.heard.where["r"] == ["p", "d"]
    layer_s = 500 * GPU.kv_bytes_per_token / 32 / (10e9 / 8)
    if layers:
        expected_s = 0.15 + 16 * layer_s + 2 * MESSAGE_S if 16 * layer_s > 0.05 else 0.2 + 2 * MESSAGE_S
    else:
        expected_s = 0.2 + 2 * MESSAGE_S + 32 * layer_s + 2 * MESSAGE_S
    assert world.heard.taken_over["r"] == pytest.approx(expected_s)
    assert len(world.heard.times_s["r"]) == 5
    check_empty(world)


def test_what_the_other_member_of_a_pair_goes_on_with_keeps_no_room() -> None:
    world = pair()
    instance = world.instances["p"]
    instance.scheduler.table.lending = True
    submit(world, "r", 500, 5)
    (sequence,) = instance.scheduler.lend()
    instance.ran_layers(sequence, 0, 1)
    world.clock.run(0.01)
    assert world.instances["d"].num_requests == 1
    instance.forget([sequence])
    world.clock.run()
    assert world.instances["d"].num_requests == 0
    instance.scheduler.take_back([sequence])
    instance.scheduler.table.lending = False
    instance.call(lambda: None)
    world.clock.run()
    assert world.heard.where["r"] == ["p", "d"]
    check_empty(world)


def test_what_another_sender_has_taken_over_is_not_released() -> None:
    """Both members of a pair ask for room for a request, and the first gives it up after the second has it."""
    world = pair()
    decoder = world.instances["d"]
    kept: list[Reservation] = []

    def answer(given: Reservation | BlitzError) -> None:
        assert isinstance(given, Reservation)
        kept.append(given)

    departures = Departures(world.clock, world.instances["p"], world.kv)
    for _ in range(2):
        params = Asked("r", 500, 5).sampling
        sequence = ActiveSequence(request_id="r", attempt=0, gateway_id="", prompt=(0,) * 500, params=params)
        decoder.arrivals.reserve(KvTransfer(sequence, departures, decoder, 500, 0, iter(())), answer)
    first, second = kept
    decoder.arrivals.release(first)
    acknowledged: list[bool] = []
    decoder.arrivals.begin(second, acknowledged.append)
    assert acknowledged == [True]


def test_memory_for_kv_on_its_way_is_given_back() -> None:
    """It is for about forty of these at once."""
    world = pair(400.0)
    for index in range(60):
        submit(world, f"r{index}", 400, 2)
        world.clock.run()
    assert all(where == ["p", "d"] for where in world.heard.where.values())


def test_a_question_that_died_with_whom_it_was_asked_is_not_waited_for() -> None:
    world = pair()
    submit(world, "a", 100, 500)
    world.clock.run(0.1)
    submit(world, "b", 16, 5)
    world.clock.run(0.1 + prompt_s(16) / 32 + MESSAGE_S + 1e-6)
    assert world.instances["d"].num_requests == 1, "it looks at it after its step"
    assert world.instances["d"].kill() == ["a"]
    world.clock.run()
    assert world.heard.where["b"] == ["p"]
    assert len(world.heard.times_s["b"]) == 5
    check_empty(world)


def test_one_token_is_no_reason_to_move() -> None:
    world = pair()
    submit(world, "r", 600, 1)
    world.clock.run()
    assert world.heard.where["r"] == ["p"]
    assert not world.heard.taken_over
    check_empty(world)


@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_once(seed: int) -> None:
    """Prompts at some instances, decoded at others, which change roles, drain and go."""
    world, numbers = World(25.0, MESSAGE_S), random.Random(seed)
    for name in ("a", "b", "c", "d"):
        world.instance(name, "prefill" if name < "c" else "decode", LITTLE)
    refused: set[str] = set()
    gone: set[str] = set()

    def arrive(name: str) -> None:
        at, to = numbers.choice("ab"), numbers.choice("cdx")
        try:
            submit(world, name, numbers.randint(1, 400), numbers.randint(1, 60), at, to)
        except BlitzError:
            refused.add(name)

    for index in range(120):
        world.clock.at(numbers.uniform(0.0, 8.0), arrive, f"r{index}")
    world.clock.at(4.0, world.instances["b"].take_role, "decode")
    world.clock.at(5.0, world.instances["d"].drain)
    world.clock.at(6.0, lambda: gone.update(world.instances["c"].kill()))
    world.clock.run()
    assert len(refused) + len(gone) + len(world.heard.ended) == 120
    assert not refused & gone
    assert len(world.heard.taken_over) > 10
    assert world.idle[-1] is world.instances["d"]
    check_empty(world)
