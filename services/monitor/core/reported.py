"""What the instances and gateways of one model reported: the last of each, and what came of late."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

from services.monitor.core.policy import DemandPolicy
from services.monitor.core.windows import CounterWindow
from shared.messages.common import Role
from shared.messages.load import LoadReport, ModelQueue

MIN_FIGURE = 1e-9
"""A token in thirty years, or a step in a nanosecond: no real measurement is smaller, and dividing by less
overflows."""
ARRIVALS_S = 60.0
"""Arrivals are remembered for this long, or for two windows of the rate."""
MANY_ENDED = 512
"""Requests after which what ended before counts half: lengths change with the traffic."""
LEAST_COMPUTED = 0.05
"""Of prompts: what was there is not there for ever."""
MANY_TOKENS = 500_000
"""Prompt tokens after which it counts half how many of those before were computed, and how many were there."""


class Reported:
    """Times are of one clock."""

    def __init__(self, policy: DemandPolicy) -> None:
        self._policy = policy
        self._instances: dict[str, tuple[float, LoadReport]] = {}
        self._gateways: dict[str, _Gateway] = {}
        self._ended = [0.0, 0.0]
        """Requests, and their output tokens."""
        self._begun = [0.0, 0.0]
        """Prompt tokens that were computed, and those whose KV was there."""
        self.load_s = 0.0
        """How long an instance takes to load: as the last one that loaded says; 0: none has."""

    def on_load(self, report: LoadReport, now_s: float) -> None:
        """An instance reports."""
        _, known = self._instances.get(report.instance_id, (0.0, None))
        if is_measured(report.load_s) and (known is None or known.load_s != report.load_s):
            self.load_s = report.load_s
        if known is not None:
            self._count_ended(
                report.ended_requests_total - known.ended_requests_total,
                report.ended_tokens_total - known.ended_tokens_total,
            )
            self._count_begun(
                report.prefill_tokens_total - known.prefill_tokens_total,
                report.cached_tokens_total - known.cached_tokens_total,
            )
        self._instances[report.instance_id] = now_s, report

    def on_queue(self, gateway_id: str, queue: ModelQueue, now_s: float) -> bool:
        """A gateway reports. Whether requests came since it did before: whatever came may have been answered already,
        and no report says that it waited or ran."""
        known = self._gateways.get(gateway_id)
        before = known.queue.arrived_requests_total if known is not None else 0
        if known is None:
            self._gateways[gateway_id] = _Gateway(self._policy, queue, now_s)
        else:
            known.take(queue, now_s)
        return queue.arrived_requests_total != before

    def on_role(self, instance_id: str, role: Role) -> None:
        """An instance has another role now. What it said in its former one does not count any more."""
        known = self._instances.get(instance_id)
        if known is not None and known[1].role != role:
            del self._instances[instance_id]

    def forget(self, now_s: float) -> None:
        """Forget what is of something dead."""
        since_s = now_s - self._policy.report_ttl_s
        for instance_id in [k for k, (at_s, _) in self._instances.items() if at_s < since_s]:
            del self._instances[instance_id]
        for gateway_id in [k for k, gateway in self._gateways.items() if gateway.at_s < since_s]:
            del self._gateways[gateway_id]

    def instances(self, role: Role | None = None) -> list[LoadReport]:
        """Of one role, or of all."""
        return [report for _, report in self._instances.values() if role in (None, report.role)]

    def is_idle(self, reports: Sequence[LoadReport]) -> bool:
        """Whether there is no request, neither there nor in a gateway."""
        for report in reports:
            if report.queued_requests or report.running_requests or report.queued_tokens:
                return False
        for gateway in self._gateways.values():
            queue = gateway.queue
            if queue.queued_requests or queue.inflight_requests or queue.queued_tokens:
                return False
        return True

    @property
    def computed_share(self) -> float:
        """Of the tokens of prompts, those that had to be computed, lately: the others' KV was there. In (0, 1]."""
        computed, cached = self._begun
        return max(LEAST_COMPUTED, computed / (computed + cached)) if cached else 1.0

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that gateways hold."""
        return sum(g.queue.queued_tokens for g in self._gateways.values())

    @property
    def queued_requests(self) -> int:
        """Requests that gateways hold."""
        return sum(g.queue.queued_requests for g in self._gateways.values())

    @property
    def open_requests(self) -> int:
        """Requests that gateways hold or have at instances."""
        return self.queued_requests + sum(g.queue.inflight_requests for g in self._gateways.values())

    def arrived_tokens(self, now_s: float, within_s: float) -> float:
        """Prompt tokens, up to ``ARRIVALS_S`` ago."""
        return sum(g.tokens.growth(now_s, within_s) for g in self._gateways.values())

    def arrived_requests(self, now_s: float, within_s: float) -> float:
        """Up to ``ARRIVALS_S`` ago."""
        return sum(g.requests.growth(now_s, within_s) for g in self._gateways.values())

    @property
    def prompt_tokens(self) -> float:
        """Of one of the prompts that arrive, on average of those in the window; of the last ones while none does, and
        0 before the first."""
        gateways = self._gateways.values()
        tokens, requests = sum(g.tokens.total for g in gateways), sum(g.requests.total for g in gateways)
        if not requests:
            tokens, requests = sum(g.last_came[0] for g in gateways), sum(g.last_came[1] for g in gateways)
        return tokens / requests if requests else 0.0

    @property
    def output_tokens(self) -> float:
        """Of a request, on average of those that ended."""
        requests, tokens = self._ended
        return max(1.0, tokens / requests) if requests else self._policy.assumed_output_tokens

    def _count_begun(self, computed: int, cached: int) -> None:
        if computed < 0 or cached < 0:
            return  # the counters began anew
        begun = self._begun
        if sum(begun) >= MANY_TOKENS:
            begun[:] = begun[0] / 2, begun[1] / 2
        begun[0] += computed
        begun[1] += cached

    def _count_ended(self, requests: int, tokens: int) -> None:
        if requests <= 0 or tokens < 0:
            return  # none, or the counters began anew
        ended = self._ended
        if ended[0] >= MANY_ENDED:
            ended[:] = ended[0] / 2, ended[1] / 2
        ended[0] += requests
        ended[1] += tokens


class _Gateway:
    def __init__(self, policy: DemandPolicy, queue: ModelQueue, now_s: float) -> None:
        window_s = max(ARRIVALS_S, 2 * policy.rate_window_s)
        self.tokens, self.requests = CounterWindow(window_s), CounterWindow(window_s)
        # When it came is unknown; treating it as if it came now leads to the same verdict.
        self.tokens.burst(now_s, queue.queued_tokens)
        self.requests.burst(now_s, queue.queued_requests)
        self.last_came: tuple[float, float] = queue.arrived_prompt_tokens_total, queue.arrived_requests_total
        """Tokens and requests of the last window in which any came; all so far, if none did since the first report."""
        self.take(queue, now_s)

    def take(self, queue: ModelQueue, now_s: float) -> None:
        self.queue, self.at_s = queue, now_s
        self.tokens.add(now_s, queue.arrived_prompt_tokens_total)
        self.requests.add(now_s, queue.arrived_requests_total)
        if self.requests.total:
            self.last_came = self.tokens.total, self.requests.total


def serving(reports: Iterable[LoadReport]) -> list[LoadReport]:
    """Of instances that take new requests."""
    return [report for report in reports if report.state == "serving"]


def waiting_requests(report: LoadReport) -> int:
    """Requests whose prompts are not computed."""
    return report.queued_requests + report.prefilling_requests


def context_tokens(reports: Sequence[LoadReport]) -> float:
    """Of one running request, on average; 0 if none runs."""
    running = sum(r.running_requests for r in reports)
    return sum(r.running_tokens for r in reports) / running if running else 0.0


def is_measured(figure: float) -> bool:
    """Whether it can be a measurement."""
    return isfinite(figure) and figure > MIN_FIGURE
