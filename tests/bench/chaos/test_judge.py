from __future__ import annotations

from dataclasses import replace

import pytest

from bench.chaos.answer import Answer, Failure
from bench.chaos.injected_fault import InjectedFault
from bench.chaos.judge import NOTICED_S, Verdict, judge
from bench.chaos.plan import How

RIGHT = Answer("the text", "length", 5, 8, ("t",), (-1.5,))
CUT = Failure("disconnected", "the server closed the connection")


def gateway_fault(how: How, at_s: float, over_s: float | None = None) -> InjectedFault:
    return InjectedFault("gateway", "gateway", how, at_s, over_s)


def verdict(got: Answer | Failure, *faults: InjectedFault, sent_s: float = 10.0, ended_s: float = 12.0) -> Verdict:
    return judge(got, RIGHT, sent_s=sent_s, ended_s=ended_s, gateway_faults=faults).verdict


def test_the_same_answer_is_right() -> None:
    assert verdict(RIGHT) == "right"
    assert verdict(replace(RIGHT, logprobs=(-1.5000001,))) == "right"


@pytest.mark.parametrize(
    "got",
    [
        replace(RIGHT, text="the texs"),
        replace(RIGHT, text="the tex"),
        replace(RIGHT, text="the texttt"),
        replace(RIGHT, finish_reason="stop"),
        replace(RIGHT, completion_tokens=9),
        replace(RIGHT, prompt_tokens=4),
        replace(RIGHT, tokens=("u",)),
        replace(RIGHT, logprobs=(-1.6,)),
        replace(RIGHT, logprobs=()),
    ],
)
def test_any_other_answer_is_different(got: Answer) -> None:
    assert verdict(got) == "different"


def test_a_gateways_death_does_not_excuse_a_different_answer() -> None:
    assert verdict(replace(RIGHT, text="x"), gateway_fault("KILL", 11.9, 11.9)) == "different"


@pytest.mark.parametrize("kind", ["disconnected", "cut"])
def test_what_its_killed_gateway_held_is_lost_with_it(kind: str) -> None:
    assert verdict(Failure(kind, ""), gateway_fault("KILL", 11.9, 11.95)) == "lost_with_gateway"


def test_what_broke_long_after_the_kill_or_before_it_has_failed() -> None:
    assert verdict(CUT, gateway_fault("KILL", 12.0 - NOTICED_S - 0.1, 11.0)) == "failed"
    assert verdict(CUT, gateway_fault("KILL", 12.1, 12.1)) == "failed"
    assert verdict(CUT) == "failed"


def test_what_was_sent_after_the_kill_was_not_held_by_the_killed() -> None:
    assert verdict(CUT, gateway_fault("KILL", 11.0, 11.0), sent_s=11.5) == "failed"


@pytest.mark.parametrize("kind", ["http_500", "http_503", "http_404", "error_event", "timeout", "protocol"])
def test_errors_and_time_outs_have_failed_even_when_the_gateway_was_killed(kind: str) -> None:
    assert verdict(Failure(kind, ""), gateway_fault("KILL", 11.9, 11.95)) == "failed"


def test_a_gateway_that_is_told_to_end_may_refuse_and_cut_what_it_cannot_finish() -> None:
    ending = gateway_fault("TERM", 11.0)
    ended = gateway_fault("TERM", 11.0, 12.5)
    assert verdict(CUT, ending) == verdict(CUT, ended) == "lost_with_gateway"
    assert verdict(Failure("http_503", ""), ending, sent_s=10.999) == "refused_without_gateway"
    assert verdict(Failure("error_event", ""), ending) == "failed"
    assert verdict(CUT, gateway_fault("TERM", 5.0, 7.0)) == "failed"


def test_a_connection_that_the_dying_gateway_did_not_take_is_refused() -> None:
    refused = Failure("connect", "connection refused")
    assert verdict(refused, gateway_fault("KILL", 10.01, 10.02), ended_s=10.02) == "refused_without_gateway"
    assert verdict(refused) == "failed"


def test_a_stopped_gateway_excuses_nothing() -> None:
    assert verdict(CUT, gateway_fault("STOP", 11.0, 18.0)) == "failed"
