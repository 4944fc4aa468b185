"""The contract of KV that moves layer by layer, while its prompt is still computed: the same cases for every engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.engine.attention.torch_cpu import TorchAttention
from services.worker.engine.base import Engine
from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.mock.sleep import PreciseSleep
from services.worker.engine.torch_engine import TorchEngine
from shared.errors import BadRequest
from tests.checkpoints import KINDS
from tests.services.worker.engine.harness import DrivenSequence
from tests.services.worker.engine.movers import (
    NUM_LAYERS,
    batch_of,
    decode,
    maker,
    mock_engine,
    run_whole,
    sample,
    sequences_of,
)

NUM_STEPS = 12
LENGTHS = (37, 16, 5)

each_engine = pytest.mark.parametrize("kind", ["mock", *KINDS])


def export(engine: Engine, sequences: list[DrivenSequence], first: int, last: int) -> np.ndarray:
    """KV of the sequences' computed tokens."""
    tables, lengths = [s.blocks for s in sequences], [s.num_computed for s in sequences]
    return engine.export_kv(tables, lengths, last, first_layer=first).result()


def load(engine: Engine, sequences: list[DrivenSequence], first: int, last: int, kv: np.ndarray) -> None:
    """The reverse of ``export``, of whole prompts."""
    tables, lengths = [s.blocks for s in sequences], [len(s.tokens) for s in sequences]
    engine.import_kv(tables, lengths, last, kv, first_layer=first).result()


def prompt_layers(engine: Engine, lengths: tuple[int, ...] = LENGTHS) -> list[np.ndarray]:
    """KV of some prompts, layer by layer."""
    sequences = sequences_of(engine, lengths)
    run_whole(engine, sequences)
    return [export(engine, sequences, layer, layer + 1) for layer in range(NUM_LAYERS)]


def in_the_middle_of_a_layer(engine: Engine, hook: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ``hook`` on the engine thread inside of every ``run_layers`` from now on."""
    if isinstance(engine, MockEngine):
        monkeypatch.setattr(PreciseSleep, "until", lambda _self, _deadline: hook())
        return
    assert isinstance(engine, TorchEngine)
    run, pages = TorchAttention.run, engine.cache.k

    def hooked(attention: TorchAttention, plan: Any, q: torch.Tensor, *caches: torch.Tensor) -> torch.Tensor:
        if any(caches[0] is keys for keys in pages):
            hook()  # this layer's KV is written, its hidden states are not
        return run(attention, plan, q, *caches)

    monkeypatch.setattr(TorchAttention, "run", hooked)


@each_engine
@pytest.mark.parametrize("cuts", [(0, 1, 2, 3, 4), (0, 3, 4), (0, 2, 2, 4)], ids=str)
@pytest.mark.parametrize("block_sizes", [(16, 16), (8, 16), (16, 5)], ids=str)
def test_a_prompt_is_decoded_where_its_kv_went_while_it_was_computed(
    kind: str, cuts: tuple[int, ...], block_sizes: tuple[int, int]
) -> None:
    make = maker(kind)
    alone = make()
    expected = sequences_of(alone, LENGTHS)
    logits = decode(alone, expected, 1 + NUM_STEPS)

    prefill, decoding = (make(block_size=size) for size in block_sizes)
    sequences, taken = sequences_of(prefill, LENGTHS, backwards=True), sequences_of(decoding, LENGTHS)
    activation = prefill.embed(batch_of(sequences))
    for first, last in pairwise(cuts):
        prefill.run_layers(activation, first, last).result()
        load(decoding, taken, first, last, export(prefill, sequences, first, last))
    sample(prefill, sequences, activation)
    for there, here in zip(sequences, taken, strict=True):
        here.num_computed = len(here.tokens)
        here.tokens.append(there.tokens[-1])
    for found, wanted in zip(decode(decoding, taken, NUM_STEPS), logits[1:], strict=True):
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
        else:
            assert found == wanted
    assert [s.tokens for s in taken] == [s.tokens for s in expected]
    # And should the decode instance be gone, the prefill instance decodes.
    decode(prefill, sequences, NUM_STEPS)
    assert [s.tokens for s in sequences] == [s.tokens for s in expected]


@each_engine
@pytest.mark.parametrize("block_sizes", [(16, 16), (8, 16), (16, 5)], ids=str)
@pytest.mark.parametrize("num_meanwhile", [0, 1, 7])
def test_kv_goes_in_two_ranges_of_tokens_and_the_first_sequences_decode_meanwhile(
    kind: str, block_sizes: tuple[int, int], num_meanwhile: int
) -> None:
    make = maker(kind)
    alone = make()
    expected = sequences_of(alone, LENGTHS)
    decode(alone, expected, 1 + NUM_STEPS)

    giver, taker = (make(block_size=size) for size in block_sizes)
    there, here = sequences_of(giver, LENGTHS, backwards=True), sequences_of(taker, LENGTHS)
    decode(giver, there, 1)
    first = [s.num_computed for s in there]
    kv = [
        giver.export_kv([s.blocks for s in there], first, layer + 1, first_layer=layer).result() for layer in range(2)
    ]
    decode(giver, there, num_meanwhile)
    rest = giver.export_kv([s.blocks for s in there], first, NUM_LAYERS, first_layer=2).result()
    lengths = [s.num_computed for s in there]
    more = giver.export_kv([s.blocks for s in there], lengths, NUM_LAYERS, first_tokens=first).result()

    tables = [s.blocks for s in here]
    for layer in range(2):
        taker.import_kv(tables, first, layer + 1, kv[layer], first_layer=layer).result()
    taker.import_kv(tables, first, NUM_LAYERS, rest, first_layer=2).result()
    taker.import_kv(tables, lengths, NUM_LAYERS, more, first_tokens=first).result()
    for taken, given in zip(here, there, strict=True):
        taken.tokens, taken.num_computed = list(given.tokens), given.num_computed
    decode(taker, here, NUM_STEPS - num_meanwhile)
    assert [s.tokens for s in here] == [s.tokens for s in expected]


@each_engine
def test_ranges_of_tokens_that_are_none_are_refused(kind: str) -> None:
    engine = maker(kind)()
    for first in ((-1,), (21,), (0, 0)):
        with pytest.raises(BadRequest):
            engine.export_kv([(1, 2)], [20], 1, first_tokens=first).result()
        with pytest.raises(BadRequest):
            engine.import_kv([(1, 2)], [20], 1, b"", first_tokens=first).result()


@each_engine
def test_layers_exported_between_later_ones_are_those_of_the_whole(kind: str) -> None:
    engine = maker(kind)()
    sequences = sequences_of(engine, LENGTHS)
    activation = engine.embed(batch_of(sequences))
    found: list[list[np.ndarray]] = []
    for layer in range(NUM_LAYERS):
        engine.run_layers(activation, layer, layer + 1).result()
        found.append([export(engine, sequences, earlier, earlier + 1) for earlier in range(layer + 1)])
    whole = export(engine, sequences, 0, NUM_LAYERS)
    for layers in found:
        together = np.concatenate(layers)
        assert together.any()
        assert np.array_equal(together, whole[: len(together)])
    layer_bytes = len(whole) // NUM_LAYERS
    assert np.array_equal(export(engine, sequences, 1, 3), whole[layer_bytes : 3 * layer_bytes])
    assert export(engine, sequences, 2, 2).shape == (0,)


@each_engine
def test_another_thread_exports_layers_in_the_middle_of_a_later_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, alone = maker(kind)(), maker(kind)()
    expected = sequences_of(alone, LENGTHS)
    decode(alone, expected, 3)

    sequences = sequences_of(engine, LENGTHS)
    activation = engine.embed(batch_of(sequences))
    engine.run_layers(activation, 0, 2).result()
    before = export(engine, sequences, 0, 2), export(engine, sequences, 1, 2)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    with ThreadPoolExecutor(1) as others, monkeypatch.context() as patch:

        def both() -> tuple[np.ndarray, np.ndarray]:
            return export(engine, sequences, 0, 2), export(engine, sequences, 1, 2)

        in_the_middle_of_a_layer(engine, lambda: found.append(others.submit(both).result(timeout=60)), patch)
        engine.run_layers(activation, 2, 3).result()
        engine.run_layers(activation, 3, 4).result()
    assert len(found) == 2
    for pair in found:
        for kv, wanted in zip(pair, before, strict=True):
            assert np.array_equal(kv, wanted)
    sample(engine, sequences, activation)
    decode(engine, sequences, 2)
    assert [s.tokens for s in sequences] == [s.tokens for s in expected]


@each_engine
def test_an_import_of_later_layers_leaves_the_earlier_ones(kind: str) -> None:
    giver, taker = maker(kind)(), maker(kind)()
    layers = prompt_layers(giver)
    taken = sequences_of(taker, LENGTHS, backwards=True)
    load(taker, taken, 0, 2, np.concatenate(layers[:2]))
    load(taker, taken, 2, 4, np.concatenate(layers[2:]))
    for s in taken:
        s.num_computed = len(s.tokens)
    for layer in range(NUM_LAYERS):
        assert np.array_equal(export(taker, taken, layer, layer + 1), layers[layer])


@each_engine
@pytest.mark.parametrize(("first", "last"), [(-1, 1), (2, 1), (0, NUM_LAYERS + 1), (NUM_LAYERS + 1, NUM_LAYERS + 1)])
def test_layers_that_are_no_range_of_the_model_are_refused(kind: str, first: int, last: int) -> None:
    engine = maker(kind)()
    message = f"layers {first}..{last} of a model of {NUM_LAYERS}".replace(".", r"\.")
    with pytest.raises(BadRequest, match=message):
        engine.export_kv([(1, 2)], [20], last, first_layer=first).result()
    kv = np.zeros(max(0, last - first) * 20 * engine.kv_bytes_per_token_layer, dtype=np.uint8)
    with pytest.raises(BadRequest, match=message):
        engine.import_kv([(1, 2)], [20], last, kv, first_layer=first).result()


@each_engine
def test_kv_of_another_number_of_layers_is_refused(kind: str) -> None:
    engine = maker(kind)()
    layers = prompt_layers(engine)
    taken = sequences_of(engine, LENGTHS)
    for wrong in (layers[1][:-1], np.concatenate(layers[1:3]), layers[1][:0]):
        with pytest.raises(BadRequest, match=f"KV: {len(wrong)} bytes, expected {len(layers[1])}"):
            load(engine, taken, 1, 2, wrong)
    with pytest.raises(BadRequest, match=f"KV: {len(layers[0])} bytes, expected 0"):
        load(engine, taken, 2, 2, layers[0])


# --- what only the mock notices ----------------------------------------------------------------


@pytest.fixture
def layers() -> list[np.ndarray]:
    """KV of the prompts, layer by layer, from elsewhere."""
    return prompt_layers(mock_engine(block_size=8))


@pytest.mark.parametrize(("there", "first"), [(0, 1), (1, 2), (1, 3), (2, 1), (4, 3)])
def test_a_layer_that_is_not_the_next_is_noticed(layers: list[np.ndarray], there: int, first: int) -> None:
    engine = mock_engine()
    taken = sequences_of(engine, LENGTHS)
    load(engine, taken, 0, there, np.concatenate([*layers[:there], layers[0][:0]]))
    with pytest.raises(RuntimeError, match=f"KV of {there} layers, not of {first}"):
        load(engine, taken, first, first + 1, layers[first])
    for layer in range(there, NUM_LAYERS):  # what was refused changed nothing
        load(engine, taken, layer, layer + 1, layers[layer])


def test_a_layer_that_says_it_is_another_is_noticed(layers: list[np.ndarray]) -> None:
    engine = mock_engine()
    taken = sequences_of(engine, LENGTHS)
    load(engine, taken, 0, 1, layers[0])
    for wrong in (0, 2):
        with pytest.raises(RuntimeError, match=f"KV of layer 1, token 0 .* found that of layer {wrong}"):
            load(engine, taken, 1, 2, layers[wrong])
    with pytest.raises(RuntimeError, match=r"KV of layer 2, token 0 .* found that of layer 3"):
        load(engine, taken, 1, 3, np.concatenate([layers[1], layers[3]]))


def test_layers_of_two_prompts_in_the_same_slots_are_noticed(layers: list[np.ndarray]) -> None:
    other, engine = mock_engine(), mock_engine()
    changed = sequences_of(other, LENGTHS)
    changed[1].tokens[3] ^= 1
    run_whole(other, changed)
    taken = sequences_of(engine, LENGTHS)
    load(engine, taken, 0, 1, layers[0])
    with pytest.raises(RuntimeError, match="KV of layer 1, token 40 of the batch, position 3"):
        load(engine, taken, 1, 2, export(other, changed, 1, 2))
    # The same tokens behind another prefix are no better.
    kv = export(other, changed, 1, 2).reshape(2, sum(LENGTHS), -1)
    kv[:, 40] = layers[1].reshape(kv.shape)[:, 40]
    with pytest.raises(RuntimeError, match="KV of layer 1, token 41 of the batch, position 4"):
        load(engine, taken, 1, 2, kv.reshape(-1))


def test_layers_in_other_slots_than_the_first_are_noticed(layers: list[np.ndarray]) -> None:
    engine = mock_engine()
    taken, elsewhere = sequences_of(engine, LENGTHS), sequences_of(engine, LENGTHS, backwards=True)
    load(engine, taken, 0, 1, layers[0])
    with pytest.raises(RuntimeError, match="KV of"):
        load(engine, elsewhere, 1, 2, layers[1])


@pytest.mark.parametrize("there", [1, 3])
def test_a_decode_step_before_all_layers_are_there_is_noticed(layers: list[np.ndarray], there: int) -> None:
    engine = mock_engine()
    taken = sequences_of(engine, LENGTHS)
    load(engine, taken, 0, there, np.concatenate(layers[:there]))
    for s in taken:
        s.num_computed = len(s.tokens)
        s.tokens.append(65)
    with pytest.raises(RuntimeError, match=rf"position 36, slot \d+, has KV of {there} layers, not of all 4"):
        run_whole(engine, taken)


@pytest.mark.parametrize(("first", "last"), [(0, 1), (2, 3), (2, 4)])
def test_a_layer_that_still_runs_cannot_be_exported(first: int, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = mock_engine()
    run_whole(engine, sequences_of(engine, LENGTHS))  # all layers of what was there before
    sequences = sequences_of(engine, LENGTHS)
    activation = engine.embed(batch_of(sequences))
    engine.run_layers(activation, 0, first).result()
    refused: list[str] = []

    def hook() -> None:
        with pytest.raises(RuntimeError, match=f"KV of {first} layers, not of {first + 1}") as error:
            export(engine, sequences, first, first + 1)
        refused.append(str(error.value))

    in_the_middle_of_a_layer(engine, hook, monkeypatch)
    engine.run_layers(activation, first, last).result()
    assert len(refused) == 1
    assert export(engine, sequences, first, last).any()


def test_the_last_chunk_of_a_prompt_lets_the_whole_prompt_go_layer_by_layer() -> None:
    engine, other = mock_engine(), mock_engine()
    (sequence,), (whole,) = (sequences_of(e, (40,)) for e in (engine, other))
    run_whole(other, [whole])
    for _ in range(3):
        engine.run_layers(engine.embed(batch_of([sequence], max_tokens=10)), 0, NUM_LAYERS).result()
    last = engine.embed(batch_of([sequence], max_tokens=10))
    for layer in range(NUM_LAYERS):
        with pytest.raises(RuntimeError, match="slot"):
            export(engine, [sequence], layer, layer + 1)
        engine.run_layers(last, layer, layer + 1).result()
        assert np.array_equal(export(engine, [sequence], layer, layer + 1), export(other, [whole], layer, layer + 1))
