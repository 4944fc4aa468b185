"""Anything that can happen to flows, at random: bytes add up, rates are fair, and the same run is the same run."""

from __future__ import annotations

import hashlib
import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.sim.clock import Clock
from bench.sim.cluster import Cluster
from bench.sim.fabric import Fabric
from bench.sim.flows import BYTES_PER_GBIT, Flow, Network
from bench.sim.sharing import Demand, fair_rates
from tests.bench.sim.fairness import check_fair

SMALL = Cluster(
    name="small",
    hosts=6,
    gpus_per_host=2,
    gpus_per_domain=2,
    scale_up_gbps=200,
    nics_per_host=1,
    nic_gbps=10,
    host_link_gbps=12.8,
    ssds_per_host=1,
    ssd_gbps=1,
    hosts_per_leaf=2,
    oversubscription=4,
)
NUM_BYTES = 1e9
CHUNK = 1e7
NEAR = CHUNK * 1e-3


@dataclass
class Script:
    """Flows that come, go and change at random, and all that was seen."""

    seed: int
    clock: Clock = field(default_factory=Clock)
    flows: list[Flow] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.network = Network(self.clock)
        self.fabric = Fabric(SMALL)
        self.gpus = list(self.fabric.gpus)

    def path(self) -> tuple:
        source, target = self.random.sample(self.gpus, 2)
        kind = self.random.randrange(4)
        if kind == 0:
            return self.fabric.ssd_to_gpu(target)
        if kind == 1:
            return self.fabric.host_to_gpu(self.random.choice(list(self.fabric.hosts)), target)
        return self.fabric.gpu_to_gpu(source, target)

    def running(self) -> list[Flow]:
        return [flow for flow in self.flows if flow.state == "running"]

    def note(self, what: str, flow: Flow) -> None:
        self.seen.append(f"{self.clock.now_s!r} {what} {flow.sequence} {self.network.delivered_bytes(flow)!r}")

    def act(self) -> None:
        """One change, now."""
        some = self.running()
        what = self.random.choice(["start", "start", "chain", "chain", "abort", "limit", "reroute"])
        if what in {"start", "chain"} or not some:
            upstreams = [self.random.choice(some)] if some and what == "chain" else []
            self.flows.append(
                self.network.start(
                    self.path(),
                    NUM_BYTES,
                    cap_gbps=self.random.choice([math.inf, math.inf, 0.5, 3.0]),
                    upstreams=upstreams,
                    chunk_bytes=CHUNK,
                    marks=[NUM_BYTES / 4, NUM_BYTES / 2],
                    on_mark=lambda flow, mark: self.note(f"mark {mark:.0f}", flow),
                    on_end=lambda flow: self.note("end", flow),
                )
            )
            return
        flow = self.random.choice(some)
        if what == "abort":
            self.network.abort(flow)
        elif what == "limit":
            self.network.limit(flow, self.random.choice([math.inf, 0.0, 1.0, 7.0]))
        else:
            self.network.reroute(flow, self.path())
        self.note(what, flow)

    def catch_up(self) -> None:
        """Let who is about to catch up with what it forwards do so: for a moment it is near, and still faster."""
        for _ in range(100):
            if not any(self.is_about_to_catch_up(flow) for flow in self.running()):
                return
            self.clock.run(self.clock.now_s + 0.001)

    def is_about_to_catch_up(self, flow: Flow) -> bool:
        delivered, gbps = self.network.delivered_bytes(flow), self.network.rate_gbps(flow)
        return any(
            abs(self.network.delivered_bytes(upstream) - CHUNK - delivered) < NEAR
            and gbps > self.network.rate_gbps(upstream) * (1 + 1e-9)
            for upstream in flow.upstreams
            if upstream.state == "running"
        )

    def from_scratch(self) -> tuple[list[Flow], list[Demand]]:
        """All running flows and what bounds them now, without what the network remembers."""
        running = sorted(self.running(), key=lambda flow: (flow.hop, flow.sequence))
        demands = []
        for flow in running:
            demand = Demand(flow.path, flow.cap_gbps, flow.weight)
            for upstream in flow.upstreams:
                if upstream.state == "ended":
                    continue
                room = self.network.delivered_bytes(upstream) - CHUNK - self.network.delivered_bytes(flow)
                if room < -NEAR or (room < NEAR and upstream.state == "aborted"):
                    demand.cap_gbps = 0.0
                elif room < NEAR:
                    demand.behind.append((running.index(upstream), 1.0))
            demands.append(demand)
        return running, demands


@settings(max_examples=60, deadline=None)
@example(5908, [0.01, 0.01, 0.3, 1.7, 0.01, 0.3, 0.0])
@given(st.integers(0, 2**32), st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.7]), min_size=1, max_size=30))
def test_rates_are_fair_as_from_scratch_and_bytes_add_up(seed: int, pauses: list[float]) -> None:
    script = Script(seed)
    network = script.network
    for pause_s in pauses:
        script.act()
        script.catch_up()
        running, demands = script.from_scratch()
        rates = [network.rate_gbps(flow) for flow in running]
        check_fair(demands, rates)
        assert rates == pytest.approx(fair_rates(demands), rel=1e-9)
        before = [network.delivered_bytes(flow) for flow in running]
        happened = script.clock.num_happened
        now_s = script.clock.now_s
        script.clock.run(now_s + pause_s)
        for flow, rate, then in zip(running, rates, before, strict=True):
            delivered = network.delivered_bytes(flow)
            assert then <= delivered + 1.0
            assert delivered <= flow.num_bytes
            if script.clock.num_happened == happened:
                assert delivered == pytest.approx(then + rate * BYTES_PER_GBIT * pause_s, abs=1.0)
            for upstream in flow.upstreams:
                if upstream.state != "ended" and delivered > 0:
                    assert delivered <= network.delivered_bytes(upstream) - CHUNK + NEAR
    for flow in script.running():
        network.limit(flow, math.inf)
    script.clock.run()
    for flow in script.flows:
        assert flow.state != "running" or any(upstream.state != "ended" for upstream in flow.upstreams)
    assert all(network.used_gbps(resource) == 0 for flow in script.flows for resource in flow.path)


def digest(seed: int) -> str:
    """Of everything that a script saw."""
    script = Script(seed)
    for _ in range(150):
        script.act()
        script.clock.run(script.clock.now_s + script.random.choice([0.0, 0.05, 0.4]))
    script.clock.run()
    return hashlib.sha256("\n".join(script.seen).encode()).hexdigest()


def test_the_same_seed_is_the_same_run_to_the_last_bit_under_any_hash_seed() -> None:
    say = "from tests.bench.sim.test_network_properties import digest; print(digest(7))"
    said = [
        subprocess.run(
            [sys.executable, "-c", say],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    ]
    assert said == [digest(7)] * 2
    assert digest(8) != digest(7)
