"""The contract of batches that move between two engines half-way: the same cases for every engine."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from services.worker.engine.base import Engine
from services.worker.engine.forward_batch import ForwardBatch
from shared.errors import BadRequest
from tests.checkpoints import KINDS
from tests.services.worker.engine.batches import forward, slice_of
from tests.services.worker.engine.harness import prompt_of
from tests.services.worker.engine.movers import (
    NUM_LAYERS,
    alone,
    batch_of,
    decode,
    import_by_layer,
    import_whole,
    maker,
    run_in_parts,
    run_part,
    run_whole,
    sample,
    sequences_of,
    take_over,
)

ENGINES = ("mock", *KINDS)
NUM_STEPS = 12

each_engine = pytest.mark.parametrize("kind", ENGINES)


def same_logits(logits: object, expected: object) -> None:
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    else:
        assert logits == expected


@each_engine
@pytest.mark.parametrize("num_layers", range(NUM_LAYERS))
@pytest.mark.parametrize("lengths", [(37,), (16, 5, 50)], ids=str)
@pytest.mark.parametrize("block_sizes", [(16, 16), (8, 16), (16, 5)], ids=str)
def test_a_split_batch_and_its_next_tokens_are_those_of_one_engine(
    kind: str, num_layers: int, lengths: tuple[int, ...], block_sizes: tuple[int, int]
) -> None:
    expected, (first_logits, *later_logits) = alone(kind, lengths, 1 + NUM_STEPS)
    giver, taker = (maker(kind)(block_size=size) for size in block_sizes)
    moved = run_part(giver, sequences_of(giver, lengths, backwards=True), num_layers)
    taken = sequences_of(taker, lengths)
    same_logits(sample(taker, taken, take_over(taker, taken, moved)), first_logits)
    for logits, wanted in zip(decode(taker, taken, NUM_STEPS), later_logits, strict=True):
        same_logits(logits, wanted)
    assert [s.tokens for s in taken] == expected


@each_engine
def test_a_batch_may_move_twice(kind: str) -> None:
    first, second, third = (maker(kind)(block_size=size) for size in (16, 8, 4))
    lengths = (21, 9)
    expected = sequences_of(first, lengths)
    decoded = decode(first, expected, NUM_STEPS)

    moved = run_part(first, sequences_of(first, lengths), 1)
    at_second = sequences_of(second, lengths, backwards=True)
    activation = second.resume(batch_of(at_second), moved.hidden, next_layer=1)
    import_whole(second, at_second, moved)
    second.run_layers(activation, 1, 3).result()
    moved.hidden, moved.num_layers = second.hidden_states(activation).result(), 3
    moved.kv = second.export_kv([s.blocks for s in at_second], lengths, 3).result()

    taken = sequences_of(third, lengths)
    same_logits(sample(third, taken, take_over(third, taken, moved)), decoded[0])
    decode(third, taken, NUM_STEPS - 1)
    assert [s.tokens for s in taken] == [s.tokens for s in expected]


@each_engine
@pytest.mark.parametrize("num_layers", range(1, NUM_LAYERS))
@pytest.mark.parametrize("kv_after", range(NUM_LAYERS))
def test_kv_may_come_while_later_layers_run(kind: str, num_layers: int, kv_after: int) -> None:
    giver, taker = (maker(kind)(block_size=size) for size in (16, 8))
    lengths = (21, 9)
    expected, decoded = alone(kind, lengths, NUM_STEPS)

    moved = run_part(giver, sequences_of(giver, lengths), num_layers)
    taken = sequences_of(taker, lengths, backwards=True)
    same_logits(sample(taker, taken, take_over(taker, taken, moved, kv_after=kv_after)), decoded[0])
    for logits, wanted in zip(decode(taker, taken, NUM_STEPS - 1), decoded[1:], strict=True):
        same_logits(logits, wanted)
    assert [s.tokens for s in taken] == expected


@each_engine
def test_another_thread_imports_while_later_layers_and_other_batches_run(kind: str) -> None:
    giver, taker = maker(kind)(num_blocks=128), maker(kind)(num_blocks=128)
    lengths = (150, 40, 33)
    expected = sequences_of(giver, lengths)
    first, *others = sequences_of(taker, lengths)
    decode(giver, expected, NUM_STEPS)
    moved = run_part(giver, sequences_of(giver, lengths)[:1], 3)
    activation = taker.resume(batch_of([first]), moved.hidden, next_layer=3)
    failures: list[Exception] = []

    def bring() -> None:
        try:
            import_by_layer(taker, [first], moved)
        except Exception as error:  # noqa: BLE001 - of another thread: whatever it is, the test shows it
            failures.append(error)

    thread = threading.Thread(target=bring)
    thread.start()
    decode(taker, others, 3)
    taker.run_layers(activation, 3, NUM_LAYERS).result()
    thread.join()
    assert not failures
    sample(taker, [first], activation)
    decode(taker, [first], NUM_STEPS - 1)
    decode(taker, others, NUM_STEPS - 3)
    assert [s.tokens for s in (first, *others)] == [s.tokens for s in expected]


@each_engine
@pytest.mark.parametrize("part_tokens", [3, 7, 16, 60, 100])
@pytest.mark.parametrize("num_layers", [0, 2])
def test_a_batch_run_in_parts_is_that_batch(kind: str, part_tokens: int, num_layers: int) -> None:
    giver, taker = (maker(kind)() for _ in range(2))
    lengths = (37, 5, 19)
    expected, decoded = alone(kind, lengths, NUM_STEPS)

    moved = run_part(giver, sequences_of(giver, lengths), num_layers, part_tokens=part_tokens)
    taken = sequences_of(taker, lengths, backwards=True)
    activation = taker.resume(batch_of(taken), moved.hidden, next_layer=num_layers)
    run_in_parts(taker, activation, num_layers, part_tokens)
    import_by_layer(taker, taken, moved)
    same_logits(sample(taker, taken, activation), decoded[0])
    for logits, wanted in zip(decode(taker, taken, NUM_STEPS - 1), decoded[1:], strict=True):
        same_logits(logits, wanted)
    assert [s.tokens for s in taken] == expected


@each_engine
def test_other_batches_run_between_two_parts(kind: str) -> None:
    alone, engine = maker(kind)(), maker(kind)()
    expected = sequences_of(alone, (40, 9))
    decode(alone, expected, NUM_STEPS)
    long, short = sequences_of(engine, (40, 9))
    activation = engine.embed(batch_of([long]))
    for layer in range(NUM_LAYERS):
        engine.run_part(activation, layer, 0, 15).result()
        decode(engine, [short], 1)
        engine.run_part(activation, layer, 15, 40).result()
        decode(engine, [short], 1)
    sample(engine, [long], activation)
    decode(engine, [long], NUM_STEPS - 1)
    decode(engine, [short], NUM_STEPS - 2 * NUM_LAYERS)
    assert [s.tokens for s in (long, short)] == [s.tokens for s in expected]


@each_engine
def test_parts_out_of_order_are_refused_and_so_is_what_needs_a_whole_layer(kind: str) -> None:
    engine = maker(kind)()
    activation = engine.embed(batch_of(sequences_of(engine, (20,))))
    for layer, begin, end in ((0, 1, 5), (1, 0, 5), (0, 0, 21), (0, 0, 0)):
        with pytest.raises(BadRequest, match=f"tokens {begin}..{end} of layer {layer}"):
            engine.run_part(activation, layer, begin, end).result()
    engine.run_part(activation, 0, 0, 5).result()
    for layer, begin, end in ((0, 0, 5), (0, 6, 20), (1, 5, 20)):
        with pytest.raises(BadRequest, match=f"tokens {begin}..{end} of layer {layer}"):
            engine.run_part(activation, layer, begin, end).result()
    with pytest.raises(BadRequest, match="inside layer 0"):
        engine.hidden_states(activation).result()
    with pytest.raises((BadRequest, ValueError), match=r"layers 0\.\.1"):
        engine.run_layers(activation, 0, 1).result()
    engine.run_part(activation, 0, 5, 20).result()
    engine.hidden_states(activation).result()
    engine.run_layers(activation, 1, NUM_LAYERS).result()
    with pytest.raises(BadRequest, match=f"of layer {NUM_LAYERS}:"):
        engine.run_part(activation, NUM_LAYERS, 0, 1).result()


@each_engine
def test_embedded_tokens_resumed_at_layer_0_are_an_embedded_batch(kind: str) -> None:
    source, target = maker(kind)(), maker(kind)()
    lengths = (7, 20)
    expected, sequences = sequences_of(source, lengths), sequences_of(target, lengths, backwards=True)
    logits = decode(source, expected, NUM_STEPS)
    # The source embeds each request on its own: rows follow one another.
    hidden = np.concatenate([source.embed_tokens(s.tokens).result() for s in sequences])
    resumed = target.resume(batch_of(sequences), hidden, next_layer=0)
    target.run_layers(resumed, 0, NUM_LAYERS).result()
    same_logits(sample(target, sequences, resumed), logits[0])
    decode(target, sequences, NUM_STEPS - 1)
    assert [s.tokens for s in sequences] == [s.tokens for s in expected]


@each_engine
def test_sizes_are_those_that_the_engine_says(kind: str) -> None:
    engine = maker(kind)()
    sequences = sequences_of(engine, (7, 20))
    moved = run_part(engine, sequences, 3)
    for hidden in (moved.hidden, engine.embed_tokens(prompt_of(27)).result()):
        assert hidden.dtype == np.uint8
        assert hidden.shape == (27 * engine.hidden_bytes_per_token,)
    assert moved.kv.dtype == np.uint8
    assert moved.kv.shape == (3 * 27 * engine.kv_bytes_per_token_layer,)
    assert engine.export_kv([s.blocks for s in sequences], (7, 20), 0).result().shape == (0,)


@each_engine
@pytest.mark.parametrize("form", ["read-only", "unaligned", "memoryview"])
def test_any_memory_can_be_taken_over(kind: str, form: str) -> None:
    engine = maker(kind)()
    (expected,) = sequences_of(engine, (20,))
    decode(engine, [expected], 3)
    moved = run_part(engine, sequences_of(engine, (20,)), 2)
    before = moved.hidden.tobytes(), moved.kv.tobytes()
    moved.hidden, moved.kv = (_content(copy, form) for copy in before)
    given = moved.hidden, moved.kv
    taken = sequences_of(engine, (20,), backwards=True)
    sample(engine, taken, take_over(engine, taken, moved))
    decode(engine, taken, 2)
    assert taken[0].tokens == expected.tokens
    assert bytes(given[1]) == before[1]
    if form == "read-only":
        assert given[0].tobytes() == before[0]


def _content(content: bytes, form: str) -> object:
    if form == "read-only":
        fixed = np.frombuffer(content, dtype=np.uint8).copy()
        fixed.flags.writeable = False
        return fixed
    if form == "unaligned":
        return np.frombuffer(b"\0" + content, dtype=np.uint8).copy()[1:]
    return memoryview(bytearray(content))


@each_engine
def test_exports_are_copies_that_later_layers_do_not_change(kind: str) -> None:
    engine = maker(kind)()
    sequences = sequences_of(engine, (20,))
    activation = engine.embed(batch_of(sequences))
    engine.run_layers(activation, 0, 2).result()
    hidden = engine.hidden_states(activation).result()
    kv = engine.export_kv([sequences[0].blocks], [20], 2).result()
    before = hidden.copy(), kv.copy()
    engine.run_layers(activation, 2, 3).result()
    assert not np.array_equal(engine.hidden_states(activation).result(), hidden)
    run_whole(engine, [sequences_of(engine, (20, 20))[0]])
    assert np.array_equal(hidden, before[0])
    assert np.array_equal(kv, before[1])


@each_engine
def test_another_thread_exports_one_batch_while_others_run(kind: str) -> None:
    engine = maker(kind)(num_blocks=128)
    kept, *others = sequences_of(engine, (150, 40, 33, 20))
    activation = engine.embed(batch_of([kept]))
    engine.run_layers(activation, 0, 3).result()
    expected = (
        engine.hidden_states(activation).result().copy(),
        engine.export_kv([kept.blocks], [150], 3).result().copy(),
    )
    wrong: list[int] = []
    done = threading.Event()

    def export() -> None:
        while not done.is_set():
            found = engine.hidden_states(activation).result(), engine.export_kv([kept.blocks], [150], 3).result()
            wrong.extend(i for i in range(2) if not np.array_equal(found[i], expected[i]))
            engine.embed_tokens(kept.tokens).result()

    thread = threading.Thread(target=export)
    thread.start()
    try:
        decode(engine, others, 10)
    finally:
        done.set()
        thread.join()
    assert not wrong
    alone = maker(kind)(num_blocks=128)
    undisturbed = sequences_of(alone, (150, 40, 33, 20))[1:]
    decode(alone, undisturbed, 10)
    assert [s.tokens for s in undisturbed] == [s.tokens for s in others]


def begun(engine: Engine) -> ForwardBatch:
    """A batch of 20 tokens and one of 3, in blocks that hold them."""
    return batch_of(sequences_of(engine, (20, 3)))


@each_engine
@pytest.mark.parametrize("next_layer", [-1, NUM_LAYERS, NUM_LAYERS + 1])
def test_a_layer_that_no_batch_can_be_resumed_at_is_refused(kind: str, next_layer: int) -> None:
    engine = maker(kind)()
    batch = begun(engine)
    hidden = engine.hidden_states(engine.embed(batch)).result()
    with pytest.raises(BadRequest, match=f"resumed at layer {next_layer} of {NUM_LAYERS}"):
        engine.resume(batch, hidden, next_layer=next_layer).result()


@each_engine
def test_hidden_states_of_another_size_and_batches_without_room_are_refused(kind: str) -> None:
    engine = maker(kind)()
    batch = begun(engine)
    hidden = engine.hidden_states(engine.embed(batch)).result()
    for wrong in (hidden[:-1], np.append(hidden, hidden[:1]), hidden[: engine.hidden_bytes_per_token], hidden[:0]):
        with pytest.raises(BadRequest, match="hidden states"):
            engine.resume(batch, wrong, next_layer=0).result()
    with pytest.raises(BadRequest, match="without slices"):
        engine.resume(forward(), hidden[:0], next_layer=0).result()
    first, second = batch.slices
    short = slice_of(9, prompt_of(20), 0, first.block_table[:1])
    with pytest.raises(BadRequest, match="sequence 9: 20 tokens up to position 20 in 1 blocks"):
        engine.resume(forward(short, second), hidden, next_layer=0).result()


@each_engine
@pytest.mark.parametrize("token", [-1, 264])
def test_an_unknown_token_is_not_embedded(kind: str, token: int) -> None:
    with pytest.raises(BadRequest, match="vocabulary of 264"):
        maker(kind)().embed_tokens([1, token]).result()


@each_engine
def test_hidden_states_are_gone_after_the_last_layer(kind: str) -> None:
    engine = maker(kind)()
    with pytest.raises(BadRequest, match=f"all {NUM_LAYERS} layers"):
        engine.hidden_states(run_whole(engine, sequences_of(engine, (20, 3)))).result()


@each_engine
@pytest.mark.parametrize(
    ("tables", "lengths", "num_layers", "message"),
    [
        ([(1, 2)], [33], 1, "33 tokens in 2 blocks of 16"),
        ([(1, 2), (3,)], [20], 1, "2 block tables for 1"),
        ([(1, 64)], [20], 1, "of a pool of 64"),
        ([(1, 2)], [20], NUM_LAYERS + 1, rf"layers 0\.\.{NUM_LAYERS + 1} of a model of {NUM_LAYERS}"),
        ([(1, 2)], [20], -1, r"KV of layers 0\.\.-1"),
    ],
)
def test_kv_that_is_not_there_is_neither_exported_nor_imported(
    kind: str, tables: list[tuple[int, ...]], lengths: list[int], num_layers: int, message: str
) -> None:
    engine = maker(kind)()
    with pytest.raises(BadRequest, match=message):
        engine.export_kv(tables, lengths, num_layers).result()
    kv = np.zeros(max(0, num_layers) * sum(lengths) * engine.kv_bytes_per_token_layer, dtype=np.uint8)
    with pytest.raises(BadRequest, match=message):
        engine.import_kv(tables, lengths, num_layers, kv).result()


@each_engine
@pytest.mark.parametrize("excess", [-1, 1])
def test_kv_of_another_size_is_refused(kind: str, excess: int) -> None:
    engine = maker(kind)()
    kv = np.zeros(2 * 20 * engine.kv_bytes_per_token_layer + excess, dtype=np.uint8)
    with pytest.raises(BadRequest, match="KV"):
        engine.import_kv([(1, 2)], [20], 2, kv).result()
