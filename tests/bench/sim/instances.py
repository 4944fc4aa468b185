"""Simulated instances for tests, and what they told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.sim.clock import Clock
from bench.sim.compute import Compute
from bench.sim.flows import Network
from bench.sim.instance import SimInstance
from bench.sim.kv import KvPaths
from bench.sim.make_profiles import PROFILES as FOLDER
from bench.sim.sharing import Resource
from bench.sim.streams import Key
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.errors import BlitzError
from shared.messages.common import Role
from shared.messages.generation import DecodePlace, SamplingParams
from shared.messages.load import LoadReport
from shared.profile import read_profile
from shared.subjects import Process
from tests.processes import INCARNATION, process
from tests.records import profile

GPU = read_profile(FOLDER / "llama-3-8b-tp1-h100.json")
PROFILES = (profile(), GPU)
"""One whose steps are lines, one whose steps are not."""
CONFIG = SchedulerConfig(num_blocks=4096, block_size=16, max_batch_tokens=2048, prefill_chunk_tokens=512)


def sequence(name: str, prompt_tokens: int, max_tokens: int) -> ActiveSequence:
    params = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
    return ActiveSequence(request_id=name, attempt=0, gateway_id="", prompt=(0,) * prompt_tokens, params=params)


class Asked(NamedTuple):
    """A request as its gateway knows it."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    attempt: int = 0
    output_token_ids: tuple[int, ...] = ()

    @property
    def prompt_token_ids(self) -> range:
        return range(self.prompt_tokens)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, seed=0, ignore_eos=True)


class Heard:
    """What instances told of requests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.times_s: defaultdict[str, list[float]] = defaultdict(list)
        self.where: defaultdict[str, list[str]] = defaultdict(list)
        """The instances that told of its tokens, each once."""
        self.taken_over: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.failed: dict[str, BlitzError] = {}

    def on_tokens(self, keys: Sequence[Key], ends_s: Sequence[float], *, worker: Process, instance_id: str) -> None:
        assert list(ends_s) == sorted(ends_s)
        assert ends_s[-1] <= self._clock.now_s
        for request_id, _ in keys:
            assert request_id not in self.ended
            times_s = self.times_s[request_id]
            assert not times_s or times_s[-1] < ends_s[0]
            times_s.extend(ends_s)
            if instance_id not in self.where[request_id]:
                self.where[request_id].append(instance_id)

    def on_taken_over(self, key: Key, *, worker: Process, instance_id: str) -> None:
        self.taken_over[key[0]] = self._clock.now_s

    def on_end(self, key: Key) -> None:
        assert key[0] not in self.ended
        self.ended[key[0]] = self._clock.now_s

    def on_failed(self, key: Key, error: BlitzError) -> None:
        self.failed[key[0]] = error


class World:
    """A clock, a network of one NIC each, and instances on it."""

    def __init__(self, gbps: float = 100.0, message_s: float = 0.001, notice_s: float = 0.0) -> None:
        self.clock = Clock()
        self.heard = Heard(self.clock)
        self.reports: list[LoadReport] = []
        self.reported_s: list[float] = []
        """When each of them was made."""
        self.idle: list[SimInstance] = []
        self.on_idle: Callable[[SimInstance], object] = self.idle.append
        self.network = Network(self.clock)
        self.instances: dict[str, SimInstance] = {}
        self._out = {}  # type: dict[str, Resource]
        self._into = {}  # type: dict[str, Resource]
        self._gbps = gbps
        self.kv = KvPaths(
            network=self.network,
            path=lambda a, b: (self._out[a.instance_id], self._into[b.instance_id]),
            find=lambda place: self.instances.get(place.instance_id),
            message_s=message_s,
            notice_s=notice_s,
        )

    def instance(self, name: str, role: Role = "colocated", config: SchedulerConfig = CONFIG) -> SimInstance:
        """One that serves."""
        self._out[name], self._into[name] = Resource(f"{name} out", self._gbps), Resource(f"{name} in", self._gbps)
        instance = self.instances[name] = SimInstance(
            self.clock,
            self.heard,
            instance_id=name,
            worker=process(f"worker of {name}"),
            model="m",
            role=role,
            config=config,
            compute=Compute(GPU),
            kv=self.kv,
            on_report=self._on_report,
            on_idle=lambda instance: self.on_idle(instance),
        )
        instance.serve(1.5)
        return instance

    def _on_report(self, report: LoadReport) -> None:
        self.reports.append(report)
        self.reported_s.append(self.clock.now_s)

    def place(self, name: str) -> DecodePlace:
        return DecodePlace(worker_id=f"worker of {name}", incarnation=INCARNATION, instance_id=name)
