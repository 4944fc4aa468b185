from __future__ import annotations

import gc
import weakref

import pytest

from services.gateway.core.bookings import InstanceLoad
from services.gateway.core.router import Router
from shared.errors import Overloaded
from shared.messages.common import InstanceState
from shared.messages.registry import Route
from tests.services.gateway.core.routing import Harness, route, stream


def test_requests_spread_by_outstanding_tokens_and_the_rest_waits() -> None:
    h = Harness(route("a"), route("b"))
    h.add(*(stream(str(i)) for i in range(5)))
    assert h.sent() == [("0", "a"), ("1", "b"), ("2", "a"), ("3", "b")]
    assert h.router.queued("m") == (1, 10)
    h.router.finish("1", "m")
    assert h.sent() == [("4", "b")]
    assert h.router.queued("m") == (0, 0)


def test_a_long_request_weighs_more_than_a_short_one() -> None:
    h = Harness(route("a", running=9), route("b", running=9))
    h.add(stream("long", 90), stream("1"), stream("2"), stream("3"))
    assert h.sent() == [("long", "a"), ("1", "b"), ("2", "b"), ("3", "b")]


def test_prompts_not_begun_are_bounded_but_an_idle_instance_takes_any() -> None:
    h = Harness(route("a", running=9, queued_tokens=50))
    h.add(stream("huge", 500), stream("small", 10))
    assert h.sent() == [("huge", "a")]
    assert h.sent() == []
    h.router.bookings.started("huge")
    assert h.sent() == [("small", "a")]


def test_nobody_overtakes() -> None:
    h = Harness(route("a", running=9, queued_tokens=50))
    h.add(stream("1", 40), stream("2", 40), stream("3", 5))
    assert h.sent() == [("1", "a")]


def test_draining_live_and_suspended_instances_take_nothing() -> None:
    h = Harness(route("a", state="draining"), route("b"), route("c", state="live"))
    h.router.suspend("b", until_s=1.0)
    h.add(stream("1"))
    assert h.sent(now_s=0.5) == []
    assert h.sent(now_s=1.0) == [("1", "b")]


def test_a_request_that_does_not_fit_an_instances_context_goes_where_it_does() -> None:
    h = Harness(route("a", context=10), route("b", context=100))
    h.add(stream("1", 10, max_tokens=20))
    assert h.sent() == [("1", "b")]


def test_a_failed_instance_is_avoided_unless_it_is_the_only_one() -> None:
    h = Harness(route("a"), route("b"))
    one = stream("1")
    one.avoid.add("a")
    h.add(one)
    assert h.sent() == [("1", "b")]
    alone = Harness(route("a"))
    two = stream("2")
    two.avoid.add("a")
    alone.add(two)
    assert alone.sent() == [("2", "a")]


def test_resubmitted_requests_return_to_their_place() -> None:
    h = Harness(route("a", running=2))
    streams = [stream(str(i)) for i in range(4)]
    h.add(*streams)
    assert h.sent() == [("0", "a"), ("1", "a")]
    h.router.set_routes("m", "", [])
    h.router.requeue(streams[1], deadline_s=10.0)
    h.router.requeue(streams[0], deadline_s=10.0)
    h.router.set_routes("m", "", [route("b", running=9)])
    assert [request for request, _ in h.sent()] == ["0", "1", "2", "3"]


def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    h = Harness(max_queued=1)
    h.add(stream("1"))
    with pytest.raises(Overloaded) as caught:
        h.add(stream("2"))
    assert caught.value.retry_after_s == 1.0


def test_a_full_queue_still_takes_resubmitted_requests_back() -> None:
    h = Harness(route("a", running=1), max_queued=1)
    first = stream("1")
    h.add(first)
    h.sent()
    h.add(stream("2"))
    h.router.requeue(first, deadline_s=10.0)
    assert h.router.queued("m") == (2, 20)


def test_requests_leave_the_queue_at_their_deadline_or_with_their_model() -> None:
    h = Harness()
    h.add(stream("1"), stream("2"))
    assert [s.request_id for s in h.router.expired(now_s=9.9)] == []
    assert [s.request_id for s in h.router.expired(now_s=10.0)] == ["1", "2"]
    h.add(stream("3"))
    assert [s.request_id for s in h.router.remove_model("m")] == ["3"]
    assert h.router.queued("m") == (0, 0)


def load(router: Router, name: str) -> tuple[int, int, int, int]:
    at = router.bookings.load_of(name)
    return at.inflight_requests, at.unstarted_requests, at.unstarted_tokens, at.outstanding_tokens


def test_a_request_that_another_instance_takes_over_counts_there() -> None:
    h = Harness(route("a", running=1))
    h.add(stream("1", 10, max_tokens=5), stream("2"))
    assert h.sent() == [("1", "a")]
    h.router.bookings.moved("1", "b")
    assert (load(h.router, "a"), load(h.router, "b")) == ((0, 0, 0, 0), (1, 1, 10, 15))
    # The old instance has room again; the new one needs no route to be counted at.
    assert h.sent() == [("2", "a")]
    h.router.prune(now_s=0.0)
    assert load(h.router, "b") == (1, 1, 10, 15)
    h.router.bookings.started("1")
    assert load(h.router, "b") == (1, 0, 0, 15)
    h.router.bookings.moved("1", "a")
    assert (load(h.router, "a"), load(h.router, "b")) == ((2, 1, 10, 26), (0, 0, 0, 0))
    h.router.bookings.moved("unknown", "b")
    for name in ("1", "2"):
        h.router.finish(name, "m")
    assert (load(h.router, "a"), load(h.router, "b")) == ((0, 0, 0, 0), (0, 0, 0, 0))


def test_a_request_that_moved_goes_back_into_the_queue_from_where_it_is() -> None:
    h = Harness(route("a", running=1))
    one = stream("1")
    h.add(one)
    h.sent()
    h.router.bookings.moved("1", "b")
    h.router.requeue(one, deadline_s=10.0)
    assert load(h.router, "b") == (0, 0, 0, 0)
    assert h.sent() == [("1", "a")]


def prefill(name: str, *, running: int = 9, state: InstanceState = "serving") -> Route:
    return route(name, running=running, queued_tokens=1000, state=state, role="prefill")


def decode(name: str, *, running: int = 9, state: InstanceState = "serving", context: int = 0) -> Route:
    return route(name, running=running, state=state, context=context, role="decode")


def promised(router: Router, name: str) -> tuple[int, int]:
    at = router.bookings.load_of(name)
    return at.promised_requests, at.promised_tokens


def test_a_decode_instance_gets_no_request_itself() -> None:
    h = Harness(decode("d"))
    h.add(stream("1", max_tokens=5))
    assert h.sent() == []
    assert h.router.queued("m") == (1, 10)
    h.router.set_routes("m", "", [decode("d"), route("a")])
    assert h.placed() == [("a", None)]


def test_a_prefill_instances_request_names_the_decode_instance_with_the_fewest_tokens_promised_or_there() -> None:
    h = Harness(prefill("p"), decode("d1"), decode("d2"))
    h.add(stream("long", 90, max_tokens=10), stream("1", max_tokens=5), stream("2", max_tokens=5))
    assert h.placed() == [("p", "d1"), ("p", "d2"), ("p", "d2")]
    assert (promised(h.router, "d1"), promised(h.router, "d2")) == ((1, 100), (2, 30))
    # Having arrived, they count as before; among equals the lowest id is chosen.
    h.router.bookings.moved("long", "d1")
    h.add(stream("3", 60, max_tokens=10))
    assert h.placed() == [("p", "d2")]
    h.add(stream("4", max_tokens=5))
    assert h.placed() == [("p", "d1")]
    h.router.bookings.moved("3", "d2")
    for name in ("long", "4"):
        h.router.finish(name, "m")
    assert h.router.bookings.load_of("d1").decode_tokens == 0
    h.add(stream("5", max_tokens=5))
    assert h.placed() == [("p", "d1")]


def test_an_instance_that_changes_its_role_keeps_what_is_booked_there() -> None:
    h = Harness(prefill("p", running=2), decode("d1"), decode("d2"))
    h.add(stream("1", 50, max_tokens=10), stream("2", 20, max_tokens=10))
    assert h.placed() == [("p", "d1"), ("p", "d2")]
    h.router.bookings.moved("1", "d1")
    # The prefill instance decodes now, and a decode instance takes prompts beside what it decodes.
    h.router.set_routes("m", "", [decode("p"), prefill("d1"), decode("d2")])
    h.add(stream("3", 10, max_tokens=10))
    assert h.placed() == [("d1", "d2")], "30 tokens are at p, and as many were promised to d2, which is first by its id"
    assert h.router.bookings.load_of("d1").inflight_requests == 2
    h.router.bookings.moved("2", "d2")
    h.add(stream("4", 10, max_tokens=10))
    h.router.finish("1", "m")
    assert h.placed() == [("d1", "p")], "d2 has the more"
    h.router.bookings.moved("3", "d2")
    h.router.bookings.moved("4", "p")
    for name in ("2", "3", "4"):
        h.router.finish(name, "m")
    assert all(h.router.bookings.load_of(name).outstanding_tokens == 0 for name in ("p", "d1", "d2"))


def test_what_waits_goes_to_an_instance_that_begins_to_take_prompts() -> None:
    h = Harness(decode("d1"), decode("d2"))
    h.add(stream("1", max_tokens=5))
    assert h.placed() == []
    h.router.set_routes("m", "", [decode("d1"), prefill("d2")])
    assert h.placed() == [("d2", "d1")]


def test_prefill_and_colocated_instances_are_chosen_from_alike() -> None:
    h = Harness(route("a"), decode("d"), prefill("p"))
    h.add(stream("1", 90, max_tokens=5), stream("2", max_tokens=5), stream("3", max_tokens=5))
    assert h.placed() == [("a", None), ("p", "d"), ("p", "d")]


def test_without_a_decode_instance_that_can_take_it_the_prefill_instance_decodes_by_itself() -> None:
    unfit = [decode("d1", state="draining"), decode("d2", state="live"), decode("d3", context=14), decode("d4")]
    h = Harness(prefill("p"), *unfit)
    h.router.suspend("d4", until_s=1.0)
    h.add(stream("1", max_tokens=5))
    assert h.placed(now_s=0.5) == [("p", None)]
    h.add(stream("2", max_tokens=5))
    assert h.placed(now_s=1.0) == [("p", "d4")]
    h.add(stream("3", max_tokens=4))
    assert h.placed(now_s=1.0) == [("p", "d3")]


def test_a_request_of_one_token_needs_no_decode_instance() -> None:
    h = Harness(prefill("p"), decode("d"))
    one, last = stream("1", max_tokens=1), stream("2", max_tokens=3)
    last.output_token_ids = [7, 7]
    h.add(one, last)
    assert h.placed() == [("p", None)] * 2


def test_a_full_decode_instance_makes_no_request_wait_here() -> None:
    h = Harness(prefill("p"), decode("d", running=1))
    for i in range(4):
        h.add(stream(str(i), 500, max_tokens=500))
        assert h.placed() == [("p", "d")]
        h.router.bookings.started(str(i))
        h.router.bookings.moved(str(i), "d")
    assert load(h.router, "d") == (4, 0, 0, 4 * 756)


def test_a_full_prefill_instance_does() -> None:
    h = Harness(prefill("p", running=1), decode("d"))
    h.add(stream("1", max_tokens=5), stream("2", max_tokens=5))
    assert h.placed() == [("p", "d")]
    h.router.bookings.started("1")
    assert h.placed() == []
    h.router.bookings.moved("1", "d")
    assert h.placed() == [("p", "d")]


def test_a_decode_instance_that_failed_the_request_is_avoided_unless_it_is_the_only_one() -> None:
    h = Harness(prefill("p"), decode("d1"), decode("d2"))
    h.add(stream("busy", 900, max_tokens=5), *(stream(str(i), max_tokens=5) for i in range(2)))
    assert h.placed() == [("p", "d1"), ("p", "d2"), ("p", "d2")]
    one = stream("one", max_tokens=5)
    one.avoid.add("d2")
    h.add(one)
    assert h.placed() == [("p", "d1")]
    h.router.set_routes("m", "", [prefill("p"), decode("d2")])
    two = stream("two", max_tokens=5)
    two.avoid.add("d2")
    h.add(two)
    assert h.placed() == [("p", "d2")]


def test_a_promise_ends_with_the_booking_however_it_ends() -> None:
    h = Harness(prefill("p"), decode("d"))
    streams = [stream(str(i), max_tokens=5) for i in range(5)]
    h.add(*streams)
    assert h.placed() == [("p", "d")] * 5
    h.router.bookings.started("0")
    assert promised(h.router, "d") == (5, 75)
    h.router.finish("0", "m")
    h.router.requeue(streams[1], deadline_s=10.0)
    h.router.bookings.moved("2", "d")
    h.router.bookings.moved("3", "elsewhere")
    h.router.bookings.release("4")
    assert promised(h.router, "d") == (0, 0)
    assert load(h.router, "d") == (1, 1, 10, 15)
    for name in ("1", "2", "3"):
        h.router.finish(name, "m")
    for instance in ("p", "d", "elsewhere"):
        assert h.router.bookings.load_of(instance) == InstanceLoad(), instance


def test_what_was_promised_to_an_instance_that_is_gone_is_not_forgotten_before_its_end() -> None:
    h = Harness(prefill("p"), decode("d"))
    h.add(stream("1", max_tokens=5))
    h.placed()
    h.router.set_routes("m", "", [prefill("p")])
    h.router.prune(now_s=0.0)
    assert promised(h.router, "d") == (1, 15)
    h.router.finish("1", "m")
    assert h.router.bookings.load_of("d") == InstanceLoad()


def test_finishing_everything_leaves_no_load() -> None:
    h = Harness(route("a"), route("b"))
    h.add(*(stream(str(i)) for i in range(6)))
    h.sent()
    h.router.bookings.started("0")
    for i in range(6):
        h.router.finish(str(i), "m")
    for name in ("a", "b"):
        load = h.router.bookings.load_of(name)
        assert (load.inflight_requests, load.unstarted_requests, load.unstarted_tokens, load.outstanding_tokens) == (
            0,
            0,
            0,
            0,
        )
    assert h.router.queued("m") == (0, 0)


def test_an_instance_that_comes_or_goes_makes_no_other_one_be_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = [route(f"i{n:03}") for n in range(100)]
    harness = Harness(*routes)
    harness.add(stream("first"))
    assert harness.placed() == [("i000", None)]
    looked_at: set[str] = set()
    load_of = harness.router.bookings.load_of

    def looks(instance_id: str) -> InstanceLoad:
        looked_at.add(instance_id)
        return load_of(instance_id)

    monkeypatch.setattr(harness.router.bookings, "load_of", looks)
    harness.router.set_routes("m", "", [*routes[:1], *routes[2:], route("new")])
    harness.add(stream("second"))
    assert harness.placed() == [("i002", None)]
    assert looked_at == {"i000", "i002", "new"}


def test_nothing_is_kept_of_an_instance_that_came_and_went_while_no_request_did() -> None:
    class Name(str):
        __slots__ = ("__weakref__",)

    harness = Harness(route("a"))
    name = Name("b")
    known = weakref.ref(name)
    harness.router.set_routes("m", "", [route("a"), route(name)])
    del name
    harness.router.set_routes("m", "", [route("a")])
    gc.collect()
    assert known() is None
