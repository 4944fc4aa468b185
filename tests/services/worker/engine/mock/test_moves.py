"""What the mock notices of batches that two engines mix up, and what moving costs."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.mock.settings import MockTiming
from services.worker.engine.mock.tokens import next_token
from tests.services.worker.engine.harness import DrivenSequence, prompt_of
from tests.services.worker.engine.movers import (
    Moved,
    batch_of,
    decode,
    mock_engine,
    run_part,
    run_whole,
    sample,
    sequences_of,
    take_over,
)

LENGTHS = (20, 20, 5)
TOTAL = sum(LENGTHS)


@pytest.fixture
def moved() -> Moved:
    """Three prompts after two layers elsewhere."""
    engine = mock_engine(block_size=8)
    return run_part(engine, sequences_of(engine, LENGTHS), 2)


def layers_of(moved: Moved) -> np.ndarray:
    """``[num_layers, 2, tokens, bytes]``, writable."""
    return moved.kv.reshape(moved.num_layers, 2, TOTAL, -1)


def test_hidden_states_of_another_layer_are_noticed(moved: Moved) -> None:
    engine = mock_engine()
    with pytest.raises(RuntimeError, match="resumed at layer 1: row 0 of the hidden states"):
        engine.resume(batch_of(sequences_of(engine, LENGTHS)), moved.hidden, next_layer=1).result()


@pytest.mark.parametrize("content", [0, 255])
def test_hidden_states_that_never_came_are_noticed(content: int, moved: Moved) -> None:
    engine = mock_engine()
    moved.hidden[15 * engine.hidden_bytes_per_token :] = content
    with pytest.raises(RuntimeError, match="row 15 of the hidden states"):
        engine.resume(batch_of(sequences_of(engine, LENGTHS)), moved.hidden, next_layer=2).result()


def test_hidden_states_of_other_tokens_are_noticed(moved: Moved) -> None:
    engine = mock_engine()
    first, second, third = sequences_of(engine, LENGTHS)
    with pytest.raises(RuntimeError, match="hidden states"):
        engine.resume(batch_of([second, first, third]), moved.hidden, next_layer=2).result()


def test_kv_imported_into_the_wrong_sequence_is_noticed(moved: Moved) -> None:
    engine = mock_engine()
    sequences = sequences_of(engine, LENGTHS)
    first, second, third = (s.blocks for s in sequences)
    activation = engine.resume(batch_of(sequences), moved.hidden, next_layer=2)
    engine.import_kv([second, first, third], LENGTHS, 2, moved.kv).result()
    with pytest.raises(RuntimeError, match="KV of 0 layers, not of 2"):
        engine.run_layers(activation, 2, 4).result()


def test_kv_imported_with_other_lengths_is_noticed(moved: Moved) -> None:
    engine = mock_engine()
    with pytest.raises(RuntimeError, match="layer 0, token 5 of the batch, position 0"):
        engine.import_kv([s.blocks for s in sequences_of(engine, (5, 20, 20))], (5, 20, 20), 2, moved.kv).result()


def test_swapped_layers_are_noticed(moved: Moved) -> None:
    engine, kv = mock_engine(), layers_of(moved)
    kv[[0, 1]] = kv[[1, 0]]
    with pytest.raises(RuntimeError, match="KV of layer 0"):
        take_over(engine, sequences_of(engine, LENGTHS), moved)


def test_swapped_k_and_v_are_noticed(moved: Moved) -> None:
    engine, kv = mock_engine(), layers_of(moved)
    kv[1] = kv[1, ::-1].copy()
    with pytest.raises(RuntimeError, match="KV of layer 1"):
        take_over(engine, sequences_of(engine, LENGTHS), moved)


def test_a_layer_of_another_batch_is_noticed(moved: Moved) -> None:
    other = mock_engine()
    sequences = sequences_of(other, LENGTHS)
    sequences[2].tokens[3] ^= 1
    layers_of(moved)[1] = layers_of(run_part(other, sequences, 2))[1]
    engine = mock_engine()
    with pytest.raises(RuntimeError, match="KV of layer 1, token 43 of the batch, position 3"):
        take_over(engine, sequences_of(engine, LENGTHS), moved)


def test_kv_that_never_came_is_noticed(moved: Moved) -> None:
    engine = mock_engine()
    moved.kv[-1 - engine.kv_bytes_per_token_layer :] = 0
    with pytest.raises(RuntimeError, match="KV of layer 1"):
        take_over(engine, sequences_of(engine, LENGTHS), moved)


@pytest.mark.parametrize("before", [True, False])
def test_kv_that_was_not_imported_is_noticed_also_where_the_same_prompt_was_before(moved: Moved, before: bool) -> None:
    engine = mock_engine()
    if before:
        run_whole(engine, sequences_of(engine, LENGTHS))
    sequences = sequences_of(engine, LENGTHS)
    activation = engine.resume(batch_of(sequences), moved.hidden, next_layer=2)
    engine.run_layers(activation, 2, 4).result()
    sample(engine, sequences, activation)
    with pytest.raises(RuntimeError, match="has KV of 0 layers, not of all 4"):
        decode(engine, sequences, 1)


def test_too_few_layers_imported_are_noticed(moved: Moved) -> None:
    engine = mock_engine()
    sequences = sequences_of(engine, LENGTHS)
    activation = engine.resume(batch_of(sequences), moved.hidden, next_layer=2)
    engine.import_kv([s.blocks for s in sequences], LENGTHS, 1, layers_of(moved)[:1].reshape(-1)).result()
    engine.run_layers(activation, 2, 4).result()
    sample(engine, sequences, activation)
    with pytest.raises(RuntimeError, match="has KV of 1 layers, not of all 4"):
        decode(engine, sequences, 1)
    with pytest.raises(RuntimeError, match="KV of 1 layers, not of 2"):
        engine.export_kv([s.blocks for s in sequences], LENGTHS, 2).result()


def test_kv_of_layers_that_ran_here_is_not_imported(moved: Moved) -> None:
    giver, engine = mock_engine(), mock_engine()
    sequences = sequences_of(engine, LENGTHS)
    further = run_part(giver, sequences_of(giver, LENGTHS), 3)
    engine.run_layers(engine.resume(batch_of(sequences), moved.hidden, next_layer=2), 2, 3).result()
    with pytest.raises(RuntimeError, match="KV of layer 2 is imported where it was run, from 2 on"):
        engine.import_kv([s.blocks for s in sequences], LENGTHS, 3, further.kv).result()


def test_what_a_batch_that_is_no_more_left_in_its_blocks_harms_nobody(moved: Moved) -> None:
    engine = mock_engine()
    engine.run_layers(engine.resume(batch_of(sequences_of(engine, LENGTHS)), moved.hidden, next_layer=2), 2, 3).result()
    lengths = (18, 20, 3)
    giver = mock_engine()
    there, here = sequences_of(giver, lengths), sequences_of(engine, lengths)
    run_whole(giver, there)
    kv = giver.export_kv([s.blocks for s in there], lengths, 4).result()
    engine.import_kv([s.blocks for s in here], lengths, 4, kv).result()
    for sequence in here:
        sequence.num_computed = len(sequence.tokens)
        sequence.tokens.append(next_token(sequence.tokens))
    decode(engine, here, 1)
    assert [s.tokens[-1] for s in here] == [next_token(s.tokens[:-1]) for s in here]


def test_changed_hashes_are_noticed(moved: Moved) -> None:
    engine = mock_engine()
    layers_of(moved)[:, 1, :, 11] ^= 0x55  # the hash's highest byte, in every layer
    with pytest.raises(RuntimeError, match="KV of 0 layers, not of 2"):
        take_over(engine, sequences_of(engine, LENGTHS), moved)


def test_the_least_sizes_carry_all_of_it() -> None:
    source, target = (MockEngine(hidden_bytes_per_token=8, kv_bytes_per_token_layer=24) for _ in range(2))
    prompt = list(range(40))
    taken = [DrivenSequence(1, prompt, (9, 8, 7, 6))]
    moved = run_part(source, [DrivenSequence(1, prompt, (0, 1, 2))], 3)
    sample(target, taken, take_over(target, taken, moved))
    decode(target, taken, 5)
    for end in range(40, 46):
        assert taken[0].tokens[end] == next_token(taken[0].tokens[:end])


@pytest.mark.parametrize("sizes", [{"hidden_bytes_per_token": 7}, {"kv_bytes_per_token_layer": 22}])
def test_sizes_that_carry_nothing_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(sizes.values()))} bytes per token"):
        MockEngine(**sizes)


def test_a_resumed_batch_takes_the_time_of_the_layers_that_are_left() -> None:
    slept: list[float] = []
    timing = MockTiming(step_overhead_s=1.0, layer_base_s=0.1, layer_per_token_s=0.01, head_s=2.0)
    source, target = (MockEngine(num_layers=4, timing=timing, sleep=slept.append, vocab_size=264) for _ in range(2))
    prompt = prompt_of(3)
    moved = run_part(source, [DrivenSequence(1, prompt, (0,))], 3)
    assert slept == pytest.approx([1.0, 0.13, 0.13, 0.13])
    slept.clear()
    taken = [DrivenSequence(1, prompt, (5,))]
    target.sample(take_over(target, taken, moved)).result()
    assert slept == pytest.approx([1.0, 0.13, 2.0])
