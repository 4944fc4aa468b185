"""How many colocated instances a model needs (paper section 5.3).

In units of one instance:

    prefill = (arriving prompt tokens/s + waiting prompt tokens / slack) / (capacity · utilisation)
    decode  = max(KV blocks used / (KV blocks · upper bound), running requests / limit)
    needed  = prefill + decode             (colocated instances do both)

New requests go to colocated and to prefill instances. Of what gateways hold and of what arrives there, the share counts
that colocated instances have in those that serve. Nothing else of prefill and decode instances counts here.

Up at once: ``ceil(needed)``. Down only when the largest ``needed`` of a whole window would fit
fewer instances with room to spare. *capacity* is prompt tokens per second of one instance: an
offline profile's figure if configured, else what serving instances were seen to do per busy
second. Samples of instances that still load (``live`` ones, too) never count as capacity.

*slack* is the model's TTFT objective, or the policy's if it has none: a backlog that takes longer to compute makes its
last prompts miss the objective.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from services.monitor.core.windows import CounterWindow, MaxWindow
from shared.messages.load import LoadReport, ModelQueue

MIN_SLACK_S = 0.001
"""No backlog can be drained faster; it keeps a senseless objective from asking for endlessly many instances."""


@dataclass(frozen=True, slots=True)
class DemandPolicy:
    """Knobs of the formula above."""

    rate_window_s: float = 1.0
    down_window_s: float = 2.0
    slack_s: float = 0.5
    """Within how long a backlog should be drained, where the model has no TTFT objective."""
    prefill_tokens_per_s: float = 0.0
    """Offline profile of one instance; 0 measures it."""
    assumed_tokens_per_s: float = 2000.0
    """Until something was measured."""
    utilisation: float = 0.9
    kv_upper_bound: float = 0.9
    running_limit: int = 0
    """Running requests one instance should have at most; 0 leaves it to the KV bound."""
    down_headroom: float = 0.8
    """Scale in only if the window's load fits this share of the remaining instances."""
    report_ttl_s: float = 2.0
    """Reports older than this are of something dead."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The number of instances a model needs now."""

    desired: int
    needed: float
    """In instances, before rounding."""
    reason: str


class _Instance:
    def __init__(self, policy: DemandPolicy) -> None:
        self.prefilled = CounterWindow(policy.rate_window_s)
        self.busy = CounterWindow(policy.rate_window_s)
        self.report: LoadReport | None = None
        self.at_s = 0.0


class _Queue:
    def __init__(self, policy: DemandPolicy) -> None:
        self.arrived = CounterWindow(policy.rate_window_s)
        self.queue: ModelQueue | None = None
        self.at_s = 0.0


class ModelDemand:
    """The load of one model, from the reports of its instances and of the gateways."""

    def __init__(self, policy: DemandPolicy) -> None:
        self._policy = policy
        self._instances: dict[str, _Instance] = {}
        self._prefilling: dict[str, float] = {}
        """When each prefill instance that serves reported last."""
        self._queues: dict[str, _Queue] = {}
        self._needed = MaxWindow(policy.down_window_s)
        self._measured_tokens_per_s = 0.0

    def on_load(self, report: LoadReport, now_s: float) -> None:
        """An instance reports."""
        if report.role != "colocated":
            if report.role == "prefill" and report.state == "serving":
                self._prefilling[report.instance_id] = now_s
            else:
                self._prefilling.pop(report.instance_id, None)
            return
        instance = self._instances.setdefault(report.instance_id, _Instance(self._policy))
        waiting = instance.report is not None and instance.report.queued_tokens > 0
        instance.report, instance.at_s = report, now_s
        if report.state not in ("serving", "draining"):
            return
        instance.prefilled.add(now_s, report.prefill_tokens_total)
        instance.busy.add(now_s, report.busy_s_total)
        busy_s = instance.busy.growth(now_s)
        prefilled = instance.prefilled.growth(now_s)
        # Only a saturated instance shows what it can do.
        if waiting and report.queued_tokens > 0 and busy_s > 0.5 * self._policy.rate_window_s and prefilled > 0:
            rate = prefilled / busy_s
            known = self._measured_tokens_per_s
            self._measured_tokens_per_s = rate if not known else 0.8 * known + 0.2 * rate

    def on_queue(self, gateway_id: str, queue: ModelQueue, now_s: float) -> None:
        """A gateway reports."""
        known = self._queues.setdefault(gateway_id, _Queue(self._policy))
        known.queue, known.at_s = queue, now_s
        known.arrived.add(now_s, queue.arrived_prompt_tokens_total)

    @property
    def capacity_tokens_per_s(self) -> float:
        """Prompt tokens per second of one instance, as well as it is known."""
        return self._policy.prefill_tokens_per_s or self._measured_tokens_per_s or self._policy.assumed_tokens_per_s

    def evaluate(self, now_s: float, observed: int, *, slo_ttft_s: float = 0.0) -> Verdict:
        """The verdict when ``observed`` colocated instances serve or are on their way; ``slo_ttft_s`` 0: no
        objective."""
        policy = self._policy
        slack_s = max(slo_ttft_s, MIN_SLACK_S) if slo_ttft_s > 0 else policy.slack_s
        self._forget(now_s)
        reports = [i.report for i in self._instances.values() if i.report is not None]
        queues = [q.queue for q in self._queues.values() if q.queue is not None]
        share = self._share(reports)
        arriving = share * sum(q.arrived.growth(now_s) for q in self._queues.values()) / policy.rate_window_s
        waiting = sum(r.queued_tokens for r in reports) + share * sum(q.queued_tokens for q in queues)
        prefill = (arriving + waiting / slack_s) / (self.capacity_tokens_per_s * policy.utilisation)
        serving = [r for r in reports if r.state == "serving" and r.kv_blocks_total]
        used = sum(r.kv_blocks_used for r in reports)
        blocks = max((r.kv_blocks_total for r in serving), default=0)
        decode = used / (blocks * policy.kv_upper_bound) if blocks else 0.0
        running = sum(r.running_requests for r in reports)
        if policy.running_limit:
            decode = max(decode, running / policy.running_limit)
        needed = prefill + decode
        self._needed.add(now_s, needed)
        desired = ceil(needed - 1e-6)
        if desired < observed:
            # In small steps of evidence: the whole window's peak must fit what would remain.
            fits = ceil(self._needed.largest / policy.down_headroom - 1e-6)
            desired = min(observed, max(fits, desired)) if self._needed.full(now_s) else observed
        reason = (
            f"prefill {prefill:.2f} ({arriving:.0f} tokens/s arriving, {waiting:.0f} waiting, "
            f"{self.capacity_tokens_per_s:.0f} tokens/s each) + decode {decode:.2f} ({running} running)"
        )
        return Verdict(desired, needed, reason)

    def _share(self, reports: list[LoadReport]) -> float:
        """Of new requests, that go to colocated instances: all, unless prefill instances take some."""
        colocated = sum(1 for r in reports if r.state == "serving")
        return colocated / (colocated + len(self._prefilling)) if self._prefilling else 1.0

    def _forget(self, now_s: float) -> None:
        ttl = self._policy.report_ttl_s
        self._instances = {k: v for k, v in self._instances.items() if now_s - v.at_s <= ttl}
        self._prefilling = {k: at_s for k, at_s in self._prefilling.items() if now_s - at_s <= ttl}
        self._queues = {k: v for k, v in self._queues.items() if now_s - v.at_s <= ttl}
