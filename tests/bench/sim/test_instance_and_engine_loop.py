"""A simulated instance does what the worker's engine loop does with the mock engine, step by step."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from bench.sim.clock import Clock
from bench.sim.compute import Compute
from bench.sim.instance import SimInstance
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.engine.loop import EngineLoop, LoopStats
from services.worker.engine.mock.mock_engine import MockEngine
from shared.errors import Overloaded
from shared.profile import Profile
from tests.bench.sim.instances import PROFILES, Asked, Heard, sequence
from tests.processes import process

Arrival = tuple[float, Asked]


def arrivals_of(seed: int, count: int, mean_s: float, longest: int, most: int) -> list[Arrival]:
    numbers = random.Random(seed)
    at_s, arrivals = 0.0, []
    for index in range(count):
        at_s += numbers.expovariate(1 / mean_s)
        prompt_tokens = 1 if numbers.random() < 0.1 else numbers.randint(2, longest)
        arrivals.append((at_s, Asked(f"r{index}", prompt_tokens, numbers.randint(1, most))))
    return arrivals


class RealLoop:
    """The worker's loop and the mock engine, whose sleeps pass virtual time."""

    def __init__(self, profile: Profile, config: SchedulerConfig, slo_tbt_s: float) -> None:
        self.now_s = 0.0
        engine = MockEngine(
            num_layers=4, num_blocks=config.num_blocks, block_size=config.block_size, profile=profile, sleep=self._sleep
        )
        self.loop = EngineLoop(engine, config, lambda: self.now_s)
        self.loop.scheduler.budgets.keep_tbt(slo_tbt_s)
        self.loop.scheduler.budgets.expect(profile)
        self.loop.between_layers = self._take
        self.times_s: defaultdict[str, list[float]] = defaultdict(list)
        self.refused: list[str] = []
        self._arrivals: list[Arrival] = []

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def _take(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now_s:
            _, asked = self._arrivals.pop(0)
            try:
                self.loop.add(sequence(asked.request_id, asked.prompt_tokens, asked.max_tokens))
            except Overloaded:
                self.refused.append(asked.request_id)

    def run(self, arrivals: list[Arrival]) -> LoopStats:
        self._arrivals = list(arrivals)
        while self._arrivals or self.loop.has_work:
            self._take()
            if not self.loop.has_work:
                self.now_s = self._arrivals[0][0]
                continue
            output = self.loop.step()
            for part in output.outputs if output else ():
                self.times_s[part.request_id] += [self.now_s] * len(part.token_ids)
        return self.loop.stats()


@pytest.mark.parametrize("profile", PROFILES, ids=["line", "gpu"])
@pytest.mark.parametrize("slo_tbt_s", [0.0, 0.05])
@pytest.mark.parametrize(
    ("num_blocks", "mean_s", "longest", "most"), [(2000, 0.15, 900, 60), (2000, 0.01, 900, 60), (80, 0.02, 100, 150)]
)
def test_tokens_come_at_the_same_times(
    profile: Profile, slo_tbt_s: float, num_blocks: int, mean_s: float, longest: int, most: int
) -> None:
    """Few requests; many at once; and so many that blocks run out, and some are preempted or refused."""
    config = SchedulerConfig(
        num_blocks=num_blocks, block_size=16, max_num_sequences=16, max_queued_requests=20, prefill_chunk_tokens=512
    )
    arrivals = arrivals_of(7, 40, mean_s, longest, most)
    real = RealLoop(profile, config, slo_tbt_s)
    stats = real.run(arrivals)

    clock = Clock()
    heard = Heard(clock)
    refused: list[str] = []
    instance = SimInstance(
        clock,
        heard,
        instance_id="i",
        worker=process("w"),
        model="m",
        role="colocated",
        config=config,
        compute=Compute(profile),
        slo_tbt_s=slo_tbt_s,
    )
    instance.serve()

    def arrive(asked: Asked) -> None:
        try:
            instance.submit(asked)
        except Overloaded:
            refused.append(asked.request_id)

    for at_s, asked in arrivals:
        clock.at(at_s, arrive, asked)
    clock.run()

    assert refused == real.refused
    assert heard.times_s.keys() == real.times_s.keys()
    for request_id, times_s in real.times_s.items():
        assert heard.times_s[request_id] == pytest.approx(times_s, rel=1e-9), request_id
    assert set(heard.ended) == set(real.times_s)
    report = instance.load_report(clock.now_s)
    assert report.preemptions_total == stats.load.preemptions_total
    assert (report.preemptions_total > 0) == (num_blocks == 80)
    assert report.prefill_tokens_total == stats.load.prefill_tokens_total
    assert report.decode_tokens_total == stats.load.decode_tokens_total
    assert report.ended_tokens_total == stats.load.ended_tokens_total
    assert report.busy_s_total == pytest.approx(stats.busy_s_total)
    assert report.decode_base_s == pytest.approx(stats.speed.decode_base_s)
    assert report.prefill_tokens_per_s == pytest.approx(stats.speed.prefill_tokens_per_s)
    instance.scheduler.check()
    assert clock.num_happened < 40 * len(arrivals)
