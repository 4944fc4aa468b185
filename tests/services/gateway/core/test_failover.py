from __future__ import annotations

import pytest

from services.gateway.core.failover import (
    Complete,
    GiveUp,
    Outcome,
    Refuse,
    Retry,
    WorkerLost,
    after_failure,
    has_died,
    leave_alone,
    requeue,
)
from services.gateway.core.stream import StreamState
from shared.errors import (
    BadRequest,
    BlitzError,
    Conflict,
    DeadlineExceeded,
    EngineBroken,
    Internal,
    ModelNotFound,
    NoResponder,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    RequestFailed,
    SentBack,
    Unavailable,
)
from shared.messages.codec import MalformedMessage
from shared.messages.common import InstanceState
from shared.messages.generation import SamplingParams, StreamPart
from tests.processes import process
from tests.services.gateway.core.routing import Harness, route
from tests.services.gateway.core.routing import stream as queued

EOS = 7


def running(*output: int, failures: int = 0, max_tokens: int = 4) -> StreamState:
    stream = StreamState(
        request_id="r",
        model="m",
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(max_tokens=max_tokens, seed=0),
        arrived_at_s=0.0,
        end_token_ids=frozenset({EOS}),
        failures=failures,
        output_token_ids=list(output),
    )
    stream.submitted_to("i", process("w"))
    return stream


def judge(stream: StreamState, error: BlitzError, *, registered: bool = True) -> Outcome:
    return after_failure(stream, error, max_attempts=3, model_registered=registered)


@pytest.mark.parametrize(
    "error", [BadRequest("bad"), PayloadTooLarge("large"), RequestFailed("the engine fails on it")]
)
def test_what_is_wrong_with_the_request_is_not_tried_elsewhere(error: BlitzError) -> None:
    assert judge(running(), error) == Refuse(error)


def test_a_request_that_a_worker_cannot_decode_is_no_fault_of_the_client() -> None:
    assert judge(running(), MalformedMessage("tag")) == Retry(fault=True, pause_s=0.0)
    outcome = judge(running(failures=2), MalformedMessage("tag"))
    assert isinstance(outcome, GiveUp)
    assert "did not understand" in outcome.error.message


@pytest.mark.parametrize(
    "error", [EngineBroken("?"), Unavailable("draining"), DeadlineExceeded("late"), NotFound("?"), Conflict("lost")]
)
def test_a_suspect_instance_is_left_alone_while_the_request_goes_on(error: BlitzError) -> None:
    assert judge(running(5), error) == Retry(fault=True, pause_s=1.0)


def test_a_failed_step_says_nothing_about_the_instance() -> None:
    assert judge(running(5), Internal("step")) == Retry(fault=True, pause_s=0.0)


def test_a_full_instance_is_no_failure_however_often_it_is_full() -> None:
    assert judge(running(failures=2), Overloaded("full")) == Retry(fault=False, pause_s=0.0, full=True)


@pytest.mark.parametrize("error", [NoResponder("nobody listens"), WorkerLost("away with the bus", reason="gone")])
def test_a_worker_that_is_not_there_costs_no_attempt(error: BlitzError) -> None:
    assert judge(running(5, failures=2), error) == Retry(fault=False, pause_s=1.0)


def test_a_request_that_an_instance_sends_back_costs_no_attempt_however_often() -> None:
    outcome = judge(running(5, failures=2), SentBack("it goes"))
    assert outcome == Retry(fault=False, pause_s=1.0, sent_back=True)
    assert judge(running(1, EOS), SentBack("it goes")) == Complete("stop")


@pytest.mark.parametrize(("output", "reason"), [((1, EOS), "stop"), ((1, 2, 3, 4), "length")])
def test_a_request_that_lost_only_its_terminal_part_is_complete(output: tuple[int, ...], reason: str) -> None:
    assert judge(running(*output, failures=2), NoResponder("gone"), registered=False) == Complete(reason)  # type: ignore[arg-type]


def test_the_last_attempt_ends_with_a_typed_error() -> None:
    outcome = judge(running(failures=2), Conflict("gone"))
    assert isinstance(outcome, GiveUp)
    assert isinstance(outcome.error, Unavailable)
    assert outcome.error.message == "3 attempts failed, the last one: gone"
    assert outcome.pause_s == 1.0


def test_a_request_of_a_removed_model_ends() -> None:
    outcome = judge(running(), NoResponder("gone"), registered=False)
    assert isinstance(outcome, GiveUp)
    assert isinstance(outcome.error, ModelNotFound)


def test_judging_changes_nothing() -> None:
    stream = running(5)
    before = (stream.phase, stream.attempt, stream.failures, stream.instance_id, list(stream.output_token_ids))
    judge(stream, NoResponder("gone"))
    assert before == (stream.phase, stream.attempt, stream.failures, stream.instance_id, [5])


GONE = WorkerLost("gone", reason="gone")


@pytest.mark.parametrize(
    ("error", "state", "settled", "died"),
    [
        (EngineBroken("broken"), "serving", False, True),
        (GONE, "serving", True, True),
        (GONE, None, True, True),
        (GONE, "draining", True, False),
        (GONE, None, False, False),
        (NotFound("unknown"), None, True, True),
        (NotFound("unknown"), "serving", True, False),
        (SentBack("goes"), None, True, False),
    ],
)
def test_a_worker_died_if_it_did_not_leave_on_request(
    error: BlitzError, state: InstanceState | None, settled: bool, died: bool
) -> None:
    present = route("a", state=state) if state is not None else None
    assert has_died(error, present, settled=settled) is died


def test_what_a_failure_says_about_its_instance_keeps_requests_away_from_it() -> None:
    for outcome, again_s in ((Retry(fault=False, pause_s=0.0, full=True), 0.05), (GiveUp(GONE, pause_s=1.0), 1.0)):
        harness = Harness(route("a", running=1), route("b", running=1))
        first, *others = (queued(f"r{i}") for i in range(3))
        harness.add(first)
        assert harness.placed() == [("a", None)]
        first.submitted_to("a", process("w-a"))
        leave_alone(harness.router, first, outcome, now_s=0.0)
        harness.router.bookings.release(first.request_id)
        harness.add(*others)
        assert harness.placed(again_s - 0.01) == [("b", None)]
        assert harness.placed(again_s) == [("a", None)]


def test_an_instance_that_had_no_free_slot_is_not_paused_but_full_until_it_reports() -> None:
    harness = Harness(route("a", running=2))
    first, second = queued("r0"), queued("r1")
    harness.add(first)
    harness.placed()
    first.submitted_to("a", process("w-a"), may_wait=False)
    leave_alone(harness.router, first, Retry(fault=False, pause_s=0.0, full=True), now_s=0.0)
    assert harness.router.bookings.load_of("a").slots_taken
    harness.add(second)
    (assignment,) = harness.router.dispatch("m", now_s=0.0).assignments
    assert assignment.may_wait, "nothing is free anywhere: it may wait there"


def test_a_request_that_was_served_or_failed_waits_anew_and_one_that_was_only_refused_does_not() -> None:
    def deadline_s(retry: Retry, *tokens: int) -> float:
        harness = Harness(route("a"))
        stream = queued("r", max_tokens=4)
        harness.add(stream)
        harness.placed()
        stream.submitted_to("a", process("w-a"))
        if tokens:
            stream.accept(StreamPart(request_id="r", attempt=1, offset=0, token_ids=tokens))
        found = requeue(harness.router, stream, retry, deadline_s=10.0, queue_timeout_s=10.0, now_s=5.0)
        assert harness.router.queued("m") == (1, 10 + len(tokens))
        assert ("a" in stream.avoid) is not retry.full
        late = harness.router.expired(now_s=found)
        assert late == [stream]
        return found

    assert deadline_s(Retry(fault=False, pause_s=0.0, full=True)) == 10.0
    assert deadline_s(Retry(fault=False, pause_s=0.0, sent_back=True)) == 10.0
    assert deadline_s(Retry(fault=True, pause_s=0.0)) == 15.0
    assert deadline_s(Retry(fault=False, pause_s=0.0, sent_back=True), 1, 2) == 15.0
