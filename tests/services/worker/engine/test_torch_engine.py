"""Logits and greedy tokens of the torch engine, driven by hand, against ``transformers``."""

from __future__ import annotations

import pytest
import torch

from services.worker.device.host import HOST
from services.worker.engine.forward_batch import Slice
from services.worker.engine.kv_pool import KvPool
from services.worker.engine.torch_engine import TorchEngine
from services.worker.memory.arena import Arena
from services.worker.memory.loader import load_unit
from shared.checkpoint import inspect_checkpoint
from shared.errors import BadRequest
from tests.checkpoints import KINDS, tiny_checkpoint
from tests.services.worker.engine.batches import forward, slice_of
from tests.services.worker.engine.harness import (
    DrivenSequence,
    compute,
    greedy,
    loaded_engine,
    prompt_of,
    reference_greedy,
    reference_logits,
)
from tests.services.worker.engine.movers import batch_of, run_part, sequences_of, take_over

SCATTERED = tuple(range(90, 0, -3))
NUM_TOKENS = 64


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_prompt_are_those_of_transformers(kind: str) -> None:
    engine, tokens = loaded_engine(kind), prompt_of(150)
    logits = compute(engine, [DrivenSequence(1, tokens, range(10)).next_slice()])
    torch.testing.assert_close(logits[0], reference_logits(kind, tokens)[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [range(3, 40), SCATTERED], ids=["run", "scattered"])
def test_every_step_after_chunks_of_16_has_the_logits_of_transformers(kind: str, blocks: tuple[int, ...]) -> None:
    engine, tokens = loaded_engine(kind), prompt_of(200)
    expected = reference_logits(kind, tokens)
    sequence = DrivenSequence(1, tokens, blocks)
    sequence.tokens = tokens[:100]
    while sequence.num_computed < 100:
        logits = compute(engine, [sequence.next_slice(16)])
    torch.testing.assert_close(logits[0], expected[99], atol=1e-4, rtol=0)
    for position in range(100, 200):
        sequence.tokens.append(tokens[position])
        logits = compute(engine, [sequence.next_slice()])
        torch.testing.assert_close(logits[0], expected[position], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [None, 16])
def test_greedy_tokens_in_a_mixed_batch_are_those_of_each_sequence_alone(kind: str, chunk: int | None) -> None:
    engine = loaded_engine(kind)
    lengths = (1, 5, 17, 40, 127, 130, 200)
    sequences = [
        DrivenSequence(i, prompt_of(n, i), range(i * 20, i * 20 + 20) if i % 2 else range(i * 20 + 19, i * 20 - 1, -1))
        for i, n in enumerate(lengths)
    ]
    greedy(engine, sequences, NUM_TOKENS, chunk)
    for i, (sequence, n) in enumerate(zip(sequences, lengths, strict=True)):
        assert sequence.tokens[n:] == reference_greedy(kind, prompt_of(n, i), NUM_TOKENS)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_survive_preemption_by_recompute_into_other_blocks(kind: str) -> None:
    engine, prompt = loaded_engine(kind), prompt_of(45)
    sequence = DrivenSequence(1, prompt, range(12))
    greedy(engine, [sequence], NUM_TOKENS // 2)
    other = DrivenSequence(2, prompt_of(100), range(12))  # takes the blocks over
    greedy(engine, [other], 4)
    resumed = DrivenSequence(1, sequence.tokens, SCATTERED)
    greedy(engine, [resumed], NUM_TOKENS // 2, chunk=16)
    assert resumed.tokens[45:] == reference_greedy(kind, prompt, NUM_TOKENS)


@pytest.mark.parametrize("cuts", [(1,), (3,), (1, 2, 3)])
def test_layer_ranges_give_the_logits_of_a_whole_run(cuts: tuple[int, ...]) -> None:
    engine, tokens = loaded_engine("llama"), prompt_of(50)
    logits = compute(engine, [DrivenSequence(1, tokens, range(4)).next_slice()], cuts=cuts)
    torch.testing.assert_close(logits[0], reference_logits("llama", tokens)[-1], atol=1e-4, rtol=0)


def test_kv_on_the_wire_is_layers_k_and_v_tokens_heads() -> None:
    engine = loaded_engine("qwen2", block_size=4)
    sequences = [DrivenSequence(i, prompt_of(n, i), blocks) for i, (n, blocks) in enumerate([(6, (9, 2)), (3, (5,))])]
    engine.run_layers(engine.embed(forward(*[s.next_slice() for s in sequences])), 0, 3).result()
    kv = torch.from_numpy(engine.export_kv([(9, 2), (5,)], [6, 3], 3).result()).view(torch.float32)
    heads_and_dim = engine.cache.k[0].shape[2:]
    kv = kv.view(3, 2, 9, *heads_and_dim)
    at = [(9, 0), (9, 1), (9, 2), (9, 3), (2, 0), (2, 1), (5, 0), (5, 1), (5, 2)]
    for layer in range(3):
        for pages, exported in zip((engine.cache.k[layer], engine.cache.v[layer]), kv[layer], strict=True):
            assert exported.any(-1).all()
            assert torch.equal(exported, torch.stack([pages[block, offset] for block, offset in at]))


@pytest.mark.parametrize("first_layer", [0, 1, 2])
def test_an_import_writes_the_slots_of_its_tokens_and_layers_alone(first_layer: int) -> None:
    engine = loaded_engine("llama", block_size=4)
    for pages in (*engine.cache.k, *engine.cache.v):
        pages.fill_(7)
    kv = torch.zeros(2 * 6 * engine.kv_bytes_per_token_layer, dtype=torch.uint8).numpy()
    engine.import_kv([(9, 2)], [6], first_layer + 2, kv, first_layer=first_layer).result()
    for layer in range(4):
        for pages in (engine.cache.k[layer], engine.cache.v[layer]):
            expected = torch.full_like(pages, 7)
            if first_layer <= layer < first_layer + 2:
                expected[9] = 0
                expected[2, :2] = 0
            assert torch.equal(pages, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_batch_in_lower_precision_has_the_logits_of_the_whole(kind: str) -> None:
    source, target = (loaded_engine(kind, dtype="bfloat16", block_size=size) for size in (16, 8))
    whole = sequences_of(source, (37, 20))
    expected = [compute(source, batch_of(whole).slices)]
    moved = run_part(source, sequences_of(source, (37, 20)), 2)
    taken = sequences_of(target, (37, 20), backwards=True)
    found = [target.head(take_over(target, taken, moved))]
    for engine, sequences, logits in ((source, whole, expected), (target, taken, found)):
        for s in sequences:
            s.tokens.append(65)
        logits.append(compute(engine, batch_of(sequences).slices))
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_depend_on_the_imported_kv(kind: str) -> None:
    # Otherwise the tests of moved batches would pass without it.
    engine = loaded_engine(kind)
    (sequence,) = sequences_of(engine, (37,))
    moved = run_part(engine, [sequence], 2)
    taken = sequences_of(engine, (37,))
    engine.head(take_over(engine, taken, moved))
    taken[0].tokens.append(65)
    piece = taken[0].next_slice()
    right = compute(engine, [piece])
    layers = engine.cache.k[0], engine.cache.v[0]
    for pages in layers:
        pages[taken[0].blocks[1]] = 0
    assert (compute(engine, [piece]) - right).abs().max() > 1e-2


def test_an_engine_built_before_its_weights_computes_once_they_are_there() -> None:
    checkpoint = inspect_checkpoint(tiny_checkpoint("llama"), with_hash=False)
    layout = checkpoint.layout
    arena = Arena(HOST.allocate(layout.num_bytes))
    engine = TorchEngine(layout, arena, KvPool(HOST.allocate(1 << 20)))
    load_unit(checkpoint, layout, layout.embed, arena)
    load_unit(checkpoint, layout, layout.units[0], arena)
    tokens = prompt_of(20)
    activation = engine.embed(forward(DrivenSequence(1, tokens, range(2)).next_slice()))
    engine.run_layers(activation, 0, 1).result()
    for unit in [*layout.units[1 : layout.num_layers], layout.final]:
        load_unit(checkpoint, layout, unit, arena)
    engine.run_layers(activation, 1, layout.num_layers).result()
    torch.testing.assert_close(engine.head(activation)[0], reference_logits("llama", tokens)[-1], atol=1e-4, rtol=0)


def test_only_slices_that_sample_get_logits_and_in_their_order() -> None:
    engine = loaded_engine("llama")
    prompts = [prompt_of(n) for n in (20, 9, 33)]
    slices = [
        slice_of(1, prompts[0], 0, (0, 1), True),
        slice_of(2, prompts[1][:8], 0, (2,), False),
        slice_of(3, prompts[2], 0, (3, 4, 5), True),
    ]
    logits = compute(engine, slices)
    expected = torch.stack([reference_logits("llama", prompts[i])[-1] for i in (0, 2)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    alone = compute(engine, [slice_of(2, prompts[1][8:], 8, (2,), True)])  # the unsampled slice did write its KV
    torch.testing.assert_close(alone[0], reference_logits("llama", prompts[1])[-1], atol=1e-4, rtol=0)


def test_a_batch_that_samples_nothing_has_no_logits() -> None:
    engine = loaded_engine("llama")
    assert compute(engine, [slice_of(1, prompt_of(8), 0, (0,), False)]).shape[0] == 0


def test_nan_left_in_the_pool_by_another_sequence_does_not_leak() -> None:
    engine, tokens = loaded_engine("llama"), prompt_of(20)
    for pages in (*engine.cache.k, *engine.cache.v):
        pages.fill_(float("nan"))
    sequences = [DrivenSequence(i, tokens, (5 * i, 5 * i + 2)) for i in range(3)]
    logits = compute(engine, [s.next_slice(19 - i) for i, s in enumerate(sequences)])
    while any(s.num_computed < 20 for s in sequences):
        logits = compute(engine, [s.next_slice(1) for s in sequences if s.num_computed < 20])
    torch.testing.assert_close(logits[0], reference_logits("llama", tokens)[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lower_precision_stays_as_close_to_float32_as_transformers_does(kind: str, dtype: str) -> None:
    tokens = prompt_of(100)
    engine = loaded_engine(kind, dtype=dtype)
    sequence = DrivenSequence(1, tokens, range(7))
    while sequence.num_computed < len(tokens):
        logits = compute(engine, [sequence.next_slice(33)])
    exact = reference_logits(kind, tokens)[-1]
    theirs = (reference_logits(kind, tokens, dtype)[-1] - exact).norm()
    assert (logits[0] - exact).norm() < 2 * theirs


@pytest.mark.parametrize(
    "piece",
    [slice_of(1, (), 0, (0,), True), slice_of(1, (1,) * 17, 0, (0,), True), slice_of(1, (1,), 16, (0,), True)],
    ids=["empty", "short table", "position past the table"],
)
def test_a_slice_that_its_blocks_cannot_hold_is_refused(piece: Slice) -> None:
    with pytest.raises(BadRequest, match="sequence 1"):
        loaded_engine("llama").embed(forward(piece)).result()


@pytest.mark.parametrize("token", [-1, 264])
def test_a_token_outside_of_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(BadRequest, match="vocabulary of 264"):
        loaded_engine("llama").embed(forward(slice_of(1, (1, token), 0, (0,), True))).result()


def test_layers_out_of_order_and_an_early_head_are_refused() -> None:
    engine = loaded_engine("llama")
    activation = engine.embed(forward(slice_of(1, (1, 2), 0, (0,), True)))
    with pytest.raises(BadRequest, match="next layer is 0"):
        engine.run_layers(activation, 1, 2).result()
    with pytest.raises(BadRequest, match="head"):
        engine.head(activation)


def test_a_model_that_does_not_fit_the_arena_or_the_pool_is_refused() -> None:
    layout = inspect_checkpoint(tiny_checkpoint("llama"), with_hash=False).layout
    with pytest.raises(BadRequest, match="arena"):
        TorchEngine(layout, Arena(HOST.allocate(layout.num_bytes - 1)), KvPool(HOST.allocate(1 << 20)))
    with pytest.raises(BadRequest, match="KV pool"):
        TorchEngine(layout, Arena(HOST.allocate(layout.num_bytes)), KvPool(HOST.allocate(1 << 16)), num_blocks=1000)
