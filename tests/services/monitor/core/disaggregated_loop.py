"""A disaggregated model's gateways, prefill and decode instances and planner around the monitor's core, in simulated
time.

Prompts wait first come, first served, and any free prefill instance takes the next one. A computed prompt goes to the
decode instance with the fewest requests that has blocks for it, else it waits at its prefill instance, or decodes there
while there is no decode instance at all. An instance that is asked for takes a while to load; one too many finishes
what it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.monitor.core.demand import ModelDemand, Verdict
from services.monitor.core.policy import DemandPolicy
from services.monitor.core.roles import ROLES, There, verdicts
from shared.messages.common import Role
from shared.messages.registry import ModelRecord
from tests.records import model
from tests.services.monitor.core.reports import queue, report

STEP_S = 0.02
REPORT_S = 0.1
BLOCK_TOKENS = 16


@dataclass
class Request:
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    left: float = 0.0
    """Prompt tokens to compute."""
    produced: float = 0.0

    @property
    def blocks(self) -> int:
        return -(-int(self.prompt_tokens - self.left + self.produced + 1) // BLOCK_TOKENS)


@dataclass
class Instance:
    name: str
    role: Role
    serves_at_s: float
    leaving: bool = False
    prefilling: list[Request] = field(default_factory=list)
    held: list[Request] = field(default_factory=list)
    decoding: list[Request] = field(default_factory=list)
    ended: int = 0
    ended_tokens: int = 0

    @property
    def requests(self) -> list[Request]:
        return [*self.prefilling, *self.held, *self.decoding]

    @property
    def blocks(self) -> int:
        return sum(request.blocks for request in self.requests)


@dataclass
class DisaggregatedLoop:
    """``tokens_per_s``: prompt tokens of one prefill instance. A decode step of n takes ``base_s + n * request_s``."""

    record: ModelRecord = field(default_factory=lambda: model(serving="disaggregated", slo_tbt_s=0.05))
    tokens_per_s: float = 2000.0
    base_s: float = 0.01
    request_s: float = 0.001
    blocks_total: int = 2000
    load_s: float = 1.0
    num_workers: int = 1000
    policy: DemandPolicy = field(default_factory=lambda: DemandPolicy(down_window_s=0.0))
    start: tuple[Role, ...] = ("prefill", "decode")

    def __post_init__(self) -> None:
        self.demand = ModelDemand(self.policy)
        self.instances = [Instance(f"i{n}", role, 0.0) for n, role in enumerate(self.start)]
        self.waiting: deque[Request] = deque()
        self.arrived: list[Request] = []
        self.now_s = 0.0
        self.verdicts: list[tuple[float, Mapping[Role, Verdict]]] = []
        self.first_token_s: list[float] = []
        self.slow_token_s = 0.0
        """Request seconds of decoding in which steps took longer than the objective, or that were spent waiting for a
        decode instance."""
        self.token_s = 0.0
        """Request seconds of decoding."""
        self.ended = 0
        self._num_made = len(self.start)

    def serving(self, role: Role) -> list[Instance]:
        return [i for i in self.instances if i.role == role and i.serves_at_s <= self.now_s and not i.leaving]

    def run(self, arrivals: Iterable[tuple[float, int, int]], until_s: float) -> None:
        """Requests (time, prompt tokens, output tokens) in order of time."""
        coming = deque(arrivals)
        next_report_s = self.now_s
        while self.now_s < until_s:
            self.now_s += STEP_S
            while coming and coming[0][0] <= self.now_s:
                request = Request(*coming.popleft())
                request.left = request.prompt_tokens
                self.waiting.append(request)
                self.arrived.append(request)
            for instance in self.instances:
                if instance.serves_at_s <= self.now_s:
                    self._prefill(instance)
                    self._decode(instance)
            self._pass_on()
            if self.now_s >= next_report_s:
                next_report_s += REPORT_S
                self._report()
                self._follow()

    def _prefill(self, instance: Instance) -> None:
        tokens = self.tokens_per_s * STEP_S
        while tokens > 0:
            if not instance.prefilling:
                if not self.waiting or instance.leaving or instance.role == "decode":
                    return
                instance.prefilling.append(self.waiting.popleft())
            request = instance.prefilling[0]
            done = min(tokens, request.left)
            request.left -= done
            tokens -= done
            if request.left <= 0:
                self.first_token_s.append(self.now_s - request.arrived_s)
                instance.held.append(instance.prefilling.pop())

    def _decode(self, instance: Instance) -> None:
        step_s = self.base_s + len(instance.decoding) * self.request_s
        for request in list(instance.decoding):
            request.produced += STEP_S / step_s
            self.token_s += STEP_S
            if step_s > self.record.slo_tbt_s > 0:
                self.slow_token_s += STEP_S
            if request.produced >= request.output_tokens:
                instance.decoding.remove(request)
                instance.ended += 1
                instance.ended_tokens += request.output_tokens
                self.ended += 1
        self.slow_token_s += STEP_S * len(instance.held)
        self.token_s += STEP_S * len(instance.held)

    def _pass_on(self) -> None:
        decoders = self.serving("decode")
        for instance in self.instances:
            for request in list(instance.held):
                fits = [d for d in decoders if d.blocks + request.blocks < self.blocks_total]
                to = min(fits, key=lambda d: len(d.decoding), default=None if decoders else instance)
                if to is not None:
                    instance.held.remove(request)
                    to.decoding.append(request)

    def _report(self) -> None:
        inflight = 0
        for instance in self.instances:
            inflight += len(instance.requests)
            if instance.serves_at_s > self.now_s:
                continue
            running = instance.requests
            self.demand.on_load(
                report(
                    instance.name,
                    role=instance.role,
                    state="draining" if instance.leaving else "serving",
                    queued_tokens=round(sum(r.left for r in running)),
                    running_requests=len(running),
                    running_tokens=round(sum(r.prompt_tokens - r.left + r.produced for r in running)),
                    prefilling_requests=len(instance.prefilling),
                    kv_blocks_used=min(self.blocks_total, instance.blocks),
                    kv_blocks_total=self.blocks_total,
                    kv_block_tokens=BLOCK_TOKENS,
                    prefill_tokens_per_s=self.tokens_per_s,
                    decode_base_s=self.base_s,
                    decode_request_s=self.request_s,
                    ended_requests_total=instance.ended,
                    ended_tokens_total=instance.ended_tokens,
                    load_s=self.load_s,
                ),
                self.now_s,
            )
        self.demand.on_queue(
            "g",
            queue(
                sum(r.prompt_tokens for r in self.arrived),
                sum(r.prompt_tokens for r in self.waiting),
                requests=len(self.waiting),
                arrived_requests=len(self.arrived),
                inflight=inflight,
            ),
            self.now_s,
        )

    def _follow(self) -> None:
        staying = {role: [i for i in self.instances if i.role == role and not i.leaving] for role in ROLES}
        there = {role: There(len(staying[role]), len(self.serving(role))) for role in ROLES}
        found = verdicts(self.demand, self.record, there, self.now_s)
        for role, verdict in found.items():
            for _ in range(len(staying[role]), verdict.desired):
                if len(self.instances) < self.num_workers:
                    self.instances.append(Instance(f"i{self._num_made}", role, self.now_s + self.load_s))
                    self._num_made += 1
            for instance in staying[role][verdict.desired :]:
                instance.leaving = True
        self.instances = [i for i in self.instances if not i.leaving or i.requests]
        self.verdicts.append((self.now_s, found))

    def wanted(self, role: Role, since_s: float = 0.0, until_s: float = float("inf")) -> list[int]:
        """The numbers asked for."""
        return [found[role].desired for at_s, found in self.verdicts if since_s <= at_s < until_s]


def steady(
    requests_per_s: float, prompt_tokens: int, output_tokens: int, since_s: float, until_s: float
) -> list[tuple[float, int, int]]:
    """Equal requests at equal distances."""
    count = int((until_s - since_s) * requests_per_s)
    return [(since_s + (i + 1) / requests_per_s, prompt_tokens, output_tokens) for i in range(count)]
