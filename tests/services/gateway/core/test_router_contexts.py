"""Requests that are too long for the instances that there are."""

from __future__ import annotations

from services.gateway.core.routes import RouteView
from services.gateway.core.waiting import waiting_by_reason
from tests.processes import process
from tests.services.gateway.core.routing import Harness, route, stream


def test_an_open_length_is_cut_to_what_the_instances_hold_once_they_are_known() -> None:
    h = Harness()
    open_ended = stream("1", 10, max_tokens=4000, default=True)
    h.add(open_ended)
    assert h.sent() == []
    h.router.set_routes("m", "", [route("a", context=100), route("b", context=50)])
    assert h.sent() == [("1", "a")]
    assert open_ended.sampling.max_tokens == 90


def test_an_open_length_is_not_cut_where_an_instance_holds_all_of_it() -> None:
    h = Harness(route("a", context=50), route("b", context=100, running=1))
    full, other = stream("1", 10, 90, default=True), stream("2", 10, 90, default=True)
    h.add(full, other)
    assert h.sent() == [("1", "b")]
    assert (full.sampling.max_tokens, other.sampling.max_tokens) == (90, 90)


def test_a_head_that_no_instance_can_hold_is_refused_at_once_and_blocks_nobody() -> None:
    h = Harness()
    h.add(stream("long", 10, max_tokens=4000), stream("prompt", 100, max_tokens=1, default=True), stream("3"))
    h.router.set_routes("m", "", [route("a", context=100)])
    dispatched = h.router.dispatch("m", now_s=0.0)
    assert [a.request_id for a in dispatched.assignments] == ["3"]
    assert [name for name, _ in dispatched.refused] == ["long", "prompt"]
    assert "hold 100 tokens; 10 of the prompt and 4000 of output" in dispatched.refused[0][1].message
    assert [error.param for _, error in dispatched.refused] == ["max_tokens", None]
    assert h.router.queued("m") == (0, 0)
    assert h.router.expired(now_s=99.0) == []


def test_a_length_is_not_cut_below_what_the_caller_wants_at_least() -> None:
    h = Harness(route("a", context=20))
    h.add(stream("1", 10, 4000, default=True, min_tokens=11))
    assert [name for name, _ in h.router.dispatch("m", now_s=0.0).refused] == ["1"]


def test_a_request_that_was_running_waits_aside_until_an_instance_can_hold_it() -> None:
    h = Harness(route("big", context=1000))
    begun = stream("1", 10, max_tokens=500)
    h.add(begun)
    assert h.sent() == [("1", "big")]
    begun.submitted_to("big", process("w-big"))
    begun.requeued(fault=True)
    h.router.set_routes("m", "", [route("small", context=100)])
    h.router.requeue(begun, deadline_s=10.0)
    h.add(stream("2"))
    assert h.sent() == [("2", "small")]
    assert h.router.queued("m") == (1, 10)
    assert waiting_by_reason("m", h.router, RouteView(), 4) == {
        "starting": 0, "no_instance": 0, "full": 0, "too_long": 1, "at_instance": 4,
    }  # fmt: skip
    error = h.router.too_long(begun)
    assert error is not None
    assert "hold 100 tokens" in error.message
    h.router.set_routes("m", "", [route("small", context=100), route("big2", context=1000)])
    h.add(stream("3"))
    assert h.sent() == [("1", "big2"), ("3", "small")]


def test_a_request_that_only_an_instance_holds_that_drains_is_passed_by_and_ends_at_its_deadline() -> None:
    h = Harness(route("small", context=100), route("big", context=1000, state="draining"))
    h.add(stream("1", 10, max_tokens=500), stream("2"))
    dispatched = h.router.dispatch("m", now_s=0.0)
    assert [a.request_id for a in dispatched.assignments] == ["2"]
    assert dispatched.refused == ()
    h.router.set_routes("m", "", [route("small", context=100), route("big", context=1000)])
    assert h.sent() == [("1", "big")]
    h.add(stream("3", 10, max_tokens=500))
    h.router.set_routes("m", "", [route("small", context=100), route("big", context=1000, state="draining")])
    assert h.sent() == []
    assert [s.request_id for s in h.router.expired(now_s=10.0)] == ["3"]


def test_while_no_instance_takes_requests_nothing_is_refused() -> None:
    h = Harness(route("a", context=100, state="draining"))
    h.add(stream("1", 10, max_tokens=4000))
    assert h.router.dispatch("m", now_s=0.0).refused == ()
    assert h.router.queued("m") == (1, 10)
