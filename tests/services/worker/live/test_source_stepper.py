"""The source's engine in a pair: the rest of the layers of what it pulled, with decode steps in between."""

from __future__ import annotations

import time

import pytest

from services.worker.core.pairing.batch import PromptBatch
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.loop import EngineLoop
from services.worker.live.steppers import SourceBatch, SourceStepper
from shared.errors import EngineBroken, PeerLost
from shared.transport.base import Buffer
from tests.services.worker.live.members import (
    NUM_LAYERS,
    Clock,
    batch_of,
    engine_of,
    expected,
    make_loop,
    request,
    run_all,
    tokens_of,
)


class Source:
    """A loop that lends, and its work."""

    def __init__(self, *waiting: ActiveSequence, decode_interval_s: float = 1e9, **changes: int) -> None:
        self.clock = Clock()
        self.loop: EngineLoop = make_loop(self.clock, **changes)
        self.done: list[SourceBatch] = []
        self.kv: dict[str, Buffer] = {}
        self.num_free = 0
        self.work = SourceStepper(
            self.loop,
            decode_interval_s=decode_interval_s,
            start_s=0.0,
            on_done=self.done.append,
            on_free=self._free,
        )
        self.loop.partial = self.work
        for sequence in waiting:
            self.loop.add(sequence)
        self.loop.scheduler.table.lending = True
        self.lent = self.loop.scheduler.lend()

    def _free(self) -> None:
        self.num_free += 1

    def pull(self, batch: PromptBatch, first_layer: int = 0) -> SourceBatch:
        """As if the target had run the layers before ``first_layer``."""
        hidden = None
        if first_layer:
            target = make_loop()
            there = batch_of(batch.batch_id, *(request(s.request_id, len(s.prompt)) for s in batch.sequences))
            assert target.scheduler.reservations.reserve(there.sequences)
            activation = target.engine.embed(target.batches.of_prompts(there.sequences)).result()
            target.engine.run_layers(activation, 0, first_layer).result()
            hidden = target.engine.hidden_states(activation).result()
            self.kv[batch.batch_id] = target.engine.export_kv(there.block_tables, there.lengths, first_layer).result()
        return SourceBatch(batch, first_layer, hidden=hidden)

    def start(self, batch: PromptBatch, first_layer: int = 0, *, with_kv: bool = True) -> SourceBatch:
        """Pull it and begin it."""
        pulled = self.pull(batch, first_layer)
        assert self.loop.scheduler.reservations.reserve(batch.sequences)
        self.work.start(pulled)
        if first_layer and with_kv:
            self.bring_kv(pulled)
        return pulled

    def bring_kv(self, pulled: SourceBatch) -> None:
        """Its KV is whole."""
        batch = pulled.batch
        kv = self.kv[batch.batch_id]
        self.loop.engine.import_kv(batch.block_tables, batch.lengths, pulled.first_layer, kv).result()
        self.work.kv_over(pulled, is_here=True)


@pytest.mark.parametrize("first_layer", range(NUM_LAYERS))
def test_the_rest_of_the_layers_gives_the_tokens_of_one_engine(first_layer: int) -> None:
    source = Source(request("a", 9), request("b", 5))
    pulled = source.start(batch_of("x", *source.lent), first_layer)
    assert source.work.remaining_s == NUM_LAYERS - first_layer
    outputs = run_all(source.loop)
    assert tokens_of(outputs) == {s.request_id: expected(s) for s in source.lent}
    assert [layer for size, layer in engine_of(source.loop).ran if size == 9] == list(range(first_layer, NUM_LAYERS))
    assert source.done == [pulled]
    assert source.work.layers.total == NUM_LAYERS - first_layer
    assert source.work.tokens.total == 6
    assert source.loop.scheduler.pool.num_used == source.loop.num_requests == 0


def test_one_step_runs_one_layer_and_the_first_batch_is_done_first() -> None:
    source = Source(request("a", 9), request("b", 5))
    a, b = source.lent
    first, second = source.start(batch_of("a", a)), source.start(batch_of("b", b))
    for layer in range(NUM_LAYERS):
        assert source.done == []
        source.work.step()
        assert engine_of(source.loop).ran[-1] == (9, layer)
    assert source.done == [first]
    source.work.step()
    assert engine_of(source.loop).ran[-1] == (5, 0)
    run_all(source.loop)
    assert source.done == [first, second]


def test_a_decode_step_comes_as_soon_as_one_is_due_and_no_earlier() -> None:
    source = Source(request("a", 5, max_tokens=50), request("b", 9), decode_interval_s=2.5)
    a, b = source.lent
    source.start(batch_of("a", a))
    while a.num_emitted < 2:
        source.loop.step()
    source.start(batch_of("b", b))
    engine_of(source.loop).ran.clear()
    engine_of(source.loop).inside = lambda layer: setattr(source.clock, "now_s", source.clock.now_s + 1.0)
    emitted = []
    for _ in range(5):
        source.loop.step()
        emitted.append(a.num_emitted)
    # Layers of a second each: after the third a decode is due, which is through its layers in one.
    assert emitted == [2, 2, 2, 3, 3]
    assert [layer for size, layer in engine_of(source.loop).ran if size == 9] == [0, 1, 2, 3]


def test_without_decodes_layers_follow_one_another() -> None:
    source = Source(request("a", 5), decode_interval_s=0.0)
    source.start(batch_of("a", *source.lent))
    for _ in range(NUM_LAYERS):
        source.loop.step()
    assert [layer for _, layer in engine_of(source.loop).ran] == list(range(NUM_LAYERS))


def test_a_batch_that_nobody_waits_for_is_dropped_between_two_layers() -> None:
    source = Source(request("a", 9), request("b", 5))
    a, b = source.lent
    pulled = source.start(batch_of("a", a))
    source.start(batch_of("b", b))
    source.work.step()
    source.loop.scheduler.cancel("a", 1)
    assert a.block_table, "the engine had it in hand"
    output = source.work.step()
    assert output is not None
    assert source.done == [pulled]
    assert a.block_table == []
    outputs = run_all(source.loop)
    assert [o.finish_reason for o in outputs if o.request_id == "a"] == ["cancelled"]
    assert tokens_of(o for o in outputs if o.request_id == "b") == {"b": expected(b)}
    assert source.loop.scheduler.pool.num_used == 0


def test_a_batch_cancelled_before_it_had_blocks_is_done_at_once() -> None:
    source = Source(request("a"))
    source.loop.scheduler.cancel("a", 1)
    pulled = source.pull(batch_of("a", *source.lent))
    source.work.start(pulled)
    source.work.step()
    assert source.done == [pulled]
    assert engine_of(source.loop).ran == []
    assert source.loop.num_requests == 0
    assert not source.work.ready


def test_one_cancelled_request_of_a_batch_does_not_stop_the_others() -> None:
    source = Source(request("a", 9), request("b", 5))
    source.start(batch_of("x", *source.lent))
    source.work.step()
    source.loop.scheduler.cancel("a", 1)
    outputs = run_all(source.loop)
    assert tokens_of(o for o in outputs if o.request_id == "b") == {"b": expected(source.lent[1])}
    assert source.loop.scheduler.pool.num_used == 0


@pytest.mark.parametrize(
    ("first_layer", "layer"), [(first, layer) for first in range(NUM_LAYERS) for layer in range(first, NUM_LAYERS)]
)
def test_a_batch_that_fails_is_computed_in_steps_and_only_the_guilty_request_ends(first_layer: int, layer: int) -> None:
    source = Source(request("a", 9), request("b", 5), request("c", 7))
    a, b, c = source.lent
    pulled = source.start(batch_of("x", a, b), first_layer)
    later = source.start(batch_of("y", c))
    engine_of(source.loop).fails_on, engine_of(source.loop).fails_at = b.prompt[0], layer
    outputs = run_all(source.loop)
    ended = {o.request_id: o.error for o in outputs if o.error is not None}
    assert list(ended) == ["b"]
    assert ended["b"].code == "request_failed"
    assert tokens_of(o for o in outputs if o.request_id != "b") == {s.request_id: expected(s) for s in (a, c)}
    assert source.done == [pulled, later]
    assert source.loop.scheduler.pool.num_used == source.loop.num_requests == 0


def test_a_batch_of_an_engine_that_is_broken_ends_with_it() -> None:
    source = Source(request("a", 9))
    source.start(batch_of("x", *source.lent))
    engine_of(source.loop).failure = PeerLost("gone")
    with pytest.raises(EngineBroken, match="gone"):
        run_all(source.loop)


def test_hidden_states_that_are_not_the_batchs_are_computed_again_and_give_no_other_tokens() -> None:
    source = Source(request("a", 9))
    wrong = source.pull(batch_of("x", request("z", 9)), 2)
    assert source.loop.scheduler.reservations.reserve(source.lent)
    pulled = SourceBatch(batch_of("x", *source.lent), 2, hidden=wrong.hidden)
    source.work.start(pulled)
    assert run_all(source.loop) == []
    source.work.kv_over(pulled, is_here=False)
    assert tokens_of(run_all(source.loop)) == {"a": expected(source.lent[0])}
    assert source.loop.scheduler.pool.num_used == 0


def test_it_is_free_when_no_prefill_is_unfinished_or_soon() -> None:
    source = Source(request("a", 9))
    assert source.work.is_free
    source.start(batch_of("a", *source.lent, layer_s=2.0))
    assert not source.work.is_free
    for _ in range(NUM_LAYERS - 1):
        source.loop.step()
    assert source.num_free == 0
    source.work.lead_s = 2.0
    assert source.work.is_free, "one layer of 2 s is left"
    source.loop.step()
    assert source.num_free == 1


def test_its_own_unfinished_prefill_keeps_it_from_pulling() -> None:
    clock = Clock()
    loop = make_loop(clock, prefill_chunk_tokens=2)
    free: list[bool] = []
    work = SourceStepper(
        loop, decode_interval_s=1.0, start_s=0.0, on_done=lambda _: None, on_free=lambda: free.append(True)
    )
    loop.add(request("own", 6))
    loop.step()
    loop.partial = work
    assert not work.is_free
    loop.step()
    assert free == []
    loop.step()
    assert free == [True], "told by the step that ends it"
    # Layers of its own prefill count as the source's.
    assert work.layers.total == 2 * NUM_LAYERS


def test_the_prefills_speed_is_measured_as_if_all_layers_had_run_here() -> None:
    source = Source(request("a", 10))
    source.start(batch_of("a", *source.lent), 2)
    engine_of(source.loop).inside = lambda layer: setattr(source.clock, "now_s", source.clock.now_s + 1.0)
    assert source.loop.prefill_token_s == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", source.clock)
        source.loop.step()
        source.loop.step()
    # Two of four layers, a second each, for ten tokens.
    assert source.loop.prefill_token_s == pytest.approx(4.0 / 10)


def test_time_in_the_queue_ends_where_the_batch_begins_here() -> None:
    source = Source(request("a"))
    source.start(batch_of("a", *source.lent))
    assert source.lent[0].first_scheduled_s is not None
    outputs = run_all(source.loop)
    assert outputs[0].queued_s is not None
