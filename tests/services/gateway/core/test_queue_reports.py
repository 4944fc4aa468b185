from __future__ import annotations

from services.gateway.core.queue_reports import Arrivals, QueueReports
from services.gateway.core.router import Router
from shared.messages.load import ModelQueue
from tests.services.gateway.core.routing import route, stream


class Rig:
    def __init__(self) -> None:
        self.router = Router(max_queued_requests=10)
        self.router.set_routes("m", "", ())
        self.router.set_routes("other", "", ())
        self.arrivals = Arrivals()
        self._reports = QueueReports("gw", self.router, self.arrivals)

    def arrive(self, name: str) -> None:
        self.router.enqueue(stream(name), deadline_s=10.0, retry_after_s=1.0)
        self.arrivals.count("m", 10)

    def report(self, inflight: int = 0) -> tuple[ModelQueue, ...]:
        said = self._reports.report({"m", "other"}, inflight={"m": inflight})
        assert said.gateway_id == "gw"
        return said.models


def test_a_model_is_in_the_report_while_it_has_something_to_say_and_once_more() -> None:
    rig = Rig()
    assert rig.report() == ()
    rig.arrive("r0")
    rig.arrive("r1")
    queue = ModelQueue(
        model="m",
        queued_requests=2,
        queued_tokens=20,
        arrived_requests_total=2,
        arrived_prompt_tokens_total=20,
        inflight_requests=0,
        head_tokens=10,
    )
    assert rig.report() == (queue,)
    assert rig.report() == (queue,)
    rig.router.clear("m")
    assert [(q.queued_requests, q.inflight_requests) for q in rig.report(inflight=1)] == [(0, 1)]
    assert [(q.queued_requests, q.inflight_requests) for q in rig.report()] == [(0, 0)], "nothing waits any more"
    assert rig.report() == ()


def test_requests_that_came_and_went_between_two_reports_are_said() -> None:
    rig = Rig()
    rig.arrive("r0")
    rig.router.clear("m")
    assert [q.arrived_requests_total for q in rig.report()] == [1]
    assert [q.arrived_requests_total for q in rig.report()] == [1]
    assert rig.report() == ()
    rig.arrive("r1")
    rig.router.clear("m")
    assert [q.arrived_requests_total for q in rig.report()] == [2]


def test_only_the_first_waiting_request_wakes_a_model_and_only_one_that_sleeps() -> None:
    rig = Rig()
    assert not rig.router.wakes("m")
    rig.arrive("r0")
    assert rig.router.wakes("m")
    rig.arrive("r1")
    assert not rig.router.wakes("m")
    rig.router.clear("m")
    rig.router.set_routes("m", "", [route("a")])
    rig.arrive("r2")
    assert not rig.router.wakes("m")
