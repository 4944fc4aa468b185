"""The target's engine in a pair: layers as the queue says, and every block freed whatever happens."""

from __future__ import annotations

import pytest

from services.worker.core.pairing.batch import PromptBatch
from services.worker.core.pairing.target_work import TargetWork
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.live.steppers import TargetBatch, TargetStepper
from shared.messages.generation import StreamPart
from shared.zigzag.batch import State
from shared.zigzag.queue import Claim
from tests.services.worker.live.members import (
    NUM_LAYERS,
    assignment,
    batch_of,
    engine_of,
    expected,
    make_loop,
    request,
    run_all,
    tokens_of,
)


class Target:
    """A loop, a queue, and its work."""

    def __init__(self, **changes: int) -> None:
        self.loop = make_loop(**changes)
        part_tokens = self.loop.scheduler.config.prefill_chunk_tokens
        self.work: TargetWork[TargetBatch] = TargetWork(NUM_LAYERS, part_tokens, assignment())
        self.queue = self.work.queue
        self.num_layers_ended = 0
        self.finished: list[PromptBatch] = []
        self.broken: list[Exception] = []
        self.stepper = TargetStepper(
            self.loop,
            self.work,
            decode_interval_s=1e9,
            start_s=0.0,
            on_layer=self._layer,
            on_finished=self.finished.append,
            on_broken=self.broken.append,
        )
        self.loop.partial = self.stepper

    def _layer(self) -> None:
        self.num_layers_ended += 1

    def take(self, batch_id: str, *sequences: ActiveSequence) -> PromptBatch:
        """A batch is handed over."""
        batch = batch_of(batch_id, *sequences)
        assert self.loop.scheduler.reservations.reserve(sequences)
        with self.stepper.lock:
            self.work.add(
                TargetBatch(batch, hidden=self.loop.engine.embed_tokens(batch.token_ids()).result()), behind_seal=False
            )
            self.queue.arrived(batch_id)
            self.stepper.changed()
        return batch

    def load(self, layers_ready: int) -> None:
        """So many layers are there."""
        with self.stepper.lock:
            self.queue.set_layers_ready(layers_ready)
            self.stepper.changed()

    def ran(self) -> list[tuple[int, int]]:
        return engine_of(self.loop).ran

    def is_empty(self) -> bool:
        return not self.work.batches and self.loop.scheduler.pool.num_used == 0 and self.loop.num_requests == 0


def test_layers_are_run_in_the_queues_order_as_they_are_loaded() -> None:
    target = Target()
    target.take("a", request("a", 5))
    target.take("b", request("b", 9))
    run_all(target.loop)
    assert target.ran() == []
    target.load(1)
    run_all(target.loop)
    target.load(2)
    run_all(target.loop)
    assert target.ran() == [(5, 0), (9, 0), (5, 1), (9, 1)]
    assert target.num_layers_ended == target.stepper.layers.total == 4


def test_each_step_is_one_layer_and_nothing_to_run_is_no_work() -> None:
    target = Target()
    assert not target.stepper.ready
    target.take("a", request("a", 5))
    target.load(2)
    assert target.stepper.ready
    for count in (1, 2):
        target.loop.step()
        assert len(target.ran()) == count
    assert target.stepper.step() is None
    assert not target.stepper.ready
    assert not target.loop.has_work, "the engine's thread sleeps until the queue changes"


def test_with_all_layers_it_finishes_batches_and_their_requests_decode_here() -> None:
    target = Target()
    a, b = request("a", 5), request("b", 9)
    batch = target.take("x", a, b)
    assert (target.loop.num_requests, target.loop.scheduler.num_requests) == (2, 0)
    target.load(NUM_LAYERS)
    outputs: list[StreamPart] = []
    for _ in range(NUM_LAYERS):
        step = target.loop.step()
        assert step is not None
        outputs += step.outputs
    assert target.finished == [batch]
    assert target.queue.batch("x").state is State.FINISHED
    assert target.work.batches == {}
    assert (target.loop.num_requests, target.loop.scheduler.num_requests) == (2, 2)
    outputs += run_all(target.loop)
    assert tokens_of(outputs) == {"a": expected(a), "b": expected(b)}
    assert target.is_empty()


@pytest.mark.parametrize("num_layers", range(NUM_LAYERS))
def test_what_is_dropped_is_free_and_the_others_go_on(num_layers: int) -> None:
    target = Target()
    b = request("b", 9)
    batch = target.take("a", request("a", 5))
    target.take("b", b)
    target.load(num_layers)
    run_all(target.loop)
    claim = target.queue.pull("claim")
    assert isinstance(claim, Claim)
    assert (claim.batch_id, claim.first_layer) == ("a", num_layers)
    assert batch.block_tables[0], "its KV is still to be sent"
    target.queue.confirm("claim")
    assert target.stepper.drop(("a", "unknown")) == [batch]
    assert target.stepper.drop(("a",)) == []
    assert batch.sequences[0].block_table == []
    target.load(NUM_LAYERS)
    assert tokens_of(run_all(target.loop)) == {"b": expected(b)}
    assert target.is_empty()


def test_what_the_source_has_claimed_is_not_run_here() -> None:
    target = Target()
    target.take("a", request("a", 5))
    target.queue.pull("claim")
    target.load(NUM_LAYERS)
    run_all(target.loop)
    assert target.ran() == []


def test_the_engine_gets_whole_prefixes_in_the_blocks_that_were_reserved() -> None:
    a, b = request("a", 5), request("b", 3, output=(7, 8))
    loop, batch = make_loop(), batch_of("x", a, b)
    loop.scheduler.reservations.reserve(batch.sequences)
    slices = loop.batches.of_prompts(batch.sequences).slices
    assert [(s.sequence_id, s.token_ids, s.start, s.row and s.row.position) for s in slices] == [
        (0, tuple(a.prompt), 0, 0),
        (1, (*b.prompt, 7, 8), 0, 2),
    ]
    tables = [list(s.block_table) for s in slices]
    assert tables == [a.block_table, b.block_table] == list(batch.block_tables)
    assert batch.sequences == (a, b), "they are sampled in this order"
    assert [tuple(s.output) for s in batch.sequences] == [(), (7, 8)]


def test_hidden_states_and_kv_of_what_was_run_can_be_given_away() -> None:
    target = Target()
    batch = target.take("a", request("a", 5))
    target.load(2)
    run_all(target.loop)
    held, source = target.work.batches["a"], make_loop()
    hidden = target.loop.engine.hidden_states(held.activation).result()
    kv = target.loop.engine.export_kv(batch.block_tables, batch.lengths, 2).result()
    there = batch_of("a", request("a", 5))
    source.scheduler.reservations.reserve(there.sequences)
    source.engine.import_kv(there.block_tables, there.lengths, 2, kv).result()
    activation = source.engine.resume(source.batches.of_prompts(there.sequences), hidden, next_layer=2).result()
    source.engine.run_layers(activation, 2, NUM_LAYERS).result()
    (sampled,) = source.engine.sample(activation).result()
    assert sampled.token_id == expected(there.sequences[0])[0]


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_batch_cancelled_inside_a_layer_is_freed_at_its_end(layer: int) -> None:
    target = Target()
    a, b = request("a", 5), request("b", 9)
    target.take("a", a)

    def cancel(at: int) -> None:
        if at == layer and not a.finished:
            a.finished = True
            with target.stepper.lock:
                target.queue.cancel("a")
                assert target.queue.batch("a").in_layer

    target.load(NUM_LAYERS)
    engine_of(target.loop).inside = cancel
    outputs = run_all(target.loop)
    assert outputs == []
    assert target.finished == []
    assert target.ran() == [(5, i) for i in range(layer + 1)]
    assert target.num_layers_ended == layer + 1, "who waits for room is told"
    assert target.is_empty()
    target.take("b", b)
    assert tokens_of(run_all(target.loop)) == {"b": expected(b)}


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_one_cancelled_request_does_not_stop_the_rest_of_its_batch(layer: int) -> None:
    target = Target()
    a, b = request("a", 5), request("b", 9)
    target.take("x", a, b)

    def cancel(at: int) -> None:
        a.finished = a.finished or at == layer

    engine_of(target.loop).inside = cancel
    target.load(NUM_LAYERS)
    assert tokens_of(run_all(target.loop)) == {"b": expected(b)}
    assert target.is_empty()


@pytest.mark.parametrize("layers_ready", range(NUM_LAYERS))
def test_closing_frees_everything_and_runs_nothing_more(layers_ready: int) -> None:
    target = Target()
    batches = [target.take("a", request("a", 5), request("c", 3)), target.take("b", request("b", 9))]
    target.load(layers_ready)
    run_all(target.loop)
    target.queue.pull("claim")
    ran = len(target.ran())
    assert target.stepper.close() == batches
    assert target.is_empty()
    target.load(NUM_LAYERS)
    assert not target.stepper.ready
    assert target.stepper.step() is None
    assert run_all(target.loop) == []
    assert len(target.ran()) == ran
    assert target.stepper.close() == []


def test_closing_leaves_what_has_become_this_instances() -> None:
    target = Target()
    a = request("a", 5)
    target.take("a", a)
    target.load(NUM_LAYERS)
    outputs = [o for _ in range(NUM_LAYERS) for o in (target.loop.step() or ()).outputs]  # type: ignore[union-attr]
    assert target.stepper.close() == []
    assert tokens_of([*outputs, *run_all(target.loop)]) == {"a": expected(a)}


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_an_engine_error_is_told_and_closing_frees_everything(layer: int) -> None:
    target = Target()
    target.take("a", request("a", 5))
    target.take("b", request("b", 9))
    engine = engine_of(target.loop)
    engine.failure, engine.fails_at = RuntimeError("cuda"), layer
    target.load(NUM_LAYERS)
    assert run_all(target.loop) == []
    assert target.broken == [engine.failure]
    assert not target.stepper.ready
    assert target.finished == []
    target.stepper.close()
    assert target.is_empty()
    target.loop.scheduler.check()


def test_after_an_engine_error_it_runs_nothing_though_the_queue_changes() -> None:
    target = Target()
    target.take("a", request("a", 5))
    engine = engine_of(target.loop)
    engine.failure = RuntimeError("cuda")
    target.load(1)
    run_all(target.loop)
    assert target.broken == [engine.failure]
    target.take("b", request("b", 9))  # a hand-over, before the event loop has heard of the error
    assert run_all(target.loop) == []
