"""A model's gateways, instances and planner around the monitor's core, in simulated time.

Prompts wait first come, first served, and any free instance takes the next one. An instance that is asked for takes a
while to load; one too many is gone at once if it has nothing to do, else when it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.monitor.core.demand import DemandSettings, ModelDemand
from services.monitor.core.policy import DemandPolicy
from tests.services.monitor.core.reports import queue, report

STEP_S = 0.02
REPORT_S = 0.1


@dataclass
class Instance:
    name: str
    serves_at_s: float
    tokens_left: float = 0.0
    leaving: bool = False
    decoding_until_s: list[float] = field(default_factory=list)


@dataclass
class ClosedLoop:
    """``tokens_per_s`` of one instance; ``load_s`` to bring one up; each request decodes for ``decode_s``."""

    tokens_per_s: float = 2000.0
    load_s: float = 1.0
    decode_s: float = 0.5
    reported_tokens_per_s: float | None = None
    slo_ttft_s: float = 0.0
    least: int = 1
    says_load_s: bool = True
    """Whether instances report how long they took to load."""
    policy: DemandPolicy = field(default_factory=lambda: DemandPolicy(down_window_s=0.0))

    def __post_init__(self) -> None:
        self.demand = ModelDemand(self.policy)
        self.instances = [Instance(f"i{i}", 0.0) for i in range(self.least)]
        self.waiting: deque[tuple[float, float]] = deque()
        self.arrived_tokens = self.arrived = 0
        self.now_s = 0.0
        self.counts: list[tuple[float, int]] = []
        """Instances asked for at each verdict."""
        self.waited_s: list[tuple[float, float]] = []
        """When each prompt was begun, and how long it had waited."""
        self._num_made = self.least

    @property
    def serving(self) -> list[Instance]:
        return [i for i in self.instances if i.serves_at_s <= self.now_s and not i.leaving]

    def run(self, arrivals: Iterable[tuple[float, int]], until_s: float) -> None:
        """Prompts (time, tokens) in order of time."""
        coming = deque(arrivals)
        next_report_s = self.now_s
        while self.now_s < until_s:
            self.now_s += STEP_S
            while coming and coming[0][0] <= self.now_s:
                at_s, tokens = coming.popleft()
                self.waiting.append((at_s, tokens))
                self.arrived_tokens += tokens
                self.arrived += 1
            for instance in self.instances:
                self._compute(instance)
            if self.now_s >= next_report_s:
                next_report_s += REPORT_S
                self._report()
                self._follow()

    def _compute(self, instance: Instance) -> None:
        if instance.serves_at_s > self.now_s:
            return
        tokens = self.tokens_per_s * STEP_S
        while tokens > 0:
            if instance.tokens_left <= 0:
                if not self.waiting or instance.leaving:
                    return
                at_s, instance.tokens_left = self.waiting.popleft()
                self.waited_s.append((self.now_s, self.now_s - at_s))
            done = min(tokens, instance.tokens_left)
            instance.tokens_left -= done
            tokens -= done
            if instance.tokens_left <= 0:
                instance.decoding_until_s.append(self.now_s + self.decode_s)

    def _report(self) -> None:
        inflight = 0
        for instance in self.instances:
            instance.decoding_until_s = [at_s for at_s in instance.decoding_until_s if at_s > self.now_s]
            if instance.serves_at_s > self.now_s:
                continue
            prefilling = int(instance.tokens_left > 0)
            running = len(instance.decoding_until_s) + prefilling
            inflight += running
            self.demand.on_load(
                report(
                    instance.name,
                    state="draining" if instance.leaving else "serving",
                    queued_tokens=round(instance.tokens_left),
                    running_requests=running,
                    prefilling_requests=prefilling,
                    kv_blocks_used=running,
                    kv_blocks_total=200,
                    prefill_tokens_per_s=self.reported_tokens_per_s or self.tokens_per_s,
                    load_s=self.load_s if self.says_load_s else 0.0,
                ),
                self.now_s,
            )
        held = round(sum(tokens for _, tokens in self.waiting))
        self.demand.on_queue(
            "g",
            queue(
                self.arrived_tokens,
                held,
                requests=len(self.waiting),
                arrived_requests=self.arrived,
                inflight=inflight,
            ),
            self.now_s,
        )

    def _follow(self) -> None:
        staying = [i for i in self.instances if not i.leaving]
        verdict = self.demand.colocated(self.now_s, len(staying), DemandSettings(slo_ttft_s=self.slo_ttft_s))
        wanted = max(self.least, verdict.desired)
        for _ in range(len(staying), wanted):
            self.instances.append(Instance(f"i{self._num_made}", self.now_s + self.load_s))
            self._num_made += 1
        for instance in staying[wanted:]:
            instance.leaving = True
        self.instances = [i for i in self.instances if not i.leaving or i.tokens_left > 0 or i.decoding_until_s]
        self.counts.append((self.now_s, wanted))

    def most(self, since_s: float, until_s: float) -> int:
        return max(count for at_s, count in self.counts if since_s <= at_s < until_s)

    def least_of(self, since_s: float, until_s: float) -> int:
        return min(count for at_s, count in self.counts if since_s <= at_s < until_s)


def steady(tokens_per_s: float, tokens: int, since_s: float, until_s: float) -> list[tuple[float, int]]:
    """Equal prompts at equal distances."""
    every_s = tokens / tokens_per_s
    return [(since_s + i * every_s, tokens) for i in range(1, int((until_s - since_s) / every_s) + 1)]
