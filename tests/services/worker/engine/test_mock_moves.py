"""What the mock notices of batches that two engines mix up, and what moving costs."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.engine.mock import MockEngine, MockTiming, next_token
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
        engine.resume(batch_of(sequences_of(engine, LENGTHS)), moved.hidden, next_layer=1)


@pytest.mark.parametrize("content", [0, 255])
def test_hidden_states_that_never_came_are_noticed(content: int, moved: Moved) -> None:
    engine = mock_engine()
    moved.hidden[15 * engine.hidden_bytes_per_token :] = content
    with pytest.raises(RuntimeError, match="row 15 of the hidden states"):
        engine.resume(batch_of(sequences_of(engine, LENGTHS)), moved.hidden, next_layer=2)


def test_hidden_states_of_other_tokens_are_noticed(moved: Moved) -> None:
    engine = mock_engine()
    first, second, third = sequences_of(engine, LENGTHS)
    with pytest.raises(RuntimeError, match="hidden states"):
        engine.resume(batch_of([second, first, third]), moved.hidden, next_layer=2)


def test_kv_imported_into_the_wrong_sequence_is_noticed(moved: Moved) -> None:
    engine = mock_engine()
    sequences = sequences_of(engine, LENGTHS)
    first, second, third = (s.blocks for s in sequences)
    engine.import_kv([second, first, third], LENGTHS, 2, moved.kv)
    activation = engine.resume(batch_of(sequences), moved.hidden, next_layer=2)
    with pytest.raises(RuntimeError, match="do not hold the KV"):
        engine.run_layers(activation, 2, 4)


def test_kv_imported_with_other_lengths_is_noticed(moved: Moved) -> None:
    engine = mock_engine()
    with pytest.raises(RuntimeError, match="layer 0, token 5 of the batch, position 0"):
        engine.import_kv([s.blocks for s in sequences_of(engine, (5, 20, 20))], (5, 20, 20), 2, moved.kv)


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


def test_kv_that_was_not_imported_is_noticed_also_where_the_same_prompt_was_before(moved: Moved) -> None:
    engine = mock_engine()
    activation = engine.resume(batch_of(sequences_of(engine, LENGTHS)), moved.hidden, next_layer=2)
    with pytest.raises(RuntimeError, match="do not hold the KV"):
        engine.run_layers(activation, 2, 4)
    run_whole(engine, sequences_of(engine, LENGTHS))
    activation = engine.resume(batch_of(sequences_of(engine, LENGTHS)), moved.hidden, next_layer=2)
    with pytest.raises(RuntimeError, match="KV of 4 layers, not of 2"):
        engine.run_layers(activation, 2, 4)


def test_too_few_layers_imported_are_noticed(moved: Moved) -> None:
    engine = mock_engine()
    sequences = sequences_of(engine, LENGTHS)
    engine.import_kv([s.blocks for s in sequences], LENGTHS, 1, layers_of(moved)[:1].reshape(-1))
    activation = engine.resume(batch_of(sequences), moved.hidden, next_layer=2)
    with pytest.raises(RuntimeError, match="KV of 1 layers, not of 2"):
        engine.run_layers(activation, 2, 4)


def test_layers_that_have_not_run_cannot_be_exported() -> None:
    engine = mock_engine()
    (sequence,) = sequences_of(engine, (20,))
    engine.run_layers(engine.embed(batch_of([sequence])), 0, 2)
    with pytest.raises(RuntimeError, match="KV of 2 layers, not of 3"):
        engine.export_kv([sequence.blocks], [20], 3)


def test_a_batch_that_runs_into_the_blocks_of_an_unfinished_one_is_noticed() -> None:
    engine = mock_engine()
    (sequence,) = sequences_of(engine, (20,))
    activation = engine.embed(batch_of([sequence]))
    engine.run_layers(activation, 0, 2)
    run_whole(engine, [DrivenSequence(9, prompt_of(3), sequence.blocks)])
    with pytest.raises(RuntimeError, match="KV of 4 layers, not of 2"):
        engine.run_layers(activation, 2, 3)


def test_changed_hashes_change_the_tokens(moved: Moved) -> None:
    engine = MockEngine(vocab_size=264, hidden_bytes_per_token=48, kv_bytes_per_token_layer=56)
    sequences = sequences_of(engine, LENGTHS)
    prompts = [list(s.tokens) for s in sequences]
    layers_of(moved)[:, 1, :, 11] ^= 0x55  # the hash's highest byte, in every layer
    sample(engine, sequences, take_over(engine, sequences, moved))
    assert all(s.tokens[-1] != next_token(p) for s, p in zip(sequences, prompts, strict=True))


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
    sample(target, taken, take_over(target, taken, moved))
    assert slept == pytest.approx([1.0, 0.13, 2.0])
