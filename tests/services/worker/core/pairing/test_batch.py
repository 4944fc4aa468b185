"""Batches of prompts: what both members derive from their requests, and how short ones share one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.pairing.batch import PromptBatch, packed
from services.worker.core.scheduling.sequence import sequence_of
from shared.messages.codec import decode, encode
from shared.messages.generation import SamplingParams, Submit
from tests.services.worker.live.members import batch_of, request


def test_sizes_are_those_of_the_prefixes_and_stay_when_they_grow() -> None:
    a, b = request("a", 5), request("b", 3, output=(7, 8))
    batch = batch_of("x", a, b)
    assert (batch.lengths, batch.num_tokens) == ((5, 5), 10)
    assert batch.token_ids() == [*a.prompt, *b.prompt, 7, 8]
    a.append(1)
    assert (batch.lengths, batch.num_tokens) == ((5, 5), 10)


def test_a_batch_has_ended_when_nobody_waits_for_any_of_it() -> None:
    a, b = request("a"), request("b")
    batch = batch_of("x", a, b)
    a.finished = True
    assert not batch.ended
    b.finished = True
    assert batch.ended


def test_the_target_knows_a_request_as_the_source_does() -> None:
    params = SamplingParams(max_tokens=9, seed=3, temperature=0.5, stop_token_ids=(4,), min_tokens=2)
    submit = Submit(
        request_id="r",
        attempt=2,
        gateway_id="gw",
        instance_id="at-source",
        model="m",
        model_hash="h",
        prompt_token_ids=(1, 2, 3),
        sampling=params,
        output_token_ids=(8, 9),
        gateway_incarnation="1",
    )
    here = sequence_of(submit, (250,), arrived_s=4.0)
    (sent,) = PromptBatch("x", 0, [here], 1.0).submits("at-target", "m", "h")
    assert sent.instance_id == "at-target"
    there = sequence_of(decode(encode(sent), Submit), (250,))
    for name in ("key", "gateway_id", "prompt", "output", "tokens", "params", "stop_ids", "eos_token_ids"):
        assert getattr(there, name) == getattr(here, name), name
    assert (here.arrived_s, there.arrived_s) == (4.0, None), "another process's clock"
    assert there.num_emitted == 0


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([99], [[99]]),
        ([4, 4, 4], [[4, 4], [4]]),
        ([3, 9, 3, 3], [[3], [9], [3, 3]]),
        ([8, 1], [[8], [1]]),
        ([7, 1, 1], [[7, 1], [1]]),
    ],
)
def test_short_prompts_share_a_batch_and_long_ones_have_their_own(sizes: list[int], expected: list[list[int]]) -> None:
    found = packed([request(f"r{i}", n) for i, n in enumerate(sizes)], 8, 99)
    assert [[s.num_tokens for s in pack] for pack in found] == expected


@given(st.lists(st.integers(1, 30)), st.integers(1, 20))
def test_packing_keeps_everybody_and_the_order(sizes: list[int], most_tokens: int) -> None:
    sequences = [request(f"r{i}", n) for i, n in enumerate(sizes)]
    packs = list(packed(sequences, most_tokens, 99))
    assert [s for pack in packs for s in pack] == sequences
    for pack in packs:
        assert pack
        assert len(pack) == 1 or sum(s.num_tokens for s in pack) <= most_tokens
    for pack, following in itertools.pairwise(packs):
        assert sum(s.num_tokens for s in pack) + following[0].num_tokens > most_tokens, "it would have fitted"


def test_a_batch_never_needs_more_seats_than_allowed() -> None:
    packs = list(packed([request(f"r{i}", 1) for i in range(10)], 100, 4))
    assert [len(pack) for pack in packs] == [4, 4, 2]
