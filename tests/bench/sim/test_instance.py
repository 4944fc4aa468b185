"""One simulated instance: what it takes, what it tells, and its life."""

from __future__ import annotations

import pytest

from bench.sim.compute import Compute
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.errors import BlitzError, Conflict, ContextLengthExceeded, Overloaded, SentBack
from tests.bench.sim.instances import GPU, Asked, World

TWO = SchedulerConfig(num_blocks=64, block_size=16, max_num_sequences=2, max_queued_requests=3)


def test_steps_that_only_decode_are_few_events() -> None:
    world = World()
    instance = world.instance("i")
    instance.submit(Asked("r", 100, 1000))
    world.clock.run()
    assert len(world.heard.times_s["r"]) == 1000
    num_reports = len(world.reports)
    assert world.clock.num_happened < 5 + num_reports


def test_who_comes_meanwhile_is_in_the_next_step() -> None:
    world, compute = World(), Compute(GPU)
    instance = world.instance("i")
    instance.submit(Asked("a", 100, 1000))
    world.clock.run(1.0)
    instance.submit(Asked("b", 64, 10))
    world.clock.run()
    first_s = world.heard.times_s["b"][0]
    before_s = max(time_s for time_s in world.heard.times_s["a"] if time_s < first_s)
    assert 1.0 <= before_s < 1.0 + compute.step_s(0, 0, 1, 1000)
    known = 101 + sum(time_s <= before_s for time_s in world.heard.times_s["a"]) - 1
    assert first_s - before_s == pytest.approx(compute.step_s(64, 64 * 65 // 2, 1, known))
    assert first_s in world.heard.times_s["a"]


@pytest.mark.parametrize(
    ("asked", "may_wait", "error"),
    [
        (Asked("new", 5, 5), False, Overloaded),
        (Asked("new", 2000, 5), True, ContextLengthExceeded),
        (Asked("r0", 5, 5), True, Conflict),
    ],
)
def test_what_a_worker_refuses_is_refused(asked: Asked, may_wait: bool, error: type[BlitzError]) -> None:
    world = World()
    instance = world.instance("i", config=TWO)
    for index in range(2):
        instance.submit(Asked(f"r{index}", 5, 50), may_wait=False)
    world.clock.run(0.02)
    with pytest.raises(error):
        instance.submit(asked, may_wait=may_wait)
    for index in range(3):
        instance.submit(Asked(f"w{index}", 5, 5))
    with pytest.raises(Overloaded):
        instance.submit(Asked("full", 5, 5))
    world.clock.run()
    assert len(world.heard.ended) == 5


def test_one_that_drains_finishes_says_so_and_may_come_back() -> None:
    world = World()
    instance = world.instance("i")
    instance.submit(Asked("r", 5, 50))
    world.clock.run(0.05)
    instance.drain()
    with pytest.raises(SentBack):
        instance.submit(Asked("late", 5, 5))
    assert not world.idle
    world.clock.run()
    assert world.idle == [instance]
    assert world.heard.ended.keys() == {"r"}
    instance.revive()
    instance.submit(Asked("again", 5, 5))
    world.clock.run()
    assert "again" in world.heard.ended


def test_an_idle_one_drains_at_once_and_one_that_loads_takes_nothing() -> None:
    world = World()
    instance = world.instance("i")
    instance.drain()
    assert world.idle == [instance]
    instance.kill()
    with pytest.raises(Conflict):
        instance.submit(Asked("r", 5, 5))


def test_a_later_attempt_continues_and_gives_up_the_older_one() -> None:
    world = World()
    instance = world.instance("i")
    instance.submit(Asked("r", 50, 20))
    instance.submit(Asked("s", 50, 3))
    world.clock.run(0.05)
    had = len(world.heard.times_s["r"])
    assert 0 < had < 20
    instance.submit(Asked("r", 50, 20, attempt=1, output_token_ids=(0,) * had))
    world.clock.run()
    assert len(world.heard.times_s["r"]) == 20
    assert instance.num_requests == 0


def test_it_reports_at_intervals_while_something_changes() -> None:
    world = World()
    instance = world.instance("i")
    world.clock.run()
    assert (world.reported_s, [r.state for r in world.reports]) == ([pytest.approx(0.1)], ["serving"])
    world.clock.run(3.04)
    instance.submit(Asked("r", 100, 60))
    world.clock.run()
    ended_s = world.heard.ended["r"]
    times_s = world.reported_s[1:]
    assert times_s == pytest.approx([3.1 + 0.1 * i for i in range(len(times_s))])
    assert times_s[-1] - 0.1 < ended_s <= times_s[-1]
    middle, last = world.reports[-2], world.reports[-1]
    assert (middle.running_requests, middle.ended_requests_total) == (1, 0)
    assert middle.running_tokens == 100 + sum(t <= times_s[-2] for t in world.heard.times_s["r"]) - 1
    assert (last.running_requests, last.ended_requests_total, last.ended_tokens_total) == (0, 1, 60)
    assert last.busy_s_total == pytest.approx(ended_s - 3.04)
    assert last.kv_blocks_used == 0
    assert last.load_s == 1.5


def test_a_new_role_is_told_at_once_and_its_first_work_too() -> None:
    world = World()
    instance = world.instance("i", "decode")
    world.clock.run()
    began: list[float] = []
    instance.take_role("prefill", lambda: began.append(world.clock.now_s))
    assert world.reports[-1].role == "prefill"
    world.clock.run(5.0)
    assert not began
    instance.submit(Asked("r", 5, 5))
    instance.submit(Asked("s", 5, 5))
    assert began == [5.0]


class Layers:
    """So many layers of a batch that is shared."""

    decode_interval_s = 0.05
    queued = (2, 300)
    num_requests = 0
    part_tokens = 300

    def __init__(self, count: int) -> None:
        self.left = count
        self.ran = 0
        self.heard: list[str] = []

    @property
    def ready(self) -> bool:
        return self.left > 0

    def begin(self) -> float | None:
        self.left -= 1
        return 0.01

    def end(self) -> None:
        self.ran += 1

    def stepped(self) -> None:
        self.heard.append("stepped")

    def accepted(self) -> None:
        self.heard.append("accepted")

    def cancelled(self, sequence: ActiveSequence) -> None:
        self.heard.append(f"cancelled {sequence.request_id}")


def test_layers_of_a_pair_come_first_and_decodes_in_between() -> None:
    world = World()
    instance = world.instance("i")
    instance.submit(Asked("r", 50, 200))
    world.clock.run(0.1)
    layers = Layers(50)

    before = 0

    def begin() -> None:
        nonlocal before
        instance.partial, before = layers, len(world.heard.times_s["r"])

    instance.call(begin)
    world.clock.run(0.1 + 0.5)
    during = [t for t in world.heard.times_s["r"] if 0.12 < t < 0.6]
    assert len(during) == pytest.approx(0.5 / 0.055, abs=2)
    assert instance.load_report(world.clock.now_s).queued_requests == 2
    world.clock.run()
    assert layers.ran == 50
    assert 0 < before < len(world.heard.times_s["r"]) == 200
    assert layers.heard.count("stepped") == 200 - before + 50


def test_a_layer_ends_for_the_pair_that_began_it() -> None:
    world = World()
    instance, first, second = world.instance("i"), Layers(5), Layers(3)
    instance.partial = first
    instance.call(lambda: None)
    world.clock.run(0.005)
    instance.partial = second
    world.clock.run()
    assert (first.ran, second.ran) == (1, 3)


def test_a_pair_hears_of_requests_that_come_and_go() -> None:
    world = World()
    instance, layers = world.instance("i"), Layers(0)
    instance.partial = layers
    instance.submit(Asked("r", 50, 200))
    instance.cancel(("r", 0))
    world.clock.run()
    assert layers.heard == ["accepted", "cancelled r", "stepped"]
    assert not world.heard.times_s
