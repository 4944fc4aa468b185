"""Execution pipelines: who runs what, when GPUs are free, and instances that answer before they are whole."""

from __future__ import annotations

from itertools import pairwise

from bench.sim.blocks import Blocks
from bench.sim.compute import Compute
from bench.sim.instance import SimInstance
from bench.sim.loading import Weights
from bench.sim.pipelines import Pipelines, Stage, Timeline, cover, stages_of
from bench.sim.sharing import Resource
from tests.bench.sim.instances import CONFIG, GPU, Asked, World
from tests.processes import process

BLOCKS = Blocks.of(Weights.of(1 << 30, 32, 1.0), 4)
HALVES = {"a": {0, 1}, "b": {2, 3}}


def test_a_cover_has_all_blocks_and_nobody_too_many() -> None:
    assert cover({"a": {0, 1}, "b": {1, 2}}, 4) == ()
    assert cover({"a": {0}, "b": {0, 1}, "c": {2, 3}}, 4) == ("b", "c")
    # The first choice has become needless by the others.
    assert cover({"a": {1, 2, 3}, "b": {0, 1, 4}, "c": {2, 3, 5}}, 6) == ("b", "c")
    assert cover({}, 4) == ()


def test_stages_are_even_and_few() -> None:
    assert stages_of(HALVES, 4) == (Stage("a", (0, 1)), Stage("b", (2, 3)))
    both = {0, 1, 2, 3}
    assert stages_of({"a": both, "b": both}, 4) == (Stage("a", (0, 1)), Stage("b", (2, 3)))
    assert stages_of({"a": {0, 3}, "b": {1, 2}}, 4) == (Stage("a", (0,)), Stage("b", (1, 2)), Stage("a", (3,)))


def test_a_timeline_gives_each_time_once_and_fills_gaps() -> None:
    timeline = Timeline()
    assert timeline.reserve(0.0, 5.0, 2.0) == 7.0
    assert timeline.reserve(0.0, 0.0, 3.0) == 3.0
    assert timeline.reserve(0.0, 2.0, 2.0) == 5.0, "what lies between"
    assert timeline.reserve(0.0, 1.0, 1.0) == 8.0, "nothing is left before"
    assert timeline.free_s == 8.0
    assert timeline.reserve(7.5, 7.5, 1.0) == 9.0


class Loading(World):
    """Instances that load, in pipelines as soon as they can be."""

    def __init__(self) -> None:
        super().__init__()
        self.pipelines = Pipelines(
            self.clock,
            self.network,
            BLOCKS,
            lambda source, target: (self.links[source], self.links[target]),
            8192,
            0.001,
            lambda worker_id: self.instances[worker_id].serve(),
        )
        self.links = {name: Resource(name, 100.0) for name in "abcd"}

    def loads(self, name: str) -> SimInstance:
        instance = self.instances[name] = SimInstance(
            self.clock,
            self.heard,
            instance_id=name,
            worker=process(name),
            model="m",
            role="colocated",
            config=CONFIG,
            compute=Compute(GPU),
        )
        self.pipelines.add(name, instance)
        return instance

    def have(self, blocks: dict[str, set[int]]) -> None:
        for name, theirs in blocks.items():
            for block in sorted(theirs):
                self.pipelines.has(name, block)


def test_instances_answer_before_they_are_whole() -> None:
    world = Loading()
    a, b = world.loads("a"), world.loads("b")
    world.have({"a": {0, 1}, "b": {2}})
    assert (a.state, b.state) == ("loading", "loading")
    world.have({"b": {3}})
    assert (a.state, b.state) == ("serving", "serving")
    for instance in (a, b):
        instance.submit(Asked(f"r{instance.instance_id}", 400, 8))
    world.clock.run()
    assert {name: len(times) for name, times in world.heard.times_s.items()} == {"ra": 8, "rb": 8}
    assert list(world.heard.ended) == ["ra", "rb"]
    assert a.pipeline is not None, "nobody has become whole"
    # Each step goes through half of the layers here and half there, over the network.
    alone_s = Compute(GPU).step_s(400, 400 * 401 // 2, 0, 0)
    assert alone_s + 0.001 < world.heard.times_s["ra"][0] < 2 * alone_s
    assert world.network.carried["activations", world.links["a"]] > 400 * 8192


def test_members_compute_at_the_same_time() -> None:
    def last_s(names: str) -> float:
        world = Loading()
        for name in "ab":
            world.loads(name)
        world.have(HALVES)
        for number in range(12):
            world.instances[names[number % len(names)]].submit(Asked(f"r{number}", 512, 1))
        world.clock.run()
        return max(world.heard.ended.values())

    # One batch at a time leaves half of the pipeline idle.
    assert last_s("ab") < 0.75 * last_s("a")


def test_who_is_whole_computes_alone_and_computes_anew_what_others_have() -> None:
    times_s = []
    for switches in (False, True):
        world = Loading()
        a, b = world.loads("a"), world.loads("b")
        world.have(HALVES)
        a.submit(Asked("r", 500, 40))
        world.clock.run(0.1)
        told = len(world.heard.times_s["r"])
        assert 0 < told < 40
        if switches:
            world.pipelines.whole("a")
            assert world.pipelines.needs("a"), "b runs through its blocks"
        world.clock.run()
        times_s.append([0.0, *world.heard.times_s["r"]])
        gaps_s = [y - x for x, y in pairwise(times_s[-1])]
        if switches:
            assert gaps_s[-1] < times_s[0][-1] - times_s[0][-2], "no way over the network"
            again_s = Compute(GPU).step_s(500, 500 * 501 // 2, 0, 0)
            assert max(gaps_s[told : told + 2]) > 0.9 * again_s
            world.pipelines.whole("b")
            assert not world.pipelines.needs("a")
            b.submit(Asked("other", 100, 2))
            a.submit(Asked("last", 100, 2))
            world.clock.run()
            assert (a.pipeline, b.pipeline) == (None, None)
            assert {len(world.heard.times_s[name]) for name in ("other", "last")} == {2}


def test_receivers_that_are_left_over_wait_for_others() -> None:
    world = Loading()
    for name in "abcd":
        world.loads(name)
    world.have({**HALVES, "c": {0, 1, 2}})
    assert [world.instances[name].state for name in "abcd"] == ["serving", "serving", "loading", "loading"]
    world.have({"d": {3}})
    assert world.instances["d"].state == "serving"
    assert world.pipelines.num_formed == 2


def test_one_that_is_whole_is_no_pipeline() -> None:
    world = Loading()
    world.loads("a")
    world.have({"a": {0, 1, 2, 3}})
    assert world.pipelines.num_formed == 0
