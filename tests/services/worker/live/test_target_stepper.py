"""The target's engine in a pair: layers as the queue says, and every block freed whatever happens."""

from __future__ import annotations

import pytest

from services.worker.core.live import target_words as core
from services.worker.core.live.machine import EngineStopped, HasLanded, Lost, RefuseQuestion, TellEnded
from shared.messages.generation import StreamPart
from shared.messages.live import Pull, Pulled, Settle
from shared.zigzag.batch import State
from tests.services.worker.live.alone import Source, Target
from tests.services.worker.live.members import NUM_LAYERS, batch_of, expected, make_loop, request, run_all, tokens_of

PULL = Pull(pair_id="pair", claim_id="claim", serial=0, wait_s=0.0)


async def test_layers_are_run_in_the_queues_order_as_they_are_loaded() -> None:
    target = Target()
    target.take("a", request("a", 5))
    target.take("b", request("b", 9))
    run_all(target.loop)
    assert target.watched.ran == []
    target.load(1)
    run_all(target.loop)
    target.load(2)
    run_all(target.loop)
    assert target.watched.ran == [(5, 0), (9, 0), (5, 1), (9, 1)]
    assert target.work.layers.total == 4


async def test_each_step_is_one_layer_and_nothing_to_run_is_no_work() -> None:
    target = Target()
    assert not target.work.ready
    target.take("a", request("a", 5))
    target.load(2)
    assert target.work.ready
    for count in (1, 2):
        target.loop.step()
        assert len(target.watched.ran) == count
    assert target.loop.step() is None
    assert not target.work.ready
    assert not target.loop.has_work, "the engine's thread sleeps until the queue changes"


async def test_with_all_layers_it_finishes_batches_and_their_requests_decode_here() -> None:
    target = Target()
    a, b = request("a", 5), request("b", 9)
    target.take("x", a, b)
    assert (target.loop.num_requests, target.loop.scheduler.num_requests) == (2, 0)
    target.load(NUM_LAYERS)
    outputs: list[StreamPart] = []
    for _ in range(NUM_LAYERS):
        step = target.loop.step()
        assert step is not None
        outputs += step.outputs
    assert target.finished == ["x"]
    assert target.machine.queue.batch("x").state is State.FINISHED
    assert not target.machine.holds("x")
    assert (target.loop.num_requests, target.loop.scheduler.num_requests) == (2, 2)
    outputs += run_all(target.loop)
    assert tokens_of(outputs) == {"a": expected(a), "b": expected(b)}
    assert target.is_empty


@pytest.mark.parametrize("num_layers", range(NUM_LAYERS))
async def test_what_the_source_has_is_free_and_not_run_and_the_others_go_on(num_layers: int) -> None:
    target = Target()
    b = request("b", 9)
    batch = target.take("a", request("a", 5))
    target.take("b", b)
    target.load(num_layers)
    run_all(target.loop)
    answer = target.ask(PULL)
    assert isinstance(answer, Pulled)
    assert (answer.batch_id, answer.first_layer) == ("a", num_layers)
    assert batch.kv(0, 1).tables[0], "its KV is still to be sent"
    target.ask(Settle(pair_id="pair", claim_ids=("claim",)))
    assert batch.kv(0, 1).tables == ((),)
    target.load(NUM_LAYERS)
    assert tokens_of(run_all(target.loop)) == {"b": expected(b)}
    assert [layer for size, layer in target.watched.ran if size == 5] == list(range(num_layers))
    assert target.is_empty


async def test_what_the_source_has_claimed_is_not_run_here() -> None:
    target = Target()
    target.take("a", request("a", 5))
    target.ask(PULL)
    target.load(NUM_LAYERS)
    run_all(target.loop)
    assert target.watched.ran == []


async def test_the_engine_gets_whole_prefixes_in_the_blocks_that_were_reserved() -> None:
    a, b = request("a", 5), request("b", 3, output=(7, 8))
    loop, batch = make_loop(), batch_of("x", a, b)
    loop.scheduler.reservations.reserve(batch.sequences)
    slices = loop.batches.of_prompts(batch.sequences).slices
    assert [(s.sequence_id, s.token_ids, s.start, s.row and s.row.position) for s in slices] == [
        (0, tuple(a.prompt), 0, 0),
        (1, (*b.prompt, 7, 8), 0, 2),
    ]
    tables = [list(s.block_table) for s in slices]
    assert tables == [a.block_table, b.block_table] == [list(table) for table in batch.kv(0, 1).tables]
    assert batch.sequences == (a, b), "they are sampled in this order"
    assert [tuple(s.output) for s in batch.sequences] == [(), (7, 8)]


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
async def test_a_batch_cancelled_inside_a_layer_is_freed_at_its_end(layer: int) -> None:
    target = Target()
    a, b = request("a", 5), request("b", 9)
    target.take("a", a)

    def cancel(at: int) -> None:
        if at == layer and not a.finished:
            target.work.cancel(*a.key)
            assert a.finished
            assert target.machine.queue.batch("a").in_layer
            assert a.block_table

    target.load(NUM_LAYERS)
    target.watched.inside = cancel
    assert run_all(target.loop) == []
    assert target.finished == []
    assert target.watched.ran == [(5, i) for i in range(layer + 1)]
    assert target.is_empty
    target.take("b", b)
    assert tokens_of(run_all(target.loop)) == {"b": expected(b)}


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
async def test_one_cancelled_request_does_not_stop_the_rest_of_its_batch(layer: int) -> None:
    target = Target()
    a, b = request("a", 5), request("b", 9)
    target.take("x", a, b)

    def cancel(at: int) -> None:
        if at == layer and not a.finished:
            target.work.cancel(*a.key)

    target.watched.inside = cancel
    target.load(NUM_LAYERS)
    assert tokens_of(run_all(target.loop)) == {"b": expected(b)}
    assert target.is_empty


@pytest.mark.parametrize("layers_ready", range(NUM_LAYERS))
async def test_the_end_frees_everything_and_runs_nothing_more(layers_ready: int) -> None:
    target = Target()
    target.take("a", request("a", 5), request("c", 3))
    target.take("b", request("b", 9))
    target.load(layers_ready)
    run_all(target.loop)
    target.ask(PULL)
    ran = len(target.watched.ran)
    target.lose()
    assert target.is_empty
    target.work.lose("and lost again")
    assert len(target.all_said(core.AwaitStepEnd)) == 1
    assert [i for action in target.all_said(core.Forget) for i in action.batch_ids] == ["a", "b"]
    target.load(NUM_LAYERS)
    assert not target.work.ready
    assert target.loop.step() is None
    assert run_all(target.loop) == []
    assert len(target.watched.ran) == ran
    assert target.loop.partial is None


async def test_a_source_that_ended_the_pair_is_not_told_though_it_is_lost_before_the_step_ends() -> None:
    target = Target()
    target.take("a", request("a", 5))
    target.work.handle(Lost("the source ended the pair", tell=False))
    target.work.lose("the source was silent")
    target.work.handle(HasLanded(core.AwaitStepEnd()))
    assert target.all_said(TellEnded) == []
    assert target.is_empty


async def test_when_its_engine_has_stopped_the_source_is_told_once() -> None:
    target = Target()
    target.take("a", request("a", 5))
    for _ in range(2):  # it hears so of each thing that it wants done there
        target.work.handle(EngineStopped())
    assert [ended.reason for ended in target.all_said(TellEnded)] == ["the engine has stopped"]
    assert [action.batch_ids for action in target.all_said(core.Forget)] == [("a",)]


async def test_the_end_leaves_what_has_become_this_instances() -> None:
    target = Target()
    a = request("a", 5)
    target.take("a", a)
    target.load(NUM_LAYERS)
    outputs = [o for _ in range(NUM_LAYERS) for o in (target.loop.step() or ()).outputs]  # type: ignore[union-attr]
    target.lose()
    assert [(ended.reason, ended.finished) for ended in target.all_said(TellEnded)] == [("the source is lost", ("a",))]
    assert tokens_of([*outputs, *run_all(target.loop)]) == {"a": expected(a)}


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
async def test_an_engine_error_is_told_and_everything_freed(layer: int) -> None:
    target = Target()
    target.take("a", request("a", 5))
    target.take("b", request("b", 9))
    target.watched.failure, target.watched.fails_at = RuntimeError("cuda"), layer
    target.load(NUM_LAYERS)
    assert run_all(target.loop) == []
    assert not target.work.ready
    target.take("c", request("c", 9))  # a hand-over, before the source has heard of the error
    assert [refusal.error.code for refusal in target.all_said(RefuseQuestion)] == ["conflict"]
    assert run_all(target.loop) == []
    target.work.handle(HasLanded(core.AwaitStepEnd()))
    assert target.finished == []
    assert [ended.reason for ended in target.all_said(TellEnded)] == ["the target's engine failed: RuntimeError: cuda"]
    assert target.is_empty


async def test_hidden_states_and_kv_of_what_was_run_can_be_given_away() -> None:
    target, source = Target(), Source(request("a", 5))
    target.take("pair-0", request("a", 5))
    target.load(2)
    run_all(target.loop)
    source.start(2, there=target)
    assert tokens_of(run_all(source.loop)) == {"a": expected(source.lent[0])}
