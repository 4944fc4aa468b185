"""What is done regularly costs as much at a thousand models as at a few: it is counted, not timed."""

from __future__ import annotations

import pytest

from services.gateway.core.queue_reports import Arrivals, QueueReports
from services.gateway.core.router import Router
from shared.messages.load import ModelQueue, QueueReport
from tests.operations import operations
from tests.services.gateway.core.routing import route, stream

GATEWAYS = 16
WANTED = 4
"""Models that each of the others has requests for."""


def wanted(gateway: int, queued: int = 1) -> QueueReport:
    queues = tuple(
        ModelQueue(
            model=f"m{index}",
            queued_requests=queued,
            queued_tokens=10 * queued,
            arrived_requests_total=0,
            arrived_prompt_tokens_total=0,
            inflight_requests=1,
            head_tokens=10,
        )
        for index in range(WANTED)
    )
    return QueueReport(gateway_id=f"g{gateway:02}", models=queues)


class Rig:
    """A gateway beside 15 others, with one instance of each model. Requests wait for one model."""

    def __init__(self, num_models: int) -> None:
        self.router = Router(max_queued_requests=10, gateway_id="g00")
        self.models = [f"m{index}" for index in range(num_models)]
        for name in self.models:
            self.router.set_routes(name, "", [route(f"{name}-i", running=1)])
        for gateway in range(1, GATEWAYS):
            self.router.others_reported(wanted(gateway), now_s=0.0)
        self.arrivals = Arrivals()
        self.reports = QueueReports("g00", self.router, self.arrivals)
        for request in "ab":
            one = stream(request)
            one.model = "m1"
            self.router.enqueue(one, deadline_s=9.0, retry_after_s=1.0)
            self.arrivals.count("m1", 10)
        self.report()

    def report(self) -> QueueReport:
        return self.reports.report(set(self.models), inflight={"m2": 1})

    def tick(self) -> None:
        """As the dispatcher's."""
        assert self.router.expired(now_s=0.0) == []
        assert self.router.waiting() == ["m1"]

    def hear(self) -> None:
        self.router.others_reported(wanted(3, queued=2), now_s=0.1)
        assert self.router.queued_anywhere("m1") == 2 + GATEWAYS


@pytest.mark.parametrize("what", ["hear", "report", "tick"])
def test_a_thousand_models_that_nobody_asks_for_cost_nothing(what: str) -> None:
    few, many = Rig(10), Rig(1000)
    assert operations(getattr(many, what)) == operations(getattr(few, what))


def test_gateways_that_fell_silent_cost_what_they_wanted() -> None:
    few, many = Rig(10), Rig(1000)
    assert operations(lambda: many.router.prune(now_s=9.0)) == operations(lambda: few.router.prune(now_s=9.0))
