"""A watch in virtual time, as the monitor's service drives one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from services.monitor.core.policy import DemandPolicy
from services.monitor.core.watch import Watch, Wish
from shared.messages.common import Role
from shared.messages.load import QueueReport
from shared.messages.registry import Floor, ModelRecord, WorkerRecord
from shared.profile import Profile
from shared.registry_view import RegistryView
from tests.records import worker_record
from tests.services.monitor.core.reports import queue

POLICY = DemandPolicy(rate_window_s=0.2, down_window_s=0.1, report_ttl_s=1.0, prefill_tokens_per_s=1000.0, slack_s=1.0)
REPEAT_S = 1.0
TICK_S = 0.1


@dataclass
class Rig:
    """A watch in virtual time; each tick it looks at the registry, hears the load that lasts, and is evaluated."""

    policy: DemandPolicy = POLICY
    workers: tuple[WorkerRecord, ...] = ()
    floors: dict[tuple[str, Role], int] = field(default_factory=dict)
    leads: bool = True
    profiled: Profile | None = None
    waiting: int | None = None
    """Prompt tokens that a gateway holds, if one reports."""
    now_s: float = 0.0
    said: list[Wish] = field(default_factory=list)
    triggered_s: list[float] = field(default_factory=list)
    """When what was said was first wanted."""

    def __post_init__(self) -> None:
        self.watch = Watch(self.policy, repeat_s=REPEAT_S)

    def show(self, *records: ModelRecord, serving: int | None = None) -> None:
        if serving is not None:
            self.workers = tuple(worker_record(f"w{i}", records[0], "serving") for i in range(serving))
        floors = {
            about: Floor(model=about[0], role=about[1], instances=instances, left_s=math.inf)
            for about, instances in self.floors.items()
        }
        self._view = RegistryView({record.name: record for record in records}, self.workers, floors)
        self._look()

    def _look(self) -> None:
        self.watch.on_snapshot(self._view, lambda *_: self.profiled)

    def queue(self, tokens: int, gateway_id: str = "gw") -> bool:
        """A gateway reports this many waiting prompt tokens, in prompts of a hundred."""
        waiting = queue(tokens, tokens)
        message = QueueReport(gateway_id=gateway_id, models=(waiting,))
        return self.watch.on_queue(message, self.now_s)

    def evaluate(self) -> list[Wish]:
        wishes = self.watch.evaluate(self.now_s, connected_since_s=0.0, leads=self.leads)
        for wish in wishes:
            self.watch.published(wish)
        self.said += wishes
        self.triggered_s += [round(self.now_s - wish.triggered_ago_s, 6) for wish in wishes]
        return wishes

    def run(self, for_s: float) -> list[Wish]:
        """What is said meanwhile."""
        known, until_s = len(self.said), self.now_s + for_s
        while self.now_s < until_s - TICK_S / 2:
            self.now_s += TICK_S
            self._look()
            if self.waiting is not None:
                self.queue(self.waiting)
            self.evaluate()
        return self.said[known:]

    def numbers(self, for_s: float = 3.0) -> set[tuple[Role, int, int]]:
        """Role, desired and observed of what is said meanwhile."""
        return {(wish.role, wish.desired, wish.observed) for wish in self.run(for_s)}
