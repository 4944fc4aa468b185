"""The two machines of a pair, whatever comes in which order, and whatever goes wrong once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from services.worker.core.live.batch import MOVES, Place, SourceBatch
from services.worker.core.live.life import TRANSITIONS, PairLife, PairState
from shared.messages.common import LivePolicy
from tests.services.worker.core.live.small_world.copies import copied, fingerprint
from tests.services.worker.core.live.small_world.world import FAULTS, Choice, Fault, Setting, World, machines

POLICIES: tuple[LivePolicy, ...] = ("zigzag", "best_effort", "overlap", "stop_the_world")
NUM_RUNS = 1000
MOST_STEPS = 1000
"""Of one run: far more than any takes."""


class Priorities:
    """An order of what may come next, by its kind."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._known: dict[Choice, float] = {}

    def __call__(self, choice: Choice) -> float:
        what, about = choice
        if what == "passes":
            return 2.0  # time passes when there is nothing else to do
        kind = about[:2] if what == "comes" else choice
        return self._known.setdefault(kind, self._random.random())


def setting_of(seed: int, policy: LivePolicy, faults: tuple[Fault, ...] = ()) -> Setting:
    """One of many."""
    chosen = random.Random(seed)
    return Setting(
        policy=policy,
        room=chosen.choice([(2, 2), (1, 2), (2, 1), (1, 1)]),
        is_late=chosen.random() < 0.3,
        loads_slowly=chosen.random() < 0.5,
        gates=chosen.choice([(), (1, 2), (0, 3), (2, 0), (3, 1)]),
        pull_s=chosen.choice([0.0, 10.0]),
        chunk_tokens=chosen.choice([3, 4]),
        drains=chosen.random() < 0.15,
        is_ahead=chosen.random() < 0.5,
        faults=faults,
    )


def done(world: World, choice: Choice, before: list[Choice]) -> None:
    """An error says what came before it."""
    try:
        world.do(choice)
        if not world.choices() and not world.mishaps():
            world.check_end()
    except Exception as error:
        error.add_note("\n".join(["", repr(world.setting), *map(str, [*before, choice])]))
        raise


def search(setting: Setting, order: Priorities, stragglers: int) -> int:
    """Every run in which this order is kept but for so many times, with every mishap at every time. Returns the number
    of worlds that were seen."""

    def ways(world: World, left: int) -> Iterator[tuple[Choice, int]]:
        for place, choice in enumerate(sorted(world.choices(), key=order)):
            if place == 0 or left:
                yield choice, left - (place > 0)
        for choice in world.mishaps():
            yield choice, left

    world = World(setting)
    seen: dict[int, int] = {}
    stack = [(world, list(ways(world, stragglers)))]
    came: list[Choice] = []
    while stack:
        world, left_here = stack[-1]
        if not left_here:
            stack.pop()
            del came[-1:]
            continue
        choice, left = left_here.pop()
        world = copied(world) if left_here else world
        done(world, choice, came)
        if seen.get(known := fingerprint(world), -1) < left:
            seen[known] = left
            stack.append((world, list(ways(world, left))))
            came.append(choice)
    return len(seen)


def run(setting: Setting, seed: int, *, records: bool = False) -> World:
    """One run, by chance: in an order of its own that is more or less kept to."""
    chance = random.Random(seed)
    order, strays = Priorities(seed), chance.choice([0.05, 0.2, 0.5, 1.0])
    goes_wrong_after = chance.randrange(90)
    world, came = World(setting, records=records), list[Choice]()
    while len(came) < MOST_STEPS:
        choices, mishaps = world.choices(), world.mishaps()
        if not choices and not mishaps:
            return world
        if mishaps and (not choices or (len(came) >= goes_wrong_after and chance.random() < 0.4)):
            choice = chance.choice(mishaps)
        elif chance.random() < strays:
            choice = chance.choice(choices)
        else:
            choice = min(choices, key=order)
        done(world, choice, came)
        came.append(choice)
    raise AssertionError(f"it has no end: {came}")


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_has_one_owner_in_the_end_in_every_order_with_two_stragglers(
    policy: LivePolicy, is_ahead: bool
) -> None:
    for seed in range(2):
        setting = replace(setting_of(seed, policy), is_ahead=is_ahead)
        assert search(setting, Priorities(seed), stragglers=2) > 100


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_so_it_has_if_something_goes_wrong_once_at_any_time(fault: Fault, is_ahead: bool) -> None:
    for seed, policy in enumerate(POLICIES * 2):
        setting = replace(setting_of(seed, policy, (fault,)), is_ahead=is_ahead)
        search(setting, Priorities(seed), stragglers=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_so_it_has_in_any_order_by_chance(policy: LivePolicy) -> None:
    twice: list[tuple[Fault, ...]] = [("late", "late"), ("late", "cancelled"), ("lost", "cancelled"), ("lost", "late")]
    mishaps: list[tuple[Fault, ...]] = [(), *((fault,) for fault in FAULTS), *twice]
    for seed in range(NUM_RUNS):
        run(setting_of(seed, policy, mishaps[seed % len(mishaps)]), seed)


def test_a_log_that_is_handled_by_a_new_machine_gives_the_same_actions() -> None:
    for seed, fault in enumerate(FAULTS * 5):
        setting = setting_of(seed, POLICIES[seed % 4], (fault,))
        world = run(setting, seed, records=True)
        for member, machine in zip(world.members, machines(setting), strict=True):
            again = [machine.handle(event, now_s) for now_s, event in member.machine.log]
            assert again == member.records
            assert machine.due_s == member.machine.due_s


def test_the_moves_of_the_tables_are_all_that_is_made_and_each_of_them_is(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: set[tuple[Place, Place] | tuple[PairState, PairState]] = set()
    move_batch, move_life, fail_life = SourceBatch.move_to, PairLife.move_to, PairLife.fail

    def move_batch_to(batch: SourceBatch, place: Place) -> None:
        moved.add((batch.place, place))
        move_batch(batch, place)

    def move_life_to(life: PairLife, state: PairState) -> None:
        moved.add((life.state, state))
        move_life(life, state)

    def fail(life: PairLife) -> bool:
        before = life.state
        has_failed = fail_life(life)
        if has_failed:
            moved.add((before, life.state))
        return has_failed

    monkeypatch.setattr(SourceBatch, "move_to", move_batch_to)
    monkeypatch.setattr(PairLife, "move_to", move_life_to)
    monkeypatch.setattr(PairLife, "fail", fail)
    for seed, fault in enumerate(FAULTS * 250):
        setting = setting_of(seed, POLICIES[seed % 4], ("late", fault))
        run(replace(setting, drains=seed % 3 == 0), seed)
    batches = {(before, after) for before, moves in MOVES.items() for after in moves}
    lives = {(before, after) for before, moves in TRANSITIONS.items() for after in moves}
    assert moved == batches | lives
