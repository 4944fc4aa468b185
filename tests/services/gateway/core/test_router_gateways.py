"""Several gateways place on the same instances; and instances that say that they are full."""

from __future__ import annotations

import pytest

from services.gateway.core.router import FULL_PAUSE_S, MAX_FULL_PAUSE_S
from shared.errors import Overloaded
from tests.services.gateway.core.routing import Harness, load_report, queue_report, route, stream


def contended(*routes: object, queued: int = 0, head_tokens: int = 0) -> Harness:
    """With one other gateway that has requests for the model."""
    h = Harness(*routes)  # type: ignore[arg-type]
    h.router.others_reported(queue_report("other", queued=queued, inflight=1, head_tokens=head_tokens), now_s=0.0)
    return h


def test_seats_that_other_gateways_have_taken_are_not_taken_again() -> None:
    h = contended(route("a", running=4), route("b", running=4))
    h.router.reported(load_report("a", running=4), now_s=0.0)
    h.router.reported(load_report("b", running=3), now_s=0.0)
    h.add(*(stream(str(i)) for i in range(9)))
    # Two each are its share whatever the other has; the others are what "b" has free.
    sent = h.sent()
    assert sorted(instance for _, instance in sent) == ["a", "a", "b", "b"]


def test_the_instance_with_the_least_of_everybodys_load_is_chosen() -> None:
    h = contended(route("a", running=9), route("b", running=9))
    h.router.reported(load_report("a", running=3), now_s=0.0)
    h.add(stream("1"), stream("2"))
    assert h.sent() == [("1", "b"), ("2", "b")]


def test_ones_own_requests_in_a_report_are_not_counted_twice() -> None:
    h = contended(route("a", running=8, queued_tokens=1000))
    h.add(*(stream(str(i)) for i in range(6)))
    assert len(h.sent()) == 6
    for i in range(6):
        h.router.bookings.accepted(str(i))
    h.router.reported(load_report("a", running=2, queued=4, queued_tokens=40), now_s=0.0)
    assert h.router.bookings.load_of("a").foreign.requests == 0
    h.add(stream("6"), stream("7"), stream("8"))
    assert h.sent() == [("6", "a"), ("7", "a")]


def test_alone_a_gateway_takes_everything_whatever_is_reported() -> None:
    h = Harness(route("a", running=4, queued_tokens=1000))
    h.router.others_reported(queue_report("idle"), now_s=0.0)
    h.router.reported(load_report("a", running=4, queued=9, queued_tokens=900), now_s=0.0)
    h.add(*(stream(str(i)) for i in range(5)))
    assert len(h.sent()) == 4


def test_waiting_prompts_of_others_leave_less_room_for_ones_own() -> None:
    h = contended(route("a", running=9, queued_tokens=100))
    h.router.reported(load_report("a", running=1, queued=2, queued_tokens=70), now_s=0.0)
    h.add(stream("1", 20), stream("2", 20))
    assert h.sent() == [("1", "a")]


def test_while_another_gateway_waits_a_gateway_keeps_to_its_share_of_what_waits() -> None:
    h = contended(route("a", running=9, queued_tokens=100), queued=1)
    h.add(stream("1", 30), stream("2", 20), stream("3", 20))
    assert h.sent() == [("1", "a"), ("2", "a")]
    h.router.others_reported(queue_report("other", inflight=1), now_s=0.0)
    assert h.sent() == [("3", "a")]


def test_room_is_left_for_the_large_prompt_that_is_next_elsewhere() -> None:
    h = contended(route("a", running=9, queued_tokens=100), queued=1, head_tokens=90)
    h.add(stream("1", 10), stream("2", 10))
    assert h.sent() == [("1", "a")]


def test_what_silent_instances_and_gateways_said_is_forgotten() -> None:
    h = contended(route("a", running=2))
    h.router.reported(load_report("a", running=2), now_s=0.0)
    h.add(*(stream(str(i)) for i in range(3)))
    assert len(h.sent()) == 1
    h.router.prune(now_s=1.0)
    assert h.sent() == []
    h.router.prune(now_s=4.0)
    assert len(h.sent()) == 1
    assert h.router.bookings.load_of("a").foreign.requests == 0


def test_an_instance_that_is_full_is_left_alone_twice_as_long_each_time() -> None:
    h = Harness(route("a"))
    h.add(stream("1"))
    now_s, pauses = 0.0, []
    for _ in range(8):
        [(name, _)] = h.sent(now_s)
        h.router.refused("a", now_s=now_s)
        h.router.requeue(stream(name), deadline_s=99.0)
        pauses.append(h.router.bookings.load_of("a").suspended_until_s - now_s)
        assert h.sent(now_s + pauses[-1] - 0.001) == []
        now_s += pauses[-1]
    assert pauses[:3] == pytest.approx([FULL_PAUSE_S, 2 * FULL_PAUSE_S, 4 * FULL_PAUSE_S])
    assert pauses[-1] == pytest.approx(MAX_FULL_PAUSE_S)
    assert len(h.sent(now_s)) == 1
    h.router.bookings.accepted("1")
    h.router.refused("a", now_s=now_s)
    assert h.router.bookings.load_of("a").suspended_until_s == pytest.approx(now_s + FULL_PAUSE_S)


def test_an_instance_without_a_queue_is_asked_again_at_once() -> None:
    h = Harness(route("a"))
    for _ in range(5):
        h.router.refused("a", now_s=0.0)
    h.add(stream("1"))
    h.router.reported(load_report("a", queued=1), now_s=0.1)
    assert h.sent(0.1) == []
    h.router.reported(load_report("a"), now_s=0.2)
    assert h.sent(0.2) == [("1", "a")]


def test_one_key_takes_no_more_places_than_it_leaves_free() -> None:
    h = Harness(max_queued=10)
    for i in range(6):
        h.router.enqueue(stream(f"x{i}", key="x"), deadline_s=1.0, retry_after_s=1.0)
    with pytest.raises(Overloaded, match="6 requests of key 'x'"):
        h.router.enqueue(stream("x9", key="x"), deadline_s=1.0, retry_after_s=1.0)
    h.router.enqueue(stream("y0", key="y"), deadline_s=1.0, retry_after_s=1.0)


def test_without_keys_every_place_is_taken() -> None:
    h = Harness(max_queued=10)
    h.add(*(stream(str(i)) for i in range(10)))
    with pytest.raises(Overloaded, match="10 requests already wait"):
        h.add(stream("10"))


def where(h: Harness, now_s: float = 0.0) -> list[tuple[str, bool]]:
    """(instance, whether the request may wait there) of what is dispatched now."""
    return [(a.route.instance_id, a.may_wait) for a in h.router.dispatch("m", now_s=now_s).assignments]


def test_an_instance_with_a_free_seat_goes_before_a_full_one_with_less_to_do() -> None:
    h = contended(route("a", running=4), route("b", running=4, queued_tokens=10_000))
    h.router.reported(load_report("a", running=4), now_s=0.0)
    h.add(stream("long", 5_000))
    assert where(h) == [("b", False)]
    h.router.bookings.started("long")
    h.add(*(stream(str(i)) for i in range(6)))
    # Three more slots at "b"; then its share of those at "a", which come free in turn; the others wait here.
    assert where(h) == [("b", False)] * 3 + [("a", True)] * 2


def test_a_seat_that_another_gateway_was_quicker_to_take_costs_no_wait_where_another_instance_has_one() -> None:
    h = Harness(route("a", running=2), route("b", running=2))
    h.add(stream("1"))
    assert where(h) == [("a", False)]
    h.router.slots_taken("a", now_s=0.0)
    h.router.requeue(stream("1"), deadline_s=99.0)
    assert where(h) == [("b", False)]
    assert h.router.bookings.load_of("a").suspended_until_s < 0.0, "it is well"
    h.router.reported(load_report("a", running=1), now_s=0.1)
    h.add(stream("2"))
    assert where(h, 0.1) == [("a", False)]


def test_where_no_instance_has_a_seat_requests_line_up_at_one_within_the_gateways_share() -> None:
    h = contended(route("a", running=4))
    h.add(*(stream(str(i)) for i in range(4)))
    assert where(h) == [("a", False)] * 4
    h.router.slots_taken("a", now_s=0.0)
    for i in range(4):
        h.router.requeue(stream(str(i)), deadline_s=99.0)
    assert where(h) == [("a", True)] * 2
    assert where(h) == []
    h.router.reported(load_report("a", running=1, queued=2), now_s=0.1)
    h.router.bookings.accepted("0")
    h.router.bookings.accepted("1")
    h.router.reported(load_report("a", running=3), now_s=0.2)
    assert where(h, 0.2) == [("a", False)]


def test_an_instance_that_has_no_seat_and_never_reports_is_not_full_for_ever() -> None:
    h = contended(route("a", running=2))
    h.router.slots_taken("a", now_s=0.0)
    h.add(*(stream(str(i)) for i in range(2)))
    assert where(h) == [("a", True)]
    h.router.others_reported(queue_report("other", inflight=1), now_s=9.0)
    h.router.prune(now_s=10.0)
    assert where(h, 10.0) == [("a", False)]
