"""A monitor in virtual time: the real one's core, without bus and leases. It leads, and its connection is always up."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

from bench.sim.clock import Clock, Event
from bench.sim.latencies import LOCAL_NATS, Latencies
from services.monitor.core.policy import DemandPolicy
from services.monitor.core.watch import SNAPSHOT_INTERVAL_S, ProfileOf, Watch, Wish
from shared.messages.common import Role
from shared.messages.load import Demand, LoadReport, QueueReport
from shared.registry_view import RegistryView

INTERVAL_S = 0.1
"""As ``BLITZ_MONITOR_INTERVAL_S``."""
REPEAT_S = 1.0


class SimMonitor:
    """One monitor. What is told to it when it happens is known to it a message's latency later.

    An instance needs to report when its load is another than in its last report, and no more: what it said last is
    heard again once a second as long as the registry has it, as the real one's would be.
    """

    def __init__(
        self,
        clock: Clock,
        view: Callable[[], RegistryView],
        profile_of: ProfileOf,
        on_demand: Callable[[Demand], None],
        *,
        policy: DemandPolicy = DemandPolicy(),
        interval_s: float = INTERVAL_S,
        repeat_s: float = REPEAT_S,
        connected_since_s: float = -math.inf,
        first_look_s: float = 0.0,
        latencies: Latencies = LOCAL_NATS,
    ) -> None:
        """It looks from ``first_look_s`` from now on until ``stop``. ``view``: the registry now. ``on_demand``: called
        when a demand gets to the planner. ``connected_since_s``: since when it has been up; it gives nothing back for a
        while after."""
        self._clock = clock
        self._view = view
        self._profile_of = profile_of
        self._on_demand = on_demand
        self._interval_s = interval_s
        self._connected_since_s = connected_since_s
        self._latencies = latencies
        self.watch = Watch(policy, repeat_s=repeat_s)
        self._sequence = 0
        self._loads: deque[tuple[float, LoadReport]] = deque()
        """On their way: when each is here."""
        self._last: dict[str, tuple[float, LoadReport]] = {}
        """By instance id: what it said last, and when that was last heard."""
        self._refresh = False
        self._next_snapshot_s = clock.now_s
        self._turn: Event | None = clock.after(first_look_s, self._look)

    def on_load(self, report: LoadReport) -> None:
        """An instance reports."""
        self._loads.append((self._clock.now_s + self._latencies.load_s, report))

    def on_queues(self, report: QueueReport) -> None:
        """A gateway reports."""
        self._clock.after(self._latencies.queues_s, self._hear_queues, report)

    def routes_changed(self) -> None:
        """Instances came or went, or a model's settings are others."""
        self._clock.after(self._latencies.routes_s, self._hear_routes)

    def stop(self) -> None:
        """Look no more."""
        if self._turn is not None:
            self._clock.cancel(self._turn)
        self._turn = None

    # --- what is heard -----------------------------------------------------------------------

    def _hear_queues(self, report: QueueReport) -> None:
        urgent = self.watch.on_queue(report, self._clock.now_s)
        # While it asks for the registry it will look in a moment, whatever comes.
        if urgent and self._turn is not None and self._turn.call == self._look:
            self._clock.cancel(self._turn)
            self._turn = self._clock.at(self._clock.now_s, self._look)

    def _hear_routes(self) -> None:
        self._refresh = True

    def _hear_loads(self) -> None:
        now_s, loads = self._clock.now_s, self._loads
        while loads and loads[0][0] <= now_s:
            heard_s, report = loads.popleft()
            self._last[report.instance_id] = heard_s, report
            self.watch.on_load(report, heard_s)

    # --- its turn ----------------------------------------------------------------------------

    def _look(self) -> None:
        now_s = self._clock.now_s
        if self._refresh or now_s >= self._next_snapshot_s:
            self._refresh = False
            self._next_snapshot_s = now_s + SNAPSHOT_INTERVAL_S
            self._turn = self._clock.after(self._latencies.snapshot_s, self._take_snapshot)
        else:
            self._evaluate()

    def _take_snapshot(self) -> None:
        view = self._view()
        self._hear_loads()
        self.watch.on_snapshot(view, self._profile_of)
        self._hear_again({w.instance.instance_id: w.instance.role for w in view.workers if w.instance is not None})
        self._evaluate()

    def _hear_again(self, roles: Mapping[str, Role]) -> None:
        now_s = self._clock.now_s
        # What one said in a role that it has no longer is not heard again.
        self._last = {
            instance_id: said for instance_id, said in self._last.items() if roles.get(instance_id) == said[1].role
        }
        for instance_id, (heard_s, report) in self._last.items():
            if now_s - heard_s >= SNAPSHOT_INTERVAL_S / 2:
                self._last[instance_id] = now_s, report
                self.watch.on_load(report, now_s)

    def _evaluate(self) -> None:
        self._hear_loads()
        now_s = self._clock.now_s
        wishes = self.watch.evaluate(now_s, connected_since_s=self._connected_since_s, leads=True)
        for wish in wishes:
            self._publish(wish)
        self._turn = self._clock.after(self._interval_s, self._look)

    def _publish(self, wish: Wish) -> None:
        self._sequence += 1
        demand = Demand(
            publisher="monitor",
            sequence=self._sequence,
            model=wish.model,
            role=wish.role,
            desired=wish.desired,
            observed=wish.observed,
            triggered_ago_s=wish.triggered_ago_s,
            reason=wish.reason,
            term=1,
            idle=wish.idle,
            idle_for_s=wish.idle_for_s,
            deficit=wish.deficit,
            spare=wish.spare,
            urgent=wish.urgent,
        )
        self._clock.after(self._latencies.demand_s, self._on_demand, demand)
        self.watch.published(wish)
