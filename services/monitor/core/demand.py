"""How many colocated instances one model needs, from what its instances and the gateways report.

``services.monitor.core.need`` has the formula. This module decides what goes into it, and what becomes of the result:

- Up at once, to ``ceil(needed)``. Down only when the largest ``needed`` of a whole window would fit fewer instances
  with headroom, or when there was no request anywhere for as long; and no earlier than a window after the connection to
  the bus: before, silence says nothing. How long the window is, ``services.monitor.core.give_back`` says.
- Requests of instances that drain ask for nothing: they are finished where they are.
- A model's last instance stays for the model's keep-alive after its last request.
- While prompts are overdue, ``needed`` does not fall: the instances were asked for when the prompts came. If all of
  them serve and the overdue prompts still do not become fewer, the instances are slower than they say: the monitor asks
  for one more, and so on.
- New requests go to colocated and to prefill instances. Only the share of colocated instances counts, of what gateways
  hold and of what arrives there. Nothing else of prefill and decode instances counts here.
- The speed of one instance comes from its profile (``shared.profile``), at the length of the prompts that come and the
  contexts that run; else from the figure that is configured, else from what the instances report: the fastest of them,
  since an instance that has hardly begun has measured only small steps. Without a current report the last one counts,
  and before the first an assumed speed. A profile also says how long an instance takes to load, until one has.
- The slack is the model's TTFT objective, or the policy's if it has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite

from services.monitor.core.give_back import MAX_WINDOW_S, idle_window_s
from services.monitor.core.need import Capability, Load, Need, max_decodes, need_of
from services.monitor.core.windows import CounterWindow, MaxWindow
from shared.messages.common import TAKES_PROMPTS
from shared.messages.load import LoadReport, ModelQueue
from shared.profile import Profile

MIN_SLACK_S = 0.001
"""No backlog can be drained faster; this bound keeps an absurd objective from asking for any number of instances."""
MIN_FIGURE = 1e-9
"""A token in thirty years, or a step in a nanosecond: no real measurement is smaller, and dividing by less
overflows."""
MAX_SLACK_S = 60.0
"""Arrivals are remembered for this long at most."""


@dataclass(frozen=True, slots=True)
class DemandPolicy:
    """Knobs of the formula and of its use."""

    rate_window_s: float = 1.0
    down_window_s: float = 0.0
    """How long an instance that is not needed is kept; 0: for as long as fetching it again would cost."""
    assumed_load_s: float = 1.0
    """Until an instance said how long it took to load."""
    slack_s: float = 0.5
    """Within how long a backlog should be drained, where the model has no TTFT objective."""
    prefill_tokens_per_s: float = 0.0
    """Of one instance of a model without a profile; 0 takes what instances report."""
    assumed_tokens_per_s: float = 2000.0
    """Until something was reported."""
    utilisation: float = 0.9
    kv_upper_bound: float = 0.9
    running_limit: int = 0
    """Running requests one instance should have at most; 0 leaves it to KV and the TBT objective."""
    down_headroom: float = 0.8
    """Scale in only if the window's load fits this share of the remaining instances."""
    report_ttl_s: float = 2.0
    """A report older than this comes from something dead."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The number of instances a model needs now."""

    desired: int
    needed: float
    """In instances, before rounding."""
    why: str | tuple[Load, Need, float]
    """In words, or the figures that it rests on: load, need and prompt tokens per second of one instance."""
    idle: int = 0
    """Instances that the load does not need at this moment, whatever is kept for later."""

    @property
    def reason(self) -> str:
        """For people. Put into words only on demand: hundreds of verdicts are made ten times a second, and nearly
        all of them are what is there."""
        if isinstance(self.why, str):
            return self.why
        load, need, tokens_per_s = self.why
        return (
            f"prefill {need.prefill:.2f} ({load.arrived_tokens_per_s:.0f} tokens/s arriving, "
            f"{load.waiting_tokens:.0f} waiting, {load.overdue_tokens:.0f} of them overdue, "
            f"{tokens_per_s:.0f} tokens/s each) + decode {need.decode:.2f}, "
            f"memory {need.memory:.2f}; {load.requests} requests, {load.running_requests} running"
        )


_NO_LOAD, _NO_NEED = Load(), Need(0.0, 0.0, 0.0, 0.0)


class _Gateway:
    def __init__(self, policy: DemandPolicy, queue: ModelQueue, now_s: float) -> None:
        self._window_s = policy.rate_window_s
        self.tokens = CounterWindow(max(MAX_SLACK_S, policy.rate_window_s))
        self.requests = CounterWindow(policy.rate_window_s)
        # When it came is unknown; treating it as if it came now leads to the same verdict.
        self.tokens.burst(now_s, queue.queued_tokens)
        self.requests.burst(now_s, queue.queued_requests)
        self.take(queue, now_s)

    def take(self, queue: ModelQueue, now_s: float) -> None:
        self.queue, self.at_s = queue, now_s
        self.tokens.add(now_s, queue.arrived_prompt_tokens_total)
        self.requests.add(now_s, queue.arrived_requests_total)


class ModelDemand:
    """The load of one model, from the reports of its instances and of the gateways."""

    def __init__(self, policy: DemandPolicy) -> None:
        self._policy = policy
        self.profile: Profile | None = None
        """What one of its instances can do, if that was measured beforehand."""
        self._instances: dict[str, tuple[float, LoadReport]] = {}
        self._prefilling: dict[str, float] = {}
        """When each prefill instance that serves reported last."""
        self._gateways: dict[str, _Gateway] = {}
        self._needed = MaxWindow(MAX_WINDOW_S)
        self._idle_since_s: float | None = None
        """Since when there is no request anywhere, and none came."""
        self._reported_load_s = 0.0
        """How long an instance takes to load: as the last one that loaded says."""
        self._overdue = _Overdue(policy.rate_window_s)
        self._tokens_per_s = 0.0
        self._decode_s = (0.0, 0.0)
        """Base and share of a request in a decode step. Both figures are the last that any instance reported."""
        self._measured: tuple[object, Capability] | None = None
        """What the capability follows from (speeds that instances reported, profile, objective), and it."""

    def on_load(self, report: LoadReport, now_s: float) -> None:
        """An instance reports."""
        if report.role == "colocated":
            known = self._instances.get(report.instance_id)
            if _is_measured(report.load_s) and (known is None or known[1].load_s != report.load_s):
                self._reported_load_s = report.load_s
            self._instances[report.instance_id] = (now_s, report)
        elif report.role in TAKES_PROMPTS and report.state == "serving":
            self._prefilling[report.instance_id] = now_s
        else:
            self._prefilling.pop(report.instance_id, None)

    def on_queue(self, gateway_id: str, queue: ModelQueue, now_s: float) -> None:
        """A gateway reports."""
        known = self._gateways.get(gateway_id)
        if queue.arrived_requests_total != (known.queue.arrived_requests_total if known is not None else 0):
            # Whatever came since may have been answered already: no report says that it waited or ran.
            self._idle_since_s = None
        if known is None:
            self._gateways[gateway_id] = _Gateway(self._policy, queue, now_s)
        else:
            known.take(queue, now_s)

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens per second of one instance: the best figure available."""
        if self.profile is not None:
            return self.profile.prefill_tokens_per_s(self._prompt_tokens())
        return self._policy.prefill_tokens_per_s or self._tokens_per_s or self._policy.assumed_tokens_per_s

    def evaluate(
        self,
        now_s: float,
        observed: int,
        *,
        slo_ttft_s: float = 0.0,
        slo_tbt_s: float = 0.0,
        keep_alive_s: float = 0.0,
        connected_since_s: float = -inf,
    ) -> Verdict:
        """The verdict when ``observed`` colocated instances serve or are on their way. Objectives of 0: none.
        ``keep_alive_s``: how long the last instance stays after the last request, if that is longer than it would by
        itself. ``connected_since_s``: when this process's own connection came up."""
        policy = self._policy
        slack_s = min(max(slo_ttft_s, MIN_SLACK_S), MAX_SLACK_S) if slo_ttft_s > 0 else policy.slack_s
        self._forget(now_s)
        reports = [report for _, report in self._instances.values()]
        serving = [r for r in reports if r.state == "serving"]
        capability = self._capability(serving, slo_tbt_s)
        if self.is_idle(reports):
            # Of hundreds of models nearly all, nearly always: nothing asks for more instances than requests.
            load, need, held = _NO_LOAD, _NO_NEED, self._overdue.hold(0.0, 0.0, len(serving), now_s)
        else:
            load = self._load(reports, now_s, slack_s)
            need = need_of(load, capability, slack_s=slack_s)
            self._needed.add(now_s, need.instances)
            lately = self._needed.largest(now_s, self._window_s())
            held = self._overdue.hold(load.overdue_tokens, lately, len(serving), now_s)
        if load.requests or load.waiting_tokens:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        needed = min(max(need.instances, held), load.requests)
        self._needed.add(now_s, needed)
        # What decodes may need next to nothing, but it needs the instance where it does.
        desired, idle = max(_rounded_up(needed), min(observed, 1 if load.running_requests else 0)), 0
        if desired < observed:
            connected_s = now_s - connected_since_s
            if connected_s >= policy.report_ttl_s:
                idle = observed - desired
            desired = min(observed, max(desired, self._kept(now_s, observed, keep_alive_s, connected_s)))
        return Verdict(desired, needed, (load, need, self.tokens_per_s), idle)

    def _kept(self, now_s: float, observed: int, keep_alive_s: float, connected_s: float) -> int:
        """Instances that stay for what may come, whatever is needed now."""
        policy, window_s = self._policy, self._window_s()
        if connected_s < max(window_s, policy.report_ttl_s):
            return observed
        idle_s = now_s - self._idle_since_s if self._idle_since_s is not None else 0.0
        idle_window = policy.down_window_s or idle_window_s(self._load_s)
        last = 1 if idle_s < max(idle_window, keep_alive_s) else 0
        if idle_s >= idle_window:
            return last
        if not self._needed.full(now_s, window_s):
            return observed
        # In small steps of evidence: the whole window's peak must fit what would remain.
        return max(last, _rounded_up(self._needed.largest(now_s, window_s) / policy.down_headroom))

    def _window_s(self) -> float:
        """Whose load has to fit fewer instances. Never shorter than two windows of the rate, or random arrivals
        would be taken for ups and downs."""
        return self._policy.down_window_s or max(idle_window_s(self._load_s), 2 * self._policy.rate_window_s)

    def is_idle(self, reports: Sequence[LoadReport]) -> bool:
        """Whether there is no request anywhere."""
        for report in reports:
            if report.queued_requests or report.running_requests or report.queued_tokens:
                return False
        for gateway in self._gateways.values():
            queue = gateway.queue
            if queue.queued_requests or queue.inflight_requests or queue.queued_tokens:
                return False
        return True

    def _load(self, reports: Sequence[LoadReport], now_s: float, slack_s: float) -> Load:
        policy, gateways = self._policy, self._gateways.values()
        share = self._share(reports)
        at_instances = sum(r.queued_requests + r.running_requests for r in reports)
        # What drains finishes what it has, wherever the other instances are.
        reports = [r for r in reports if r.state != "draining"]
        waiting = sum(r.queued_tokens for r in reports) + share * sum(g.queue.queued_tokens for g in gateways)
        waits = sum(_waiting_requests(r) for r in reports) + share * sum(g.queue.queued_requests for g in gateways)
        burst = share * self._arrived(now_s, slack_s)
        in_gateways = sum(g.queue.queued_requests + g.queue.inflight_requests for g in gateways)
        running = sum(r.running_requests for r in reports)
        blocks = max((r.kv_blocks_total for r in reports if r.state == "serving"), default=0)
        used = sum(r.kv_blocks_used for r in reports)
        return Load(
            arrived_tokens_per_s=share * self._arrived(now_s, policy.rate_window_s) / policy.rate_window_s,
            burst_tokens=burst,
            waiting_tokens=waiting,
            overdue_tokens=max(0.0, waiting - burst),
            prompts=max(waits, share * sum(g.requests.growth(now_s) for g in gateways)),
            running_requests=running,
            decoding_requests=running - sum(r.prefilling_requests for r in reports),
            memory=used / (blocks * policy.kv_upper_bound) if blocks else 0.0,
            # Either side may know of one a moment earlier. Not the sum: one on its way would be two.
            requests=max(in_gateways, at_instances),
        )

    def _arrived(self, now_s: float, within_s: float) -> float:
        return sum(g.tokens.growth(now_s, within_s) for g in self._gateways.values())

    def _capability(self, serving: Sequence[LoadReport], slo_tbt_s: float) -> Capability:
        """Of one instance; what instances report is remembered for when none does."""
        speeds = [(r.prefill_tokens_per_s, r.decode_base_s, r.decode_request_s) for r in serving]
        profiled = self.profile and (self.profile, self._prompt_tokens(), _context_tokens(serving))
        basis = speeds, profiled, slo_tbt_s
        if self._measured is not None and self._measured[0] == basis:
            return self._measured[1]
        self._tokens_per_s = max((s for r in serving if _is_measured(s := r.prefill_tokens_per_s)), default=0.0) or (
            self._tokens_per_s
        )
        steps = [(r.decode_base_s, r.decode_request_s) for r in serving if _is_measured(r.decode_request_s)]
        if steps:
            self._decode_s = max(steps, key=lambda step: max_decodes(step[0], step[1], slo_tbt_s))
        decode_s = self._decode_s
        if self.profile is not None:
            fit = self.profile.decode_fit
            decode_s = fit.base_s, fit.request_s + _context_tokens(serving) * fit.context_token_s
        capability = Capability(
            self.tokens_per_s * self._policy.utilisation,
            max_decodes(*decode_s, slo_tbt_s),
            self._policy.running_limit or inf,
        )
        self._measured = basis, capability
        return capability

    def _prompt_tokens(self) -> float:
        """Of one of the prompts that arrive, on average; 0 before the first."""
        queues = [gateway.queue for gateway in self._gateways.values()]
        requests = sum(queue.arrived_requests_total for queue in queues)
        return sum(queue.arrived_prompt_tokens_total for queue in queues) / requests if requests else 0.0

    @property
    def _load_s(self) -> float:
        profiled_s = self.profile.load_s if self.profile is not None else 0.0
        return self._reported_load_s or profiled_s or self._policy.assumed_load_s

    def _share(self, reports: Sequence[LoadReport]) -> float:
        """Of new requests, that go to colocated instances: all, unless prefill instances take some."""
        colocated = sum(1 for r in reports if r.state == "serving")
        return colocated / (colocated + len(self._prefilling)) if self._prefilling else 1.0

    def _forget(self, now_s: float) -> None:
        since_s = now_s - self._policy.report_ttl_s
        for instance_id in [k for k, (at_s, _) in self._instances.items() if at_s < since_s]:
            del self._instances[instance_id]
        for instance_id in [k for k, at_s in self._prefilling.items() if at_s < since_s]:
            del self._prefilling[instance_id]
        for gateway_id in [k for k, gateway in self._gateways.items() if gateway.at_s < since_s]:
            del self._gateways[gateway_id]


class _Overdue:
    """What was needed since prompts became overdue, as long as some are."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._held = 0.0
        self._since: tuple[float, float] | None = None
        """When all that was asked for began to serve, or what is overdue last shrank, and how much there was then."""

    def hold(self, overdue_tokens: float, lately: float, num_serving: int, now_s: float) -> float:
        """Instances that are needed for what is overdue; ``lately``: the most that were needed while it waited."""
        if overdue_tokens <= 0:
            self._held, self._since = 0.0, None
            return 0.0
        self._held = max(self._held, lately)
        if num_serving < _rounded_up(self._held):
            self._since = None
        elif self._since is None or overdue_tokens < self._since[1]:
            self._since = (now_s, overdue_tokens)
        elif now_s - self._since[0] >= self._patience_s:
            self._held, self._since = num_serving + 1.0, None
        return self._held


def _waiting_requests(report: LoadReport) -> int:
    """Requests whose prompts are not computed; a worker of 0.1 does not say which of them it has begun."""
    return max(report.queued_requests + report.prefilling_requests, 1 if report.queued_tokens else 0)


def _context_tokens(reports: Sequence[LoadReport]) -> float:
    """Of one running request, on average; 0 if none runs."""
    running = sum(r.running_requests for r in reports)
    return sum(r.running_tokens for r in reports) / running if running else 0.0


def _is_measured(figure: float) -> bool:
    return isfinite(figure) and figure > MIN_FIGURE


def _rounded_up(instances: float) -> int:
    return ceil(instances - 1e-6)
