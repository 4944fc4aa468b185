"""What one gateway says of its queues to the monitor, the planner and the other gateways, and how often."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from services.gateway.core.router import Router
from shared.messages.load import ModelQueue, QueueReport

QUEUE_REPORT_EVERY_S = 0.1
LEAST_REPORT_S = 0.01
"""Between two reports, however many models are woken (``Router.wakes``)."""


@dataclass(slots=True)
class Arrived:
    """Of one model, since it was registered or this gateway started."""

    requests: int = 0
    prompt_tokens: int = 0


class Arrivals:
    """Counters of admitted requests, by model."""

    def __init__(self) -> None:
        self._models: dict[str, Arrived] = {}
        self._new: set[str] = set()

    def count(self, model: str, prompt_tokens: int) -> None:
        """One more."""
        arrived = self._models.setdefault(model, Arrived())
        arrived.requests += 1
        arrived.prompt_tokens += prompt_tokens
        self._new.add(model)

    def of(self, model: str) -> Arrived:
        """What has come for a model."""
        return self._models.get(model, Arrived())

    def take_new(self) -> set[str]:
        """The models that something has come for since this was asked last."""
        new, self._new = self._new, set()
        return new

    def forget(self, model: str) -> None:
        """The model is registered no more."""
        self._models.pop(model, None)
        self._new.discard(model)


class QueueReports:
    """Of models with something to say, or that had when the last report was made: the others are as they were then,
    with nothing queued, and cost nothing."""

    def __init__(self, gateway_id: str, router: Router, arrivals: Arrivals) -> None:
        self._gateway_id = gateway_id
        self._router = router
        self._arrivals = arrivals
        self._spoke: set[str] = set()
        """Models of which the last report said something."""

    def report(self, models: Container[str], *, inflight: Mapping[str, int]) -> QueueReport:
        """The next one, of models that are registered. ``inflight``: requests that are at instances, by model."""
        queues = []
        at_instances = [name for name, requests in inflight.items() if requests]
        busy = {*self._router.waiting(), *at_instances, *self._arrivals.take_new()}
        busy = {name for name in busy if name in models}
        ended, self._spoke = self._spoke - busy, busy
        for name in sorted(busy.union(name for name in ended if name in models)):
            queued_requests, queued_tokens = self._router.queued(name)
            arrived = self._arrivals.of(name)
            queues.append(
                ModelQueue(
                    model=name,
                    queued_requests=queued_requests,
                    queued_tokens=queued_tokens,
                    arrived_requests_total=arrived.requests,
                    arrived_prompt_tokens_total=arrived.prompt_tokens,
                    inflight_requests=inflight.get(name, 0),
                    head_tokens=self._router.head_tokens(name),
                )
            )
        return QueueReport(gateway_id=self._gateway_id, models=tuple(queues))
