"""Batches of a pair with their requests, as both members have them."""

from __future__ import annotations

import gc
import weakref

from services.worker.core.scheduling.sequence import sequence_of
from services.worker.device.completion import Landed
from services.worker.live.batches import PromptBatch
from shared.messages.codec import decode, encode
from shared.messages.generation import SamplingParams, Submit
from tests.services.worker.live.members import request


def test_sizes_are_those_of_the_prefixes_and_stay_when_they_grow() -> None:
    a, b = request("a", 5), request("b", 3, output=(7, 8))
    batch = PromptBatch("x", (a, b))
    assert (batch.lengths, batch.num_tokens) == ((5, 5), 10)
    assert batch.token_ids() == [*a.prompt, *b.prompt, 7, 8]
    a.append(1)
    assert (batch.lengths, batch.num_tokens) == ((5, 5), 10)


def test_a_batch_has_ended_when_nobody_waits_for_any_of_it() -> None:
    a, b = request("a"), request("b")
    batch = PromptBatch("x", (a, b))
    a.finished = True
    assert not batch.ended
    b.finished = True
    assert batch.ended


def test_what_a_failed_batch_computed_with_is_not_kept_by_its_error() -> None:
    class Large:
        """A device's memory."""

    def fails(large: Large) -> Exception:
        try:
            raise RuntimeError("out of memory")
        except RuntimeError as error:
            return error

    batch, large = PromptBatch("x", (request("a"),)), Large()
    batch.activation = Landed(large)
    held = weakref.ref(large)
    assert batch.breaks(fails(large))
    assert not batch.breaks(fails(large)), "it had before"
    assert str(batch.broken) == "RuntimeError: out of memory"
    del large
    gc.collect()
    assert held() is None


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
    (sent,) = PromptBatch("x", (here,)).submits("at-target", "m", "h")
    assert sent.instance_id == "at-target"
    there = sequence_of(decode(encode(sent), Submit), (250,))
    for name in ("key", "gateway_id", "prompt", "output", "tokens", "params", "stop_ids", "eos_token_ids"):
        assert getattr(there, name) == getattr(here, name), name
    assert (here.arrived_s, there.arrived_s) == (4.0, None), "another process's clock"
    assert there.num_emitted == 0
