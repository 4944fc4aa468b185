"""The gateway in virtual time, against fake workers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sim.gateway import GatewaySettings
from bench.sim.latencies import LOCAL_NATS
from services.gateway.core.bookings import InstanceLoad
from shared.errors import RequestFailed
from shared.messages.load import ModelQueue
from tests.bench.sim.fake_workers import STEP_S, Rig
from tests.processes import process

TO_WORKER_S, BACK_S = LOCAL_NATS.submit_s, LOCAL_NATS.tokens_s


def test_a_request_gets_its_tokens_a_message_after_its_instance_made_them() -> None:
    rig = Rig()
    rig.start("a")
    rig.run(1.0)
    rig.ask(output=3)
    rig.run(1.0)
    (served,) = rig.served
    begun_s = 1.0 + TO_WORKER_S
    assert list(served.times_s) == pytest.approx([begun_s + STEP_S * i + BACK_S for i in (1, 2, 3)])
    assert served.ttft_s == pytest.approx(STEP_S + TO_WORKER_S + BACK_S)
    assert served.mean_gap_s == pytest.approx(STEP_S)
    assert served.ended_s == pytest.approx(served.times_s[-1])
    assert (served.failure, served.attempts) == (None, 1)
    assert (rig.gateway.num_finished, rig.gateway.num_failed, rig.gateway.num_active) == (1, 0, 0)


@pytest.mark.parametrize("run", [2, 5, 100])
def test_steps_that_are_told_together_are_as_those_told_one_by_one(run: int) -> None:
    def times(run: int) -> list[list[float]]:
        rig = Rig()
        rig.start("a", run=run)
        for output in (7, 1, 12, 3):
            rig.ask(output=output)
        rig.run(10.0)
        return [list(served.times_s) for served in sorted(rig.served, key=lambda served: served.request.index)]

    assert times(run) == [pytest.approx(each) for each in times(1)]


def test_what_waits_goes_in_order_of_arrival_and_to_a_new_instance_at_once() -> None:
    rig = Rig()
    ids = [rig.ask(output=2) for _ in range(5)]
    rig.run(1.0)
    assert rig.submits == []
    rig.start("a")
    rig.run(2 * (LOCAL_NATS.routes_s + TO_WORKER_S))
    assert [request_id for request_id, _ in rig.submits] == ids[:2], "it has two slots"
    rig.run(5.0)
    assert [request_id for request_id, _ in rig.submits] == ids
    assert set(rig.outcomes().values()) == {"finished"}


def test_a_request_goes_where_least_is_outstanding() -> None:
    rig = Rig()
    rig.start("a")
    rig.start("b")
    rig.run(0.1)
    rig.ask(output=100)
    rig.ask(output=2)
    rig.ask(output=2)
    rig.run(0.1)
    assert [instance for _, instance in rig.submits] == ["a", "b", "b"]


def test_a_full_instance_is_left_alone_for_longer_each_time() -> None:
    rig = Rig()
    worker = rig.start("a")
    worker.stands = True
    worker.waiting.extend([None, None])  # type: ignore[list-item]
    rig.run(0.1)
    rig.ask()
    tries: list[float] = []
    while rig.clock.now_s < 3.0:
        known = len(rig.submits)
        rig.run(0.01)
        if len(rig.submits) > known:
            tries.append(rig.clock.now_s)
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    # Of 50 ms, twice as long each time, up to a second; found out at a tick.
    assert gaps == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0], abs=0.06)


def test_a_full_instance_gets_requests_again_once_it_says_that_it_has_no_queue() -> None:
    rig = Rig()
    worker = rig.start("a")
    worker.stands = True
    worker.waiting.extend([None, None])  # type: ignore[list-item]
    rig.ask(at_s=0.1)
    rig.run(1.2)
    known = len(rig.submits)
    worker.stands = False
    worker.waiting.clear()
    worker.report()
    rig.run(2 * (LOCAL_NATS.load_s + TO_WORKER_S))
    assert len(rig.submits) == known + 1
    # It took that one: the next refusal is a first one again.
    assert rig.gateway.router.bookings.load_of("a").refusals == 0


def test_an_instance_gets_the_next_prompt_when_it_has_begun_the_one_before() -> None:
    rig = Rig()
    rig.start("a")
    rig.run(0.1)
    first, second = rig.ask(output=5, prompt=90), rig.ask(output=5, prompt=90)
    rig.run(0.9 * STEP_S)
    assert [request_id for request_id, _ in rig.submits] == [first], "prompts of 100 tokens may wait there"
    rig.run(0.2 * STEP_S)
    assert [request_id for request_id, _ in rig.submits] == [first, second]


@pytest.mark.parametrize("after_s", [0.0001, 0.0004, 0.0006, 0.0009])
def test_a_worker_may_be_lost_while_a_request_or_its_refusal_is_on_the_way(after_s: float) -> None:
    rig = Rig()
    worker = rig.start("a")
    worker.stands = True
    worker.waiting.extend([None, None])  # type: ignore[list-item]
    rig.run(0.1)
    rig.ask(output=2)
    rig.run(after_s)
    rig.start("b")
    rig.kill(worker)
    rig.run(1.0)
    assert rig.outcomes() == {0: "finished"}
    assert rig.submits.count(("r0", "b")) == 1
    assert (("r0", "a") in rig.submits) is (after_s + BACK_S > TO_WORKER_S), "what is lost on its way reaches nobody"


def test_instances_that_are_gone_are_forgotten() -> None:
    rig = Rig()
    worker = rig.start("a")
    rig.run(0.1)
    rig.ask(output=2)
    rig.run(STEP_S)
    rig.kill(worker)
    rig.run(0.001)
    bookings = rig.gateway.router.bookings
    assert bookings.load_of("a").suspended_until_s > rig.clock.now_s
    rig.run(0.5)
    assert bookings.load_of("a") == InstanceLoad()


def test_a_request_whose_worker_is_lost_after_its_last_token_is_finished() -> None:
    rig = Rig()
    worker = rig.start("a")
    rig.run(0.1)
    rig.ask(output=2)
    rig.run(TO_WORKER_S + 2 * STEP_S + BACK_S / 2)
    assert rig.outcomes() == {}
    rig.kill(worker)
    rig.run(1.0)
    assert rig.outcomes() == {0: "finished"}
    assert rig.served[0].attempts == 1


def test_a_request_that_nobody_takes_in_time_fails() -> None:
    rig = Rig(GatewaySettings(queue_timeout_s=3.0))
    rig.ask(at_s=0.5)
    rig.run(3.4)
    assert rig.served == []
    rig.run(0.2)
    assert rig.outcomes() == {0: "timeout"}
    assert rig.served[0].ended_s == pytest.approx(3.5, abs=0.051)


def test_a_request_that_waits_at_its_instance_for_too_long_is_tried_elsewhere() -> None:
    rig = Rig(GatewaySettings(queue_timeout_s=3.0))
    worker = rig.start("a")
    worker.stands = True
    rig.run(0.1)
    # It takes them once they may wait there.
    for _ in range(4):
        rig.ask()
    rig.run(1.0)
    assert len(worker.waiting) == 2
    rig.start("b")
    rig.run(6.0)
    assert set(rig.outcomes().values()) == {"finished"}
    assert not worker.waiting
    assert {served.request.index: served.attempts for served in rig.served} == {0: 3, 1: 3, 2: 1, 3: 1}


def test_a_full_queue_refuses() -> None:
    rig = Rig(GatewaySettings(max_queued_requests=2))
    for _ in range(3):
        rig.ask()
    rig.run(0.1)
    assert rig.outcomes() == {2: "overloaded"}


def test_what_no_instance_can_hold_is_refused() -> None:
    rig = Rig()
    rig.start("a", context=15)
    rig.run(0.1)
    rig.ask(output=5)
    rig.ask(output=6)
    rig.run(2.0)
    assert rig.outcomes() == {0: "finished", 1: "too_long"}


def test_a_request_continues_behind_its_last_token_when_its_worker_is_lost() -> None:
    rig = Rig()
    worker = rig.start("a")
    rig.run(1.0)
    rig.ask(output=10)
    rig.run(3.5 * STEP_S)
    rig.start("b")
    rig.kill(worker)
    rig.run(5.0)
    (served,) = rig.served
    assert (served.failure, served.attempts) == (None, 2)
    assert len(served.times_s) == 10
    # Three before, and the next ones after it began anew.
    assert served.times_s[3] == pytest.approx(1.0 + 4.5 * STEP_S, abs=0.01)


def test_a_request_that_is_sent_back_keeps_its_place_and_does_not_count_as_failed() -> None:
    rig = Rig(GatewaySettings(max_attempts=1))
    worker = rig.start("a")
    rig.run(1.0)
    ids = [rig.ask(output=4) for _ in range(3)]
    rig.run(1.5 * STEP_S)
    rig.set_state(worker, "draining")
    worker.send_back()
    later = rig.ask(output=4)
    rig.run(1.0)
    known = len(rig.submits)
    rig.start("b")
    rig.run(5.0)
    assert [request_id for request_id, _ in rig.submits[known:]] == [*ids, later]
    assert set(rig.outcomes().values()) == {"finished"}
    assert {len(served.times_s) for served in rig.served} == {4}


def test_an_error_in_the_request_itself_ends_it() -> None:
    rig = Rig()
    worker = rig.start("a")
    rig.run(0.1)
    request_id = rig.ask(output=4)
    rig.run(0.01)
    worker.cancel(request_id)
    rig.fail(request_id, RequestFailed("the engine fails on it"))
    rig.run(1.0)
    assert rig.outcomes() == {0: "gave_up"}


def test_a_request_is_counted_where_it_is_after_another_instance_took_it_over() -> None:
    rig = Rig()
    worker = rig.start("a")
    rig.run(0.1)
    request_id = rig.ask(output=4)
    rig.run(1.5 * STEP_S)
    worker.cancel(request_id)
    rig.gateway.on_taken_over((request_id, 1), worker=process("w-b"), instance_id="b")
    assert rig.gateway.router.bookings.load_of("a").inflight_requests == 1
    rig.run(0.01)
    loads = rig.gateway.router.bookings
    assert (loads.load_of("a").inflight_requests, loads.load_of("b").inflight_requests) == (0, 1)
    now_s = rig.clock.now_s
    # The next token may announce it as well, as after a hand-over from prefill to decode.
    rig.gateway.on_tokens([(request_id, 1)], [now_s - 0.005, now_s], worker=process("w-c"), instance_id="c")
    rig.run(0.01)
    assert (loads.load_of("b").inflight_requests, loads.load_of("c").inflight_requests) == (0, 1)


def test_what_cannot_be_is_no_token_and_no_end() -> None:
    rig = Rig()
    rig.start("a")
    request_id = rig.ask(output=2)
    rig.run(0.01)
    with pytest.raises(ValueError, match="cannot end"):
        rig.gateway.on_end((request_id, 1))
    with pytest.raises(ValueError, match="3 tokens of r0"):
        rig.gateway.on_tokens([(request_id, 1)], [0.0, 0.0, 0.0], worker=process("w-a"), instance_id="a")
    waiting = Rig()
    waits = waiting.ask()
    waiting.run(0.01)
    with pytest.raises(ValueError, match="there was no attempt 1 of r0"):
        waiting.gateway.on_tokens([(waits, 1)], [0.0], worker=process("w-a"), instance_id="a")


def test_what_has_not_ended_at_the_end_is_unfinished() -> None:
    rig = Rig()
    rig.start("a")
    rig.ask(output=4)
    rig.ask(output=100)
    rig.run(1.0)
    rig.gateway.end()
    rig.gateway.check_conserved()
    assert rig.outcomes() == {0: "finished", 1: "unfinished"}
    assert (rig.gateway.num_finished, rig.gateway.num_failed, rig.gateway.num_active) == (1, 1, 0)


def test_a_lost_or_repeated_request_is_noticed() -> None:
    rig = Rig()
    rig.ask()
    rig.run(0.1)
    rig.gateway.router.clear("m")
    with pytest.raises(AssertionError, match="0 wait"):
        rig.gateway.check_conserved()


# --- queue reports -------------------------------------------------------------------------------


def said(rig: Rig) -> list[tuple[float, int, int]]:
    """When; waiting, at instances."""
    return [
        (at_s, queue.queued_requests, queue.inflight_requests)
        for at_s, report in rig.reports
        for queue in report.models
    ]


def test_queues_are_reported_at_intervals_while_there_is_something_to_say_and_once_more() -> None:
    rig = Rig()
    rig.start("a")
    rig.ask(output=2, at_s=5.04)
    rig.run(20.0)
    assert said(rig) == [
        (pytest.approx(5.1), 0, 1), (pytest.approx(5.2), 0, 1), (pytest.approx(5.3), 0, 0),
    ]  # fmt: skip
    assert len(rig.clock) == 0, "a gateway without requests does nothing"
    assert rig.reports[-1][1].models == (
        ModelQueue(
            model="m", queued_requests=0, queued_tokens=0, arrived_requests_total=1, arrived_prompt_tokens_total=10,
            inflight_requests=0,
        ),
    )  # fmt: skip


def test_the_first_request_for_a_model_that_sleeps_is_reported_at_once_and_the_others_with_the_next() -> None:
    rig = Rig()
    rig.ask(at_s=5.04)
    rig.ask(at_s=5.05)
    rig.run(5.2)
    assert said(rig) == [(pytest.approx(5.04), 1, 0), (pytest.approx(5.14), 2, 0)]


def test_two_that_wake_are_reported_with_a_pause_between() -> None:
    rig = Rig(GatewaySettings(queue_timeout_s=0.001))
    rig.ask(at_s=5.0)
    rig.ask(at_s=5.052)
    rig.run(5.3)
    assert [at_s for at_s, *_ in said(rig)][:2] == pytest.approx([5.0, 5.052])
    assert rig.outcomes() == {0: "timeout", 1: "timeout"}


# --- conservation --------------------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ask"] * 4 + ["start", "kill", "drain", "serve", "stand", "wait", "blink"]),
        st.integers(0, 9),
        st.integers(1, 12),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.integers(1, 4), st.integers(1, 6))
def test_every_request_ends_once_whatever_happens(events: list[tuple[str, int, int]], run: int, queued: int) -> None:
    rig = Rig(GatewaySettings(max_queued_requests=queued, queue_timeout_s=2.0))
    names = iter(range(1000))
    for what, which, how_many in events:
        workers = list(rig.workers.values())
        worker = workers[which % len(workers)] if workers else None
        if what == "ask":
            rig.ask(output=how_many)
        elif what == "start":
            rig.start(f"i{next(names)}", run=run)
        elif what == "blink":  # messages are still on their way
            rig.run(how_many * 0.0001)
        elif what == "wait" or worker is None:
            rig.run(how_many * STEP_S / 3)
        elif what == "kill":
            rig.kill(worker)
        elif what == "drain":
            rig.set_state(worker, "draining")
            worker.send_back()
        elif what == "stand":
            worker.stands = not worker.stands
        else:
            rig.set_state(worker, "serving")
    rig.run(1.0)
    rig.gateway.end()
    rig.gateway.check_conserved()
    assert sorted(served.request.index for served in rig.served) == list(range(rig.num_requests))
    for served in rig.served:
        times_s = list(served.times_s)
        assert times_s == sorted(times_s)
        assert served.failure is not None or len(times_s) == served.request.output_tokens
