from __future__ import annotations

import pytest

from services.gateway.core.bookings import EXPECTED_OUTPUT_TOKENS, Bookings, InstanceLoad
from services.gateway.core.stream import StreamState
from shared.messages.generation import SamplingParams


def stream(name: str, prompt: int = 10, max_tokens: int = 5) -> StreamState:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    return StreamState(name, "m", (1,) * prompt, sampling, arrived_at_s=0.0)


def test_a_long_answer_counts_up_to_what_is_expected_and_tokens_that_are_here_as_known() -> None:
    bookings = Bookings()
    bookings.book(stream("1", max_tokens=10_000), "a")
    assert bookings.load_of("a").outstanding_tokens == 10 + EXPECTED_OUTPUT_TOKENS
    again = stream("2")
    again.output_token_ids = [7, 7]
    bookings.book(again, "b")
    assert (bookings.load_of("b").unstarted_tokens, bookings.load_of("b").outstanding_tokens) == (12, 15)


def test_a_prompt_begins_once() -> None:
    bookings = Bookings()
    bookings.book(stream("1"), "a")
    for name in ("1", "1", "unknown"):
        bookings.started(name)
    assert bookings.load_of("a") == InstanceLoad(inflight_requests=1, outstanding_tokens=15, accepted_requests=1)


def test_a_promise_counts_at_the_decode_instance_only_as_one() -> None:
    bookings = Bookings()
    bookings.book(stream("1"), "p", decode_instance_id="d")
    bookings.book(stream("2"), "d")
    at_d = bookings.load_of("d")
    assert (at_d.inflight_requests, at_d.promised_requests, at_d.promised_tokens, at_d.decode_tokens) == (1, 1, 15, 30)
    assert bookings.load_of("p").promised_requests == 0


@pytest.mark.parametrize("end", ["release", "moved to the decode instance", "moved elsewhere"])
def test_a_promise_ends(end: str) -> None:
    bookings = Bookings()
    bookings.book(stream("1"), "p", decode_instance_id="d")
    if end == "release":
        bookings.release("1")
    else:
        bookings.moved("1", "d" if "decode" in end else "x")
    assert (bookings.load_of("d").promised_requests, bookings.load_of("d").promised_tokens) == (0, 0)
    bookings.release("1")
    bookings.release("1")
    assert bookings.load_of("p") == bookings.load_of("d") == bookings.load_of("x") == InstanceLoad()
    assert "1" not in bookings


def test_loads_of_unknown_instances_are_forgotten_when_nothing_is_there_or_promised() -> None:
    bookings = Bookings()
    bookings.book(stream("1"), "p", decode_instance_id="d")
    for name in ("p", "d", "known", "gone"):
        bookings.load_of(name).suspended_until_s = 1.0
    bookings.prune({"known"}, now_s=0.0)
    kept = {name: bookings.load_of(name).suspended_until_s == 1.0 for name in ("p", "d", "known", "gone")}
    assert kept == {"p": True, "d": True, "known": True, "gone": False}
