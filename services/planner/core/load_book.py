"""What instances and gateways reported last, and what it means for live scaling: how long each queue takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from services.planner.core.zigzag_pairs import Overloaded
from shared.messages.load import LoadReport, ModelQueue, QueueReport

REPORT_TTL_S = 2.0
"""Reports older than this are of something dead."""
ASSUMED_TOKENS_PER_S = 2000.0
"""Prompt tokens per second of an instance, until something was measured."""
NEWEST_SHARE = 0.2
"""Of a new measurement in the smoothed speed."""


class _Instance:
    """The latest report, and the prefill speed measured so far (0: not yet)."""

    def __init__(self, report: LoadReport, now_s: float) -> None:
        self.report = report
        self.at_s = now_s
        self.tokens_per_s = 0.0

    def update(self, report: LoadReport, now_s: float) -> float:
        """Take the next report; returns the speed since the one before, 0 if they show none.

        Tokens count when a step begins, busy time when it ends. So two reports show a speed only if prompts waited at
        both: then a step was under way at either, which the tokens include and the busy time does not.
        """
        before, self.report, self.at_s = self.report, report, now_s
        tokens = report.prefill_tokens_total - before.prefill_tokens_total
        busy_s = report.busy_s_total - before.busy_s_total
        if not (_saturated(before) and _saturated(report) and tokens > 0 and busy_s > 0):
            return 0.0
        speed = tokens / busy_s
        self.tokens_per_s = _smoothed(self.tokens_per_s, speed)
        return speed


def _saturated(report: LoadReport) -> bool:
    # A live instance runs parts of prompts, a draining one is left with few, a decode instance with preempted ones.
    return report.state == "serving" and report.role != "decode" and report.queued_tokens > 0


def _smoothed(known: float, newest: float) -> float:
    return (1 - NEWEST_SHARE) * known + NEWEST_SHARE * newest if known else newest


class LoadBook:
    """The latest report of each instance and gateway. Times are of any one clock, in seconds."""

    def __init__(
        self, *, assumed_tokens_per_s: float = ASSUMED_TOKENS_PER_S, report_ttl_s: float = REPORT_TTL_S
    ) -> None:
        self._assumed_tokens_per_s = assumed_tokens_per_s
        self._report_ttl_s = report_ttl_s
        self._instances: dict[str, _Instance] = {}
        self._gateways: dict[str, tuple[float, tuple[ModelQueue, ...]]] = {}
        self._model_tokens_per_s: dict[str, float] = {}

    def on_load(self, report: LoadReport, now_s: float) -> None:
        """An instance reports."""
        known = self._instances.get(report.instance_id)
        if known is None or now_s - known.at_s > self._report_ttl_s:
            self._instances[report.instance_id] = _Instance(report, now_s)
            return
        speed = known.update(report, now_s)
        if speed:
            before = self._model_tokens_per_s.get(report.model, 0.0)
            self._model_tokens_per_s[report.model] = _smoothed(before, speed)

    def on_queue(self, report: QueueReport, now_s: float) -> None:
        """A gateway reports."""
        self._gateways[report.gateway_id] = (now_s, report.models)

    def forget(self, now_s: float) -> None:
        """Forget who has been silent for too long."""
        ttl_s = self._report_ttl_s
        self._instances = {k: v for k, v in self._instances.items() if now_s - v.at_s <= ttl_s}
        self._gateways = {k: v for k, v in self._gateways.items() if now_s - v[0] <= ttl_s}

    def tokens_per_s(self, model: str, instance_id: str = "") -> float:
        """Prefill speed: of that instance, else of the model's instances seen so far, else what is assumed."""
        known = self._instances.get(instance_id)
        own = known.tokens_per_s if known is not None else 0.0
        return own or self._model_tokens_per_s.get(model, 0.0) or self._assumed_tokens_per_s

    def overloaded(
        self,
        model: str,
        instance_ids: Collection[str],
        *,
        slo_ttft_s: float,
        now_s: float,
        in_pairs: Collection[str] = (),
    ) -> tuple[Overloaded, ...]:
        """The queue and the slack of each of ``instance_ids``, which are all that serve ``model``.

        What gateways hold is shared evenly. An instance that reports nothing has only that share. ``in_pairs``:
        instances that scale live already.
        """
        self.forget(now_s)
        queues = [q for _, models in self._gateways.values() for q in models if q.model == model]
        share_tokens = sum(q.queued_tokens for q in queues) / max(1, len(instance_ids))
        reports = {i: self._instances[i].report for i in instance_ids if i in self._instances}
        prompt_tokens = _mean_prompt_tokens(queues, reports.values())
        made = []
        for instance_id in sorted(instance_ids):
            report = reports.get(instance_id)
            speed = self.tokens_per_s(model, instance_id)
            queued_tokens = share_tokens + (report.queued_tokens if report is not None else 0)
            waited_s = report.oldest_queued_s if report is not None else 0.0
            slack_s = slo_ttft_s - waited_s - prompt_tokens / speed
            made.append(Overloaded(instance_id, queued_tokens / speed, slack_s, instance_id in in_pairs))
        return tuple(made)


def _mean_prompt_tokens(queues: Iterable[ModelQueue], reports: Iterable[LoadReport]) -> float:
    """Of what waits at gateways; else of all that arrived there; else of what waits at instances. 0: nobody knows."""
    queues, reports = list(queues), list(reports)
    sums = (
        (sum(q.queued_tokens for q in queues), sum(q.queued_requests for q in queues)),
        (sum(q.arrived_prompt_tokens_total for q in queues), sum(q.arrived_requests_total for q in queues)),
        (sum(r.queued_tokens for r in reports), sum(r.queued_requests for r in reports)),
    )
    return next((tokens / requests for tokens, requests in sums if requests), 0.0)
