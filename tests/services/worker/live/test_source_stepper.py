"""The source's engine in a pair: the rest of the layers of what it pulled, with decode steps in between."""

from __future__ import annotations

import time

import pytest

from shared.errors import EngineBroken, PeerLost
from tests.services.worker.live.alone import ONE_EACH, Source, Target
from tests.services.worker.live.members import NUM_LAYERS, expected, request, run_all, tokens_of


@pytest.mark.parametrize("first_layer", range(NUM_LAYERS))
async def test_the_rest_of_the_layers_gives_the_tokens_of_one_engine(first_layer: int) -> None:
    source = Source(request("a", 9), request("b", 5))
    batch = source.start(first_layer)
    layer_s = source.machine.batches[batch.batch_id].layer_s
    assert source.machine.remaining_s == pytest.approx((NUM_LAYERS - first_layer) * layer_s)
    outputs = run_all(source.loop)
    assert tokens_of(outputs) == {s.request_id: expected(s) for s in source.lent}
    assert [layer for size, layer in source.watched.ran if size == 9] == list(range(first_layer, NUM_LAYERS))
    assert source.done == [batch.batch_id]
    assert source.work.layers.total == NUM_LAYERS - first_layer
    assert source.work.tokens.total == 6
    assert source.is_empty


async def test_one_step_runs_one_layer_and_the_first_batch_is_done_first() -> None:
    source = Source(request("a", 9), request("b", 5), max_num_sequences=ONE_EACH)
    first, second = source.start(), source.start()
    for layer in range(NUM_LAYERS):
        assert source.done == []
        source.loop.step()
        assert source.watched.ran[-1] == (9, layer)
    assert source.done == [first.batch_id]
    while (5, 0) not in source.watched.ran:
        source.loop.step()  # the first one's next token may come between
    assert (5, 1) not in source.watched.ran
    run_all(source.loop)
    assert source.done == [first.batch_id, second.batch_id]


async def test_a_decode_step_comes_as_soon_as_one_is_due_and_no_earlier() -> None:
    a, b = request("a", 5, max_tokens=50), request("b", 9)
    source = Source(a, b, decode_interval_s=2.5, max_num_sequences=ONE_EACH)
    source.start()
    while a.num_emitted < 2:
        source.loop.step()
    source.start()
    source.watched.ran.clear()
    source.watched.inside = lambda layer: setattr(source.clock, "now_s", source.clock.now_s + 1.0)
    emitted = []
    for _ in range(5):
        source.loop.step()
        emitted.append(a.num_emitted)
    # Layers of a second each: after the third a decode is due, which is through its layers in one.
    assert emitted == [2, 2, 2, 3, 3]
    assert [layer for size, layer in source.watched.ran if size == 9] == [0, 1, 2, 3]


async def test_without_decodes_layers_follow_one_another() -> None:
    source = Source(request("a", 5), decode_interval_s=0.0)
    source.start()
    for _ in range(NUM_LAYERS):
        source.loop.step()
    assert [layer for _, layer in source.watched.ran] == list(range(NUM_LAYERS))


async def test_a_batch_that_nobody_waits_for_is_dropped_between_two_layers() -> None:
    a, b = request("a", 9), request("b", 5)
    source = Source(a, b, max_num_sequences=ONE_EACH)
    batch = source.start()
    source.start()
    source.loop.step()
    source.loop.scheduler.cancel("a", 1)
    assert a.block_table, "the engine had it in hand"
    assert source.loop.step() is not None
    assert source.done == [batch.batch_id]
    assert a.block_table == []
    outputs = run_all(source.loop)
    assert [o.finish_reason for o in outputs if o.request_id == "a"] == ["cancelled"]
    assert tokens_of(o for o in outputs if o.request_id == "b") == {"b": expected(b)}
    assert source.is_empty


async def test_a_batch_cancelled_before_it_had_blocks_is_done_at_once() -> None:
    source = Source(request("a"))
    source.loop.scheduler.cancel("a", 1)
    batch = source.start()
    source.loop.step()
    assert source.done == [batch.batch_id]
    assert source.watched.ran == []
    assert source.is_empty
    assert not source.work.ready


async def test_one_cancelled_request_of_a_batch_does_not_stop_the_others() -> None:
    source = Source(request("a", 9), request("b", 5))
    source.start()
    source.loop.step()
    source.loop.scheduler.cancel("a", 1)
    outputs = run_all(source.loop)
    assert tokens_of(o for o in outputs if o.request_id == "b") == {"b": expected(source.lent[1])}
    assert source.is_empty


@pytest.mark.parametrize(
    ("first_layer", "layer"), [(first, layer) for first in range(NUM_LAYERS) for layer in range(first, NUM_LAYERS)]
)
async def test_a_batch_that_fails_is_computed_in_steps_and_only_the_guilty_request_ends(
    first_layer: int, layer: int
) -> None:
    a, b, c = request("a", 9), request("b", 5), request("c", 7)
    source = Source(a, b, c, prefill_chunk_tokens=14)
    first, later = source.start(first_layer), source.start()
    source.watched.fails_on, source.watched.fails_at = b.prompt[0], layer
    outputs = run_all(source.loop)
    ended = {o.request_id: o.error for o in outputs if o.error is not None}
    assert list(ended) == ["b"]
    assert ended["b"].code == "request_failed"
    assert tokens_of(o for o in outputs if o.request_id != "b") == {s.request_id: expected(s) for s in (a, c)}
    assert source.done == [first.batch_id, later.batch_id]
    assert source.is_empty


async def test_a_batch_of_an_engine_that_is_broken_ends_with_it() -> None:
    source = Source(request("a", 9))
    source.start()
    source.watched.failure = PeerLost("gone")
    with pytest.raises(EngineBroken, match="gone"):
        run_all(source.loop)


async def test_hidden_states_that_are_not_the_batchs_are_computed_again_and_give_no_other_tokens() -> None:
    source, there = Source(request("a", 9)), Target()
    there.take("pair-0", request("z", 9))
    there.load(2)
    run_all(there.loop)
    batch = source.start(2, there=there, with_kv=False)
    assert run_all(source.loop) == []
    source.kv_over(batch, is_here=False)
    assert tokens_of(run_all(source.loop)) == {"a": expected(source.lent[0])}
    assert source.is_empty


@pytest.mark.parametrize(("lead_layers", "num_pulls"), [(0, [1, 1, 1, 2]), (1, [1, 1, 2, 2])])
async def test_it_asks_for_more_when_no_prefill_is_unfinished_for_longer_than_a_pull_takes(
    lead_layers: int, num_pulls: list[int]
) -> None:
    source = Source(request("a", 9))
    assert source.num_pulls == 1
    batch = source.start()
    source.machine.time.lead_s = lead_layers * source.machine.batches[batch.batch_id].layer_s
    asked = []
    for _ in range(NUM_LAYERS):
        source.loop.step()
        asked.append(source.num_pulls)
    assert asked == num_pulls


async def test_its_own_unfinished_prefill_keeps_it_from_pulling() -> None:
    source = Source(own=request("own", 6), prefill_chunk_tokens=2)
    for num_pulls in (0, 1):
        assert source.num_pulls == 0
        source.loop.step()
        assert source.num_pulls == num_pulls, "told by the step that ends it"
    # Layers of its own prefill count as the source's.
    assert source.work.layers.total == 2 * NUM_LAYERS


async def test_the_prefills_speed_is_measured_as_if_all_layers_had_run_here() -> None:
    source = Source(request("a", 10))
    source.start(2)
    source.watched.inside = lambda layer: setattr(source.clock, "now_s", source.clock.now_s + 1.0)
    assert source.loop.prefill_token_s == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", source.clock)
        source.loop.step()
        source.loop.step()
    # Two of four layers, a second each, for ten tokens.
    assert source.loop.prefill_token_s == pytest.approx(4.0 / 10)


async def test_time_in_the_queue_ends_where_the_batch_begins_here() -> None:
    source = Source(request("a"))
    source.start()
    assert source.lent[0].first_scheduled_s is not None
    outputs = run_all(source.loop)
    assert outputs[0].queued_s is not None
