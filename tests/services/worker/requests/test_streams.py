"""What a worker keeps of its streams, without a worker."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.core.scheduling.gateways import Gone
from services.worker.requests.inbox import PROMPT_PAGE_BYTES, prompt_pages
from services.worker.requests.streams import TERMINAL_TTL_S, Streams
from shared.errors import NotFound
from shared.messages.generation import FinishReason, PromptLogprobs, StreamPart, TokenLogprobs
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


# --- log-probabilities of prompts -----------------------------------------------------------------


def scores(start: int, end: int, num_top: int = 2) -> StreamPart:
    """Those of positions ``start <= i < end``: of each its own number."""
    own = np.arange(start, end)
    wide = np.repeat(own, num_top).reshape(len(own), num_top)
    logprobs = PromptLogprobs(
        start=start,
        num_top=num_top,
        logprobs=own.astype("<f4").tobytes(),
        ranks=own.astype("<i4").tobytes(),
        top_ids=wide.astype("<i4").tobytes(),
        top_logprobs=wide.astype("<f4").tobytes(),
    )
    assert logprobs.is_whole
    return StreamPart(request_id="p", attempt=1, offset=0, prompt=logprobs)


def numbers(part: StreamPart) -> list[int]:
    assert part.prompt is not None
    assert part.prompt.is_whole
    own = np.frombuffer(part.prompt.logprobs, "<f4").astype(int).tolist()
    wide = np.repeat(own, part.prompt.num_top)
    assert np.frombuffer(part.prompt.ranks, "<i4").tolist() == own
    assert np.frombuffer(part.prompt.top_ids, "<i4").tolist() == wide.tolist()
    assert np.frombuffer(part.prompt.top_logprobs, "<f4").tolist() == wide.tolist()
    assert own == list(range(part.prompt.start, part.prompt.end))
    return own


@pytest.fixture
def prompted() -> Streams:
    """One open stream ``p`` with all of a prompt of ten tokens, and none of its own."""
    streams = Streams()
    assert streams.open("p", 1, process("gw"), offset=0)
    parts = [scores(1, 4), scores(4, 8), scores(8, 10)]
    assert streams.take_prompts(parts) == [(process("gw"), part) for part in parts]
    return streams


@pytest.mark.parametrize("with_token", [False, True])
@pytest.mark.parametrize(("start", "first"), [(1, 1), (3, 1), (4, 4), (9, 8)])
def test_a_prompt_is_resent_from_a_position(prompted: Streams, start: int, first: int, with_token: bool) -> None:
    if with_token:
        prompted.take([StreamPart(request_id="p", attempt=1, offset=0, token_ids=(3,))], 0.0)
    gateway, parts = prompted.resend_prompt("p", 1, start)
    assert gateway == process("gw")
    assert [n for part in parts for n in numbers(part)] == list(range(first, 10))


def test_what_of_a_prompt_is_not_computed_yet_is_no_fault_and_what_was_computed_elsewhere_is(prompted: Streams) -> None:
    assert prompted.open("q", 1, process("gw"), offset=0)
    assert prompted.resend_prompt("q", 1, 1) == (process("gw"), [])
    prompted.take([StreamPart(request_id="q", attempt=1, offset=0, token_ids=(3,))], 0.0)
    for request_id, attempt in (("q", 1), ("p", 2), ("x", 1)):
        with pytest.raises(NotFound):
            prompted.resend_prompt(request_id, attempt, 1)


def test_a_prompt_of_an_older_attempt_is_nobodys(prompted: Streams) -> None:
    assert prompted.open("p", 2, process("gw"), offset=0)
    assert prompted.take_prompts([scores(1, 4)]) == []
    assert prompted.resend_prompt("p", 2, 1) == (process("gw"), [])


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_pages_of_a_prompt_are_small_and_all_of_it(num_top: int) -> None:
    pages = list(prompt_pages(scores(5, 9_000, num_top)))
    assert [n for page in pages for n in numbers(page)] == list(range(5, 9_000))
    sizes = [len(p.prompt.top_ids + p.prompt.top_logprobs + p.prompt.logprobs + p.prompt.ranks) for p in pages]  # type: ignore[union-attr]
    assert max(sizes) <= PROMPT_PAGE_BYTES
    assert len(pages) > 1


def test_a_prompt_of_one_token_has_no_page() -> None:
    assert list(prompt_pages(scores(1, 1))) == []
