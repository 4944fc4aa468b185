"""What instances and gateways reported last, and what it means for live scaling: how long each queue will take."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import inf
from types import MappingProxyType

from services.planner.core.live.pairs import SourceCandidate
from shared.messages.common import MAX_COUNT
from shared.messages.load import LoadReport, ModelQueue, QueueReport
from shared.profile import Profile

REPORT_TTL_S = 2.0
"""A report older than this comes from something dead."""
MIN_TOKENS_PER_S = 1e-9
"""No real measurement is smaller, and dividing by less overflows."""
ASSUMED_TOKENS_PER_S = 2000.0
"""Prompt tokens per second of an instance, until one reports what it measured."""


class LoadView:
    """The latest report of each instance and gateway. Times are of any one clock, in seconds."""

    def __init__(
        self, *, assumed_tokens_per_s: float = ASSUMED_TOKENS_PER_S, report_ttl_s: float = REPORT_TTL_S
    ) -> None:
        self._assumed_tokens_per_s = assumed_tokens_per_s
        self._report_ttl_s = report_ttl_s
        self._instances: dict[str, tuple[float, LoadReport]] = {}
        self._gateways: dict[str, tuple[float, dict[str, ModelQueue]]] = {}
        """What each holds, by model."""
        self._model_tokens_per_s: dict[str, float] = {}
        """The latest figure of any of a model's instances."""
        self._load_s: dict[str, float] = {}
        """The same: how long it took to load."""
        self._lacks_since_s: dict[str, float] = {}
        """Since when each instance has reported a waiting request that lacks KV."""

    def on_load(self, report: LoadReport, now_s: float) -> None:
        """An instance reports."""
        self._instances[report.instance_id] = (now_s, report)
        if MIN_TOKENS_PER_S < report.prefill_tokens_per_s < inf:
            self._model_tokens_per_s[report.model] = report.prefill_tokens_per_s
        if 0.0 < report.load_s < inf:
            self._load_s[report.model] = report.load_s
        if report.head_blocks:
            self._lacks_since_s.setdefault(report.instance_id, now_s)
        else:
            self._lacks_since_s.pop(report.instance_id, None)

    def on_queue(self, report: QueueReport, now_s: float) -> None:
        """A gateway reports."""
        self._gateways[report.gateway_id] = (now_s, {queue.model: queue for queue in report.models})

    def forget(self, now_s: float) -> None:
        """Forget instances and gateways that have been silent for too long."""
        ttl_s = self._report_ttl_s
        self._instances = {k: v for k, v in self._instances.items() if now_s - v[0] <= ttl_s}
        self._gateways = {k: v for k, v in self._gateways.items() if now_s - v[0] <= ttl_s}
        self._lacks_since_s = {k: v for k, v in self._lacks_since_s.items() if k in self._instances}

    def tokens_per_s(self, model: str, instance_id: str = "") -> float:
        """Prefill speed as that instance reports it, else as the model's latest report has it, else as is assumed."""
        known = self._instances.get(instance_id)
        own = known[1].prefill_tokens_per_s if known is not None else 0.0
        return (
            own
            if MIN_TOKENS_PER_S < own < inf
            else self._model_tokens_per_s.get(model, 0.0) or self._assumed_tokens_per_s
        )

    def load_s(self, model: str) -> float:
        """How long an instance of the model took to load, as the latest report has it; 0: none has said."""
        return self._load_s.get(model, 0.0)

    def is_at_work(self, instance_id: str) -> bool:
        """Whether an instance had requests when it reported last."""
        known = self._instances.get(instance_id)
        return known is not None and known[1].running_requests + known[1].queued_requests > 0

    def free_kv_tokens(self, instance_id: str) -> int:
        """As it reported last; 0 if it reports nothing, or not how large its blocks are."""
        known = self._instances.get(instance_id)
        return 0 if known is None else _blocks(known[1], known[1].kv_blocks_total - known[1].kv_blocks_used)

    def used_kv_tokens(self, instance_id: str) -> int:
        """As it reported last."""
        known = self._instances.get(instance_id)
        return 0 if known is None else _blocks(known[1], known[1].kv_blocks_used)

    def running_requests(self, instance_id: str) -> int:
        """As it reported last."""
        known = self._instances.get(instance_id)
        return 0 if known is None else known[1].running_requests

    def lacking(self, now_s: float) -> dict[str, float]:
        """For how long each instance has had a waiting request that lacks KV, by instance id; no others."""
        self.forget(now_s)
        return {instance_id: now_s - since_s for instance_id, since_s in self._lacks_since_s.items()}

    def latest(self, instance_id: str) -> LoadReport | None:
        """What it reported last."""
        known = self._instances.get(instance_id)
        return known[1] if known is not None else None

    def candidates(
        self,
        model: str,
        instance_ids: Collection[str],
        *,
        slo_ttft_s: float,
        now_s: float,
        in_pairs: Collection[str] = (),
        profiles: Mapping[str, Profile] = MappingProxyType({}),
    ) -> tuple[SourceCandidate, ...]:
        """The queue and the slack of each of ``instance_ids``, which are all that serve ``model``.

        What gateways hold is shared evenly. An instance that reports nothing has only that share. ``in_pairs``:
        instances that scale live already. ``profiles``: of those that were measured beforehand, which goes before what
        they report: it knows how long prompts of that length take.
        """
        # A round asks this for each of its loads: only what is of the model is looked at.
        since_s = now_s - self._report_ttl_s
        queues = [held[model] for at_s, held in self._gateways.values() if at_s >= since_s and model in held]
        share_tokens = sum(q.queued_tokens for q in queues) / max(1, len(instance_ids))
        known = {i: self._instances[i] for i in instance_ids if i in self._instances}
        reports = {i: report for i, (at_s, report) in known.items() if at_s >= since_s}
        prompt_tokens = _mean_prompt_tokens(queues, reports.values())
        made = []
        for instance_id in sorted(instance_ids):
            report = reports.get(instance_id)
            profile = profiles.get(instance_id)
            if profile is not None:
                speed = profile.prefill_tokens_per_s(prompt_tokens)
            else:
                speed = self.tokens_per_s(model, instance_id)
            queued_tokens = share_tokens + (report.queued_tokens if report is not None else 0)
            waited_s = report.oldest_queued_s if report is not None else 0.0
            slack_s = slo_ttft_s - waited_s - prompt_tokens / speed
            lacks_kv = report is not None and report.head_blocks > 0
            made.append(SourceCandidate(instance_id, queued_tokens / speed, slack_s, instance_id in in_pairs, lacks_kv))
        return tuple(made)


def _blocks(report: LoadReport, num_blocks: int) -> int:
    """In tokens. Both figures may be as large as what is counted at all, and the product is to stay such a number."""
    return min(max(0, num_blocks) * report.kv_block_tokens, MAX_COUNT)


def _mean_prompt_tokens(queues: Iterable[ModelQueue], reports: Iterable[LoadReport]) -> float:
    """Of what waits at gateways; else of all that arrived there; else of what waits at instances. 0: unknown."""
    queues, reports = list(queues), list(reports)
    sums = (
        (sum(q.queued_tokens for q in queues), sum(q.queued_requests for q in queues)),
        (sum(q.arrived_prompt_tokens_total for q in queues), sum(q.arrived_requests_total for q in queues)),
        (sum(r.queued_tokens for r in reports), sum(r.queued_requests for r in reports)),
    )
    return next((tokens / requests for tokens, requests in sums if requests), 0.0)
