"""What a worker keeps of its streams, without a worker."""

from __future__ import annotations

import pytest

from services.worker.core.scheduling.gateways import Gone
from services.worker.requests.streams import TERMINAL_TTL_S, Streams
from shared.errors import NotFound
from shared.messages.generation import FinishReason, StreamPart, TokenLogprobs
from tests.processes import process


def output(
    offset: int, *tokens: int, request_id: str = "r", attempt: int = 1, end: FinishReason | None = None
) -> StreamPart:
    logprobs = tuple(TokenLogprobs(logprob=-float(t)) for t in tokens)
    return StreamPart(
        request_id=request_id, attempt=attempt, offset=offset, token_ids=tokens, logprobs=logprobs, finish_reason=end
    )


@pytest.fixture
def streams() -> Streams:
    """One open stream ``r`` that continues after two tokens, with three of its own."""
    streams = Streams()
    assert streams.open("r", 1, process("gw"), offset=2)
    for offset in (2, 3, 4):
        streams.take([output(offset, 10 + offset)], 0.0)
    return streams


@pytest.mark.parametrize(("offset", "tokens"), [(2, (12, 13, 14)), (3, (13, 14)), (5, ())])
def test_a_resend_has_everything_from_its_offset_with_logprobs(
    streams: Streams, offset: int, tokens: tuple[int, ...]
) -> None:
    gateway, part = streams.resend("r", 1, offset)
    assert gateway == process("gw")
    assert (part.offset, part.token_ids, part.finish_reason) == (offset, tokens, None)
    assert [-lp.logprob for lp in part.logprobs or ()] == list(tokens)


def test_a_resend_of_an_ended_stream_is_terminal(streams: Streams) -> None:
    streams.take([output(5, 15, end="stop")], 0.0)
    assert streams.resend("r", 1, 4)[1].finish_reason == "stop"


@pytest.mark.parametrize(("request_id", "attempt", "offset"), [("x", 1, 2), ("r", 2, 2), ("r", 0, 2), ("r", 1, 1)])
def test_what_is_not_here_is_not_resent(streams: Streams, request_id: str, attempt: int, offset: int) -> None:
    with pytest.raises(NotFound):
        streams.resend(request_id, attempt, offset)


def test_an_attempt_is_opened_once_and_only_a_newer_one_replaces_it(streams: Streams) -> None:
    assert not streams.open("r", 1, process("gw"), 2)
    assert not streams.open("r", 0, process("gw"), 2)
    assert streams.open("r", 2, process("gw"), 4)
    assert streams.take([output(5, 15, attempt=1)], 0.0) == {}, "the older attempt has no listener"
    assert streams.resend("r", 2, 4)[1].token_ids == ()


def test_forgetting_an_older_attempt_leaves_the_newer_one(streams: Streams) -> None:
    streams.open("r", 2, process("gw"), 4)
    streams.forget("r", 1)
    assert streams.attempt_of("r") is not None
    streams.forget("r", 2)
    assert streams.attempt_of("r") is None


def test_a_step_gives_one_list_of_parts_for_each_gateway() -> None:
    streams = Streams()
    for request_id, gateway_id in (("a", "g1"), ("b", "g2"), ("c", "g1")):
        streams.open(request_id, 1, process(gateway_id), 0)
    parts = streams.take([output(0, 1, request_id=r) for r in "abc"], 0.0)
    assert {g.id: [p.request_id for p in ps] for g, ps in parts.items()} == {"g1": ["a", "c"], "g2": ["b"]}


def test_ended_streams_are_forgotten_after_a_while_and_running_ones_never(streams: Streams) -> None:
    streams.open("running", 1, process("gw"), 0)
    streams.take([output(5, 15, end="length")], 100.0)
    streams.expire(100.0 + TERMINAL_TTL_S)
    assert len(streams) == 2
    streams.expire(100.1 + TERMINAL_TTL_S)
    assert streams.attempt_of("r") is None
    assert streams.attempt_of("running") is not None


def test_a_dead_gateways_streams_go_together(streams: Streams) -> None:
    streams.open("other", 1, process("gw2"), 0)
    streams.forget_gateway(Gone(*process("gw")))
    assert streams.attempt_of("r") is None
    assert streams.attempt_of("other") is not None
