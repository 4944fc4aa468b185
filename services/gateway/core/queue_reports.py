"""What one gateway says of its queues to the monitor, the planner and the other gateways, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from services.gateway.core.router import Router
from shared.messages.load import ModelQueue, QueueReport

QUEUE_REPORT_EVERY_S = 0.1
LEAST_REPORT_S = 0.01
"""Between two reports, however many models are woken (``Router.wakes``)."""


@dataclass(slots=True)
class Arrivals:
    """Counters of one model's admitted requests."""

    requests: int = 0
    prompt_tokens: int = 0


class QueueReports:
    """Of models with something to say, or that had when the last report was made: the others are as they were then,
    with nothing queued."""

    def __init__(self, gateway_id: str, router: Router) -> None:
        self._gateway_id = gateway_id
        self._router = router
        self._spoke: dict[str, tuple[int, bool]] = {}
        """By model: requests that had arrived by its last report, and whether that report had content."""

    def report(
        self,
        models: Iterable[str],
        *,
        inflight: Mapping[str, int],
        arrived: Callable[[str], Arrivals],
        published_at_s: float,
    ) -> QueueReport:
        """The next one. ``inflight``: requests that are at instances, by model. ``arrived``: of a model, since this
        gateway started."""
        queues = []
        spoke, self._spoke = self._spoke, {}
        for name in sorted(models):
            queued_requests, queued_tokens = self._router.queued(name)
            arrivals = arrived(name)
            busy = bool(queued_requests or inflight.get(name, 0)) or spoke.get(name, (0, False))[0] != arrivals.requests
            if not busy and not spoke.get(name, (0, False))[1]:
                if arrivals.requests:
                    self._spoke[name] = (arrivals.requests, False)
                continue
            self._spoke[name] = (arrivals.requests, busy)
            queues.append(
                ModelQueue(
                    model=name,
                    queued_requests=queued_requests,
                    queued_tokens=queued_tokens,
                    arrived_requests_total=arrivals.requests,
                    arrived_prompt_tokens_total=arrivals.prompt_tokens,
                    inflight_requests=inflight.get(name, 0),
                    head_tokens=self._router.head_tokens(name),
                )
            )
        return QueueReport(gateway_id=self._gateway_id, published_at_s=published_at_s, models=tuple(queues))
