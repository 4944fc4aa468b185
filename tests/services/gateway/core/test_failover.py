from __future__ import annotations

import pytest

from services.gateway.core.failover import Complete, GiveUp, Outcome, Refuse, Retry, WorkerLost, after_failure
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
from shared.messages.generation import SamplingParams

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
    stream.submitted_to("i", "w")
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
