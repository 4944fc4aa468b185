"""Long prompts in a pair: a layer is run in parts, with decode steps in between."""

from __future__ import annotations

import pytest

from services.worker.core.live import target_words as core
from services.worker.core.live.batch import part_from
from services.worker.core.live.machine import HasLanded, TellEnded
from shared.zigzag.batch import State
from tests.services.worker.live.alone import Source, Target
from tests.services.worker.live.members import NUM_LAYERS, expected, request, run_all, tokens_of

PART = 4


@pytest.mark.parametrize(
    ("num_tokens", "most", "ends"),
    [
        (1, 4, [1]),
        (4, 4, [4]),
        (5, 4, [3, 5]),
        (12, 4, [4, 8, 12]),
        (13, 4, [4, 7, 10, 13]),
        (9, 100, [9]),
        (3, 1, [1, 2, 3]),
    ],
)
def test_parts_are_about_equal_and_no_larger_than_they_may_be(num_tokens: int, most: int, ends: list[int]) -> None:
    found, at = [], 0
    while at < num_tokens:
        at = part_from(at, num_tokens, most)
        found.append(at)
    assert found == ends


@pytest.mark.parametrize("first_layer", range(NUM_LAYERS))
async def test_the_source_runs_a_part_per_step(first_layer: int) -> None:
    source = Source(request("a", 11), prefill_chunk_tokens=PART)
    batch = source.start(first_layer)
    for layer in range(first_layer, NUM_LAYERS):
        for part in ((0, 4), (4, 8), (8, 11)):
            assert source.done == []
            source.loop.step()
            assert source.watched.parts[-1] == (layer, *part)
    assert source.done == [batch.batch_id]
    assert source.work.layers.total == NUM_LAYERS - first_layer
    run_all(source.loop)
    assert source.lent[0].output == list(expected(source.lent[0]))


async def test_decode_steps_come_between_two_parts_of_a_layer() -> None:
    a, b = request("a", 3, max_tokens=50), request("b", 12)
    source = Source(a, b, decode_interval_s=1.5, prefill_chunk_tokens=PART)
    source.start()
    while a.num_emitted < 2:
        source.loop.step()
    source.start()
    source.watched.inside = lambda layer: setattr(source.clock, "now_s", source.clock.now_s + 1.0)
    emitted = []
    for _ in range(6):
        source.loop.step()
        emitted.append(a.num_emitted)
    # Parts of a second each, three a layer: after every second one a decode is due.
    assert emitted == [2, 2, 3, 3, 3, 4]
    assert source.watched.parts[-4:] == [(0, 0, 4), (0, 4, 8), (0, 8, 12), (1, 0, 4)]


async def test_the_target_runs_a_part_per_step_and_ends_the_layer_with_the_last() -> None:
    target = Target(prefill_chunk_tokens=PART)
    a = request("a", 11)
    target.take("a", a)
    target.load(1)
    for number, part in enumerate(((0, 4), (4, 8), (8, 11)), start=1):
        assert target.work.layers.total == 0
        target.loop.step()
        assert target.watched.parts[-1] == (0, *part)
        assert target.machine.queue.batch("a").in_layer == (number < 3)
    assert target.work.layers.total == 1
    target.load(NUM_LAYERS)
    assert tokens_of(run_all(target.loop)) == {"a": expected(a)}
    assert target.is_empty


async def test_hidden_states_and_kv_of_a_batch_run_in_parts_can_be_given_away() -> None:
    target, source = Target(prefill_chunk_tokens=PART), Source(request("a", 11))
    target.take("pair-0", request("a", 11))
    target.load(2)
    run_all(target.loop)
    source.start(2, there=target)
    assert tokens_of(run_all(source.loop)) == {"a": expected(source.lent[0])}


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
async def test_a_batch_cancelled_between_two_parts_is_given_up_at_the_next_step(layer: int) -> None:
    target = Target(prefill_chunk_tokens=PART)
    a, b = request("a", 11), request("b", 9)
    target.take("a", a)
    target.load(NUM_LAYERS)
    for _ in range(3 * layer + 1):
        target.loop.step()
    target.work.cancel(*a.key)
    assert target.machine.queue.batch("a").in_layer
    target.loop.step()
    assert target.watched.parts[-1] == (layer, 0, 4), "its other parts are not run"
    assert target.machine.queue.batch("a").state is State.CANCELLED
    assert target.is_empty
    target.take("b", b)
    assert tokens_of(run_all(target.loop)) == {"b": expected(b)}


async def test_the_end_between_two_parts_frees_everything() -> None:
    target = Target(prefill_chunk_tokens=PART)
    target.take("a", request("a", 11))
    target.load(1)
    target.loop.step()
    target.lose()
    assert target.is_empty
    assert target.loop.step() is None


async def test_an_engine_error_in_a_later_part_is_told() -> None:
    target = Target(prefill_chunk_tokens=PART)
    target.take("a", request("a", 11))
    target.load(1)
    target.loop.step()
    target.watched.failure = RuntimeError("cuda")
    target.loop.step()
    assert not target.work.ready
    target.work.handle(HasLanded(core.AwaitStepEnd()))
    (ended,) = target.all_said(TellEnded)
    assert ended.reason == "the target's engine failed: RuntimeError: cuda"
    assert target.is_empty
