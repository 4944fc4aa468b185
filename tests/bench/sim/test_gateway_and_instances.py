"""The gateway's and the worker's cores together, in virtual time."""

from __future__ import annotations

import random

import pytest

from bench.sim.clock import Clock
from bench.sim.compute import Compute
from bench.sim.flows import Network
from bench.sim.gateway import SimGateway
from bench.sim.instance import SimInstance
from bench.sim.kv import KvPaths
from bench.sim.requests import Served, SimRequest
from bench.sim.sharing import Resource
from bench.sim.streams import Key
from services.gateway.core.router import Assignment
from services.gateway.core.stream import StreamState
from services.worker.core.scheduling.schedule import SchedulerConfig
from shared.messages.common import Role
from shared.messages.registry import Route
from tests.bench.sim.instances import GPU
from tests.processes import INCARNATION, process

ROLES: dict[str, Role] = {"a": "prefill", "b": "prefill", "c": "decode", "d": "decode", "e": "colocated"}
CONFIG = SchedulerConfig(num_blocks=256, block_size=16, max_num_sequences=8, max_batch_tokens=1024)


class Cluster:
    """Instances that a gateway sends requests to."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.served: list[Served] = []
        self.gateway = SimGateway(self.clock, self.submit, self.served.append, cancel=self.cancel)
        self.links = {name: (Resource(f"{name} out", 50.0), Resource(f"{name} in", 50.0)) for name in ROLES}
        self.instances: dict[str, SimInstance] = {}
        kv = KvPaths(
            network=Network(self.clock),
            path=lambda one, other: (self.links[one.instance_id][0], self.links[other.instance_id][1]),
            find=lambda place: self.instances.get(place.instance_id),
        )
        for name, role in ROLES.items():
            self.instances[name] = SimInstance(
                self.clock,
                self.gateway,
                instance_id=name,
                worker=process(name),
                model="m",
                role=role,
                config=CONFIG,
                compute=Compute(GPU),
                kv=kv,
                on_report=self.gateway.on_load,
            )
            self.instances[name].serve()
        self.tell()

    def tell(self) -> None:
        routes = [
            Route(
                instance_id=name,
                worker_id=name,
                incarnation=INCARNATION,
                state=instance.state,
                role=instance.role,
                max_running_requests=CONFIG.max_num_sequences,
                max_queued_tokens=CONFIG.max_queued_tokens,
                context_tokens=CONFIG.limit_tokens,
            )
            for name, instance in self.instances.items()
            if instance.state != "failed"
        ]
        self.gateway.routes_changed("m", routes)

    def submit(self, assignment: Assignment, stream: StreamState) -> None:
        instance = self.instances[assignment.route.instance_id]
        instance.submit(stream, decode_at=stream.decode_at, may_wait=assignment.may_wait)

    def cancel(self, worker_id: str, key: Key) -> None:
        self.instances[worker_id].cancel(key)

    def kill(self, name: str) -> None:
        self.instances[name].kill()
        self.gateway.on_worker_lost(name)
        self.tell()

    def drain(self, name: str) -> None:
        self.instances[name].drain()
        self.tell()


@pytest.mark.parametrize("seed", [0, 3])
def test_every_request_is_served_once_whatever_happens_to_instances(seed: int) -> None:
    cluster, numbers = Cluster(), random.Random(seed)
    asked = {}
    for index in range(150):
        at_s = numbers.uniform(0.0, 5.0)
        asked[index] = SimRequest(index, at_s, "m", numbers.randint(1, 1500), numbers.randint(1, 120))
        cluster.clock.at(at_s, cluster.gateway.arrive, asked[index])
    cluster.clock.at(numbers.uniform(1.0, 2.5), cluster.drain, "a")
    cluster.clock.at(numbers.uniform(1.5, 4.0), cluster.kill, "c")
    cluster.clock.at(numbers.uniform(2.0, 4.5), cluster.kill, "e")
    for at_s in range(0, 40, 2):
        cluster.clock.at(float(at_s), cluster.gateway.check_conserved)
    cluster.clock.run(200.0)
    cluster.gateway.check_conserved()
    assert sorted(served.request.index for served in cluster.served) == list(asked)
    for served in cluster.served:
        assert served.failure is None, served
        assert len(served.times_s) == served.request.output_tokens
        assert list(served.times_s) == sorted(served.times_s)
    for name in ("a", "b", "d"):
        cluster.instances[name].scheduler.check()
        assert cluster.instances[name].num_requests == 0


def test_same_requests_same_times() -> None:
    def times() -> list[float]:
        cluster, numbers = Cluster(), random.Random(5)
        for index in range(150):
            request = SimRequest(index, numbers.uniform(0.0, 4.0), "m", numbers.randint(1, 900), 50)
            cluster.clock.at(request.at_s, cluster.gateway.arrive, request)
        cluster.clock.run(60.0)
        return [time_s for served in cluster.served for time_s in served.times_s]

    assert times() == times()
