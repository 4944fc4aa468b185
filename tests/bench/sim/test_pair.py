"""A live pair in virtual time, against the playback of the queue's rules."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest

from bench.sim.compute import Compute
from bench.sim.instance import SimInstance
from bench.sim.pair import SimPair
from bench.sim.pair_member import PairPaths
from services.planner.core.live.split import assign
from services.worker.core.scheduling.schedule import SchedulerConfig
from shared.messages.common import Role
from shared.messages.generation import DecodePlace
from shared.messages.live import Gate
from shared.zigzag.playback import Job, Played, play
from shared.zigzag.queue import Policy
from tests.bench.sim.instances import Asked, World, sequence
from tests.processes import process
from tests.records import profile
from tests.services.worker.live.members import assignment

CHUNK = 3001
CONFIG = SchedulerConfig(
    num_blocks=40_000, block_size=16, max_batch_tokens=CHUNK, prefill_chunk_tokens=CHUNK, max_num_sequences=64
)


class Linear(Compute):
    """A layer takes a millisecond for each token."""

    def __init__(self, num_layers: int, overhead_s: float) -> None:
        super().__init__(profile(), overhead_s=overhead_s)
        self.num_layers = num_layers
        self.kv_bytes_per_token = 131_072

    def step_s(self, prompt_tokens: int, pairs: int, num_decodes: int, context_tokens: int) -> float:
        return self.num_layers * (prompt_tokens + num_decodes) / 1000


class Rig:
    """Two members; a prompt of more than half of ``CHUNK`` tokens is a batch of its own."""

    def __init__(
        self,
        num_layers: int,
        policy: str = "zigzag",
        *,
        message_s: float = 0.0,
        overhead_s: float = 0.0,
        hidden_bytes_per_token: int = 1,
        gbps: float = 1.0,
        role: Role = "colocated",
        decoder: SchedulerConfig = CONFIG,
        source_slots: int = 64,
    ) -> None:
        self.world = World(gbps=1e6 if hidden_bytes_per_token == 1 else gbps)
        self.clock, self.heard = self.world.clock, self.world.heard
        self.num_layers = num_layers
        self.overhead_s = overhead_s
        self.decode_at: DecodePlace | None = None
        if role == "prefill":
            self.decoder = self._member("decoder", "decode", decoder)
            self.decoder.serve()
            self.decode_at = self.world.place("decoder")
        self.source = self._member("source", role, replace(CONFIG, max_num_sequences=source_slots))
        self.target = self._member("target", role)
        self.source.serve()
        self.ended: list[SimPair] = []
        paths = PairPaths(
            network=self.world.network,
            path=self.world.kv.path,
            hidden_bytes_per_token=hidden_bytes_per_token,
            message_s=message_s,
        )
        self.pair = SimPair(
            self.clock,
            assignment(policy=policy),
            self.source,
            self.target,
            paths,
            on_accepted=self.target.go_live,
            on_end=self._ended,
        )

    def _ended(self, pair: SimPair) -> None:
        self.ended.append(pair)
        self.source.scheduler.table.lending = False  # of a pair that was lost before it lent, ``submit`` did
        self.source.call(lambda: None)

    def _member(self, name: str, role: Role, config: SchedulerConfig = CONFIG) -> SimInstance:
        self.world.instance(name)  # its links
        member = self.world.instances[name] = SimInstance(
            self.clock,
            self.heard,
            instance_id=name,
            worker=process(f"worker of {name}"),
            model="m",
            role=role,
            config=config,
            kv=self.world.kv,
            compute=Linear(self.num_layers, self.overhead_s),
            expects_profile=False,
        )
        member.scheduler.budgets.cost.expect(self.num_layers / 1000, 0.0)
        return member

    def load(self, times_s: list[float]) -> None:
        for layer, time_s in enumerate(times_s, start=1):
            self.clock.at(time_s, self._loaded, layer)

    def _loaded(self, layer: int) -> None:
        if self.target.state == "failed":
            return
        self.pair.layers_ready(layer, complete=layer == self.num_layers)
        if layer == self.num_layers:
            self.target.serve()

    def submit(self, tokens: list[int], output_tokens: int = 1) -> None:
        """They wait: nothing is begun before the pair."""
        self.source.scheduler.table.lending = True
        for index, num_tokens in enumerate(tokens):
            self.source.submit(Asked(f"r{index}", num_tokens, output_tokens), decode_at=self.decode_at)

    def first_tokens(self) -> dict[str, float]:
        return {request_id: times_s[0] for request_id, times_s in self.heard.times_s.items()}

    def carried(self) -> dict[str, int]:
        """Bytes that left the members, by purpose."""
        sums: dict[str, int] = {}
        for (purpose, _), num_bytes in self.world.network.carried.items():
            sums[purpose] = sums.get(purpose, 0) + num_bytes
        return sums

    def clean(self) -> None:
        """The pair is over, and nothing is left of it."""
        (pair,) = self.ended
        assert pair.report is not None
        for member in (self.source, self.target):
            assert member.partial is None
            assert member.num_requests == 0
            assert member.scheduler.pool.num_used == 0
            member.scheduler.check()
            assert not member.scheduler.table.lending


class Case:
    """Prompts that wait while a target loads."""

    def __init__(self, seed: int) -> None:
        # Costs and times of no pattern: what comes first at one instant is not what is compared.
        rng = random.Random(seed)
        self.tokens = [rng.randint(1600, 3000) for _ in range(rng.randint(1, 8))]
        self.loaded_at = list(itertools.accumulate([rng.uniform(0.1, 9) for _ in range(rng.randint(2, 8))]))

    @property
    def jobs(self) -> list[Job]:
        return [Job(f"pair-{index}", tokens / 1000) for index, tokens in enumerate(self.tokens)]

    def played(self, policy: Policy) -> Played:
        return play(self.jobs, self.loaded_at, policy)

    def simulated(self, policy: Policy, gates: Mapping[str, int] = MappingProxyType({})) -> list[float]:
        # A step of the source takes one prompt, as the playback does once the queue is dissolved.
        rig = Rig(len(self.loaded_at), policy.value, source_slots=1)
        rig.submit(self.tokens)
        rig.load(self.loaded_at)
        rig.pair.set_gates(tuple(Gate(batch_id=batch_id, num_layers=count) for batch_id, count in gates.items()))
        rig.pair.begin()
        rig.clock.run()
        rig.clean()
        return [rig.first_tokens()[f"r{index}"] for index in range(len(self.tokens))]


def test_first_tokens_come_when_the_playback_says() -> None:
    for seed in range(40):
        case = Case(seed)
        played = case.played(Policy.ZIGZAG)
        assert case.simulated(Policy.ZIGZAG) == pytest.approx(played.completions, abs=1e-6), seed


def test_each_layer_is_a_step_of_the_engine() -> None:
    rig = Rig(4, overhead_s=0.25)
    rig.submit([2000])
    rig.load([100.0, 200.0, 300.0, 400.0])
    rig.pair.begin()
    rig.clock.run()
    rig.clean()
    assert rig.first_tokens() == {"r0": pytest.approx(4 * (2.0 + 0.25))}


@pytest.mark.parametrize("policy", [Policy.OVERLAP, Policy.STOP_THE_WORLD])
def test_the_baselines_share_about_as_the_playback_does(policy: Policy) -> None:
    same = 0
    for seed in range(40):
        case = Case(seed)
        found, played = case.simulated(policy), case.played(policy)
        # A source that is inside a layer when the target is loaded counts all of it as still to be run.
        assert statistics.mean(found) == pytest.approx(played.mean, rel=0.02), seed
        same += found == pytest.approx(played.completions, abs=1e-6)
    assert same > 30


def test_best_effort_is_not_later_than_the_playback() -> None:
    for seed in range(40):
        case = Case(seed)
        # What the target releases is the source's at once; in the playback when something happens next.
        assert statistics.mean(case.simulated(Policy.BEST_EFFORT)) < 1.01 * case.played(Policy.BEST_EFFORT).mean, seed


def test_gates_of_the_planner_bring_what_it_predicted() -> None:
    with_gates = 0
    for seed in range(40):
        case = Case(seed)
        assigned = assign(case.jobs, case.loaded_at, time_limit_s=0.0)
        with_gates += bool(assigned.gates)
        found = case.simulated(Policy.ZIGZAG, assigned.gates)
        assert found == pytest.approx(assigned.played.completions, abs=1e-6), seed
    assert with_gates > 5


@pytest.mark.parametrize(
    ("policy", "completions"),
    [
        (Policy.ZIGZAG, (7, 12, 17, 21, 24, 27, 29)),
        (Policy.OVERLAP, (7, 37, 14, 21, 28, 35, 42)),
        (Policy.STOP_THE_WORLD, (7, 14, 21, 28, 35, 42, 43)),
    ],
)
def test_the_worked_example_with_messages_on_their_way(policy: Policy, completions: tuple[int, ...]) -> None:
    rig = Rig(7, policy.value, message_s=1e-4)
    rig.submit([2000] * 7)
    rig.load([12.0 * layer + 0.01 for layer in range(7)])
    rig.pair.begin()
    rig.clock.run()
    rig.clean()
    found = [rig.first_tokens()[f"r{index}"] / 2 for index in range(7)]
    assert found == pytest.approx(completions, abs=0.02)


def test_the_first_token_does_not_wait_for_kv_and_the_second_does() -> None:
    rig = Rig(4, hidden_bytes_per_token=4096)
    kv_s = 2000 * rig.source.compute.kv_bytes_per_token / 4 * 8 / 1e9
    assert kv_s > 0.01
    rig.submit([2000, 2000], output_tokens=3)
    rig.load([1.0, 1000.0, 1001.0, 1002.0])
    rig.pair.begin()
    rig.clock.run()
    rig.clean()
    (pair,) = rig.ended
    assert pair.report is not None
    assert [(b.target_layers, b.source_layers) for b in pair.report.batches] == [(0, 4), (1, 3)]
    first_s, second_s, _ = rig.heard.times_s["r1"]
    hidden_s, step_s = 2000 * 4096 * 8 / 1e9, 4 / 1000
    assert first_s == pytest.approx(8.0 + hidden_s + 3 * 2.0, abs=step_s)
    slow = Rig(4, hidden_bytes_per_token=4096, gbps=0.05)
    slow.submit([2000, 2000], output_tokens=3)
    slow.load([1.0, 1000.0, 1001.0, 1002.0])
    slow.pair.begin()
    slow.clock.run()
    slow.clean()
    first_s, second_s, _ = slow.heard.times_s["r1"]
    assert first_s == pytest.approx(8.0 + 20 * hidden_s + 3 * 2.0, abs=2 * step_s)
    assert second_s == pytest.approx(8.0 + 20 * hidden_s + 20 * kv_s, abs=10 * step_s)


def test_requests_that_come_later_go_the_same_way() -> None:
    rig = Rig(4)
    rig.submit([2000, 2500, 2100])
    rig.load([1.0, 20.0, 50.0, 90.0])
    rig.pair.begin()
    for index in range(3, 9):
        rig.clock.at(2.0 * index, rig.source.submit, Asked(f"r{index}", 2000 + index, 4))
    rig.clock.run()
    rig.clean()
    (pair,) = rig.ended
    assert pair.report is not None
    assert len(pair.report.batches) == 9
    assert {len(times_s) for times_s in rig.heard.times_s.values()} == {1, 4}
    assert any(b.target_layers and b.source_layers for b in pair.report.batches)


@pytest.mark.parametrize("at_s", [0.0, 1.5, 6.0, 15.0, 30.0, 44.0, 60.0])
def test_a_target_that_dies_costs_no_request(at_s: float) -> None:
    rig = Rig(4, message_s=0.001, hidden_bytes_per_token=4096)
    rig.submit([2000, 2500, 2100, 1800, 2900], output_tokens=5)
    rig.load([1.0, 10.0, 20.0, 40.0])
    rig.pair.begin()
    rig.clock.run(at_s)
    lost = rig.target.kill()
    rig.pair.target_gone("it died")
    rig.clock.run()
    ended = {*rig.heard.ended, *rig.heard.failed}
    assert ended | set(lost) == {f"r{index}" for index in range(5)}
    assert not ended & set(lost)
    assert not rig.heard.ended.keys() & rig.heard.failed.keys()
    assert len(rig.ended) == 1
    assert rig.source.partial is None
    assert rig.source.scheduler.pool.num_used == 0
    rig.source.scheduler.check()


@pytest.mark.parametrize("at_s", [0.0, 1.5, 6.0, 15.0, 30.0, 44.0, 60.0])
def test_a_source_that_dies_leaves_nothing_at_the_target_but_what_that_owns(at_s: float) -> None:
    rig = Rig(4, message_s=0.001, hidden_bytes_per_token=4096)
    rig.submit([2000, 2500, 2100, 1800, 2900], output_tokens=5)
    rig.load([1.0, 10.0, 20.0, 40.0])
    rig.pair.begin()
    rig.clock.run(at_s)
    lost = rig.source.kill()
    rig.pair.source_gone("it died")
    rig.clock.run()
    assert {*rig.heard.ended, *lost} >= {f"r{index}" for index in range(5)}
    assert rig.target.partial is None
    assert rig.target.scheduler.pool.num_used == 0
    rig.target.scheduler.check()


@pytest.mark.parametrize("at_s", [0.5, 1.5, 6.0, 15.0, 30.0])
def test_cancelled_requests_leave_both_members(at_s: float) -> None:
    rig = Rig(4, message_s=0.001)
    rig.submit([2000, 2500, 2100, 1800, 2900])
    rig.load([1.0, 10.0, 20.0, 40.0])
    rig.pair.begin()
    rig.clock.run(at_s)
    gone = [request_id for request_id in ("r1", "r3", "r4") if request_id not in rig.heard.ended]
    for request_id in gone:
        rig.source.cancel((request_id, 0))
    rig.clock.run()
    rig.clean()
    assert sorted([*gone, *rig.heard.ended]) == [f"r{index}" for index in range(5)]


def test_a_source_that_drains_takes_everything_back() -> None:
    rig = Rig(4)
    rig.submit([2000, 2500, 2100, 1800])
    rig.load([1.0, 1000.0, 1001.0, 1002.0])
    rig.pair.begin()
    rig.clock.run(5.0)
    rig.source.drain()
    rig.clock.run(500.0)
    assert rig.heard.ended.keys() == {"r0", "r1", "r2", "r3"}
    rig.clock.run()
    rig.clean()


def test_kv_of_a_split_batch_goes_straight_to_where_it_is_decoded() -> None:
    rig = Rig(4, role="prefill", message_s=0.001, hidden_bytes_per_token=4096)
    layer_kv_s = 2000 * 131_072 / 4 * 8 / 1e9
    rig.submit([2000, 2000], output_tokens=20)
    rig.load([1.0, 4.0, 1000.0, 1001.0])
    rig.pair.begin()
    rig.clock.run()
    rig.clean()
    (pair,) = rig.ended
    assert pair.report is not None
    assert [(b.target_layers, b.source_layers) for b in pair.report.batches] == [(0, 4), (2, 2)]
    assert rig.heard.where == {"r0": ["source", "decoder"], "r1": ["source", "decoder"]}
    assert {len(times_s) for times_s in rig.heard.times_s.values()} == {20}
    # All but the last layer's KV has left while the others ran.
    passed_s = rig.heard.taken_over["r1"] - rig.heard.times_s["r1"][0]
    assert layer_kv_s < passed_s < 1.1 * layer_kv_s
    assert rig.carried() == {"kv": 2 * 2000 * 131_072, "activations": 3 * 2000 * 4096}


def test_kv_of_a_batch_without_room_at_the_decode_instance_goes_through_the_source() -> None:
    decoder = replace(CONFIG, num_blocks=140)
    rig = Rig(4, role="prefill", decoder=decoder, message_s=0.001, hidden_bytes_per_token=4096)
    rig.submit([2000, 2000], output_tokens=20)
    other = sequence("other", 1000, 1)
    assert rig.decoder.scheduler.reservations.reserve([other])
    rig.load([1.0, 4.0, 1000.0, 1001.0])
    rig.pair.begin()
    rig.clock.run()
    rig.decoder.scheduler.reservations.release([other])
    rig.clean()
    assert {len(times_s) for times_s in rig.heard.times_s.values()} == {20}
    assert rig.heard.where == {"r0": ["source"], "r1": ["source"]}
    assert rig.carried() == {"kv": 2000 * 131_072 / 2, "activations": 3 * 2000 * 4096}


@pytest.mark.parametrize("who", ["target", "decoder", "source"])
@pytest.mark.parametrize("at_s", [2.5, 6.0, 9.0, 12.02, 14.0, 25.0, 42.0, 60.0])
def test_whoever_dies_no_request_is_lost_or_told_of_twice(who: str, at_s: float) -> None:
    rig = Rig(4, role="prefill", message_s=0.001, hidden_bytes_per_token=4096)
    names = {f"r{index}" for index in range(5)}
    rig.submit([2000, 2500, 2100, 1800, 2900], output_tokens=300)
    rig.load([1.0, 10.0, 20.0, 40.0])
    rig.pair.begin()
    rig.clock.run(at_s)
    lost = rig.world.instances[who].kill()
    if who == "target":
        rig.pair.target_gone("it died")
    elif who == "source":
        rig.pair.source_gone("it died")
    rig.clock.run()
    assert {*rig.heard.ended, *rig.heard.failed, *lost} == names
    assert not rig.heard.ended.keys() & rig.heard.failed.keys()
    for member in (rig.source, rig.target, rig.decoder):
        if member.instance_id != who:
            assert member.partial is None
            assert member.num_requests == 0
            assert member.scheduler.pool.num_used == 0
            member.scheduler.check()
