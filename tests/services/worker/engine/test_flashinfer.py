"""FlashInfer's backend and the kernels beside it, on the CPU with a twin of FlashInfer that is stricter than a GPU."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from services.worker.device.host import HOST
from services.worker.engine import kernels, rope
from services.worker.engine.attention import flashinfer
from services.worker.engine.attention.flashinfer import FixedDecode, FlashInferAttention
from services.worker.engine.attention.torch_plain import PlainAttention
from services.worker.engine.forward_batch import Slice
from services.worker.engine.torch_engine import Activation, TorchEngine
from shared.layout import layout_of
from tests.checkpoints import KINDS
from tests.services.worker.engine.batches import forward
from tests.services.worker.engine.flashinfer_harness import (
    SCATTERED,
    assert_logits,
    attention_of,
    decode_of,
    loaded,
    made,
    put_twin,
    spec_of,
)
from tests.services.worker.engine.flashinfer_twin import FlashInferTwin, PinnedOverwritten
from tests.services.worker.engine.harness import (
    DrivenSequence,
    compute,
    loaded_engine,
    prompt_of,
    reference_logits,
    reference_model,
)

NUM_LAYERS = 4


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> FlashInferTwin:
    """In float32, and of the small heads of the tiny checkpoints, so that what is compared is compared sharply."""
    return put_twin(monkeypatch, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_whole_and_in_chunks_then_decodes_over_page_edges(kind: str, twin: FlashInferTwin) -> None:
    engine, tokens = loaded(kind), prompt_of(120)
    expected = reference_logits(kind, tokens)
    whole = DrivenSequence(1, tokens[:100], range(230, 240))
    torch.testing.assert_close(compute(engine, [whole.next_slice()])[0], expected[99], atol=1e-4, rtol=0)
    sequence = DrivenSequence(2, tokens[:100], SCATTERED)
    while sequence.num_computed < 100:
        logits = compute(engine, [sequence.next_slice(17)])
    torch.testing.assert_close(logits[0], expected[99], atol=1e-4, rtol=0)
    for position in range(100, 120):
        sequence.tokens.append(tokens[position])
        logits = compute(engine, [sequence.next_slice()])
        torch.testing.assert_close(logits[0], expected[position], atol=1e-4, rtol=0)
    runs = [call.function for call in twin.calls if call.function.endswith(".run")]
    # Of a chunk that samples nothing the last layer attends to nothing.
    assert sum(run.startswith("prefill.") for run in runs) == (1 + 6) * NUM_LAYERS - 5
    assert sum(run.startswith("decode.") for run in runs) == 20 * NUM_LAYERS


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 16])
def test_decodes_beside_chunks(kind: str, block_size: int) -> None:
    engine = loaded(kind, block_size=block_size, num_blocks=1600 // block_size)
    step = 160 // block_size
    prompts = [prompt_of(n, n) for n in (1, 15, 16, 17, 33, 90, 150)]
    sequences = [DrivenSequence(i, p, range(i * step, i * step + step)) for i, p in enumerate(prompts)]
    decoding, chunked = sequences[:4], sequences[4:]
    assert_logits(compute(engine, [s.next_slice() for s in decoding]), kind, prompts[:4])
    for sequence in decoding:
        sequence.tokens.append(7)
    slices = [s.next_slice(20) for s in chunked[:2]] + [s.next_slice() for s in decoding] + [chunked[2].next_slice()]
    with_token = [s.tokens for s in decoding]
    assert_logits(compute(engine, slices), kind, [*with_token, prompts[6]])
    assert_logits(compute(engine, [s.next_slice() for s in chunked[:2]]), kind, prompts[4:6])


def begun(engine: TorchEngine, *slices: Slice) -> Activation:
    return engine.embed(forward(*slices))


@pytest.mark.parametrize("most", [1, 2, 8])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_batches_that_take_turns_layer_by_layer_on_few_wrappers(
    monkeypatch: pytest.MonkeyPatch, twin: FlashInferTwin, kind: str, most: int
) -> None:
    monkeypatch.setattr(flashinfer, "WRAPPERS", most)
    engine = loaded(kind)
    prompts = [prompt_of(n, n) for n in (20, 31, 64)]
    sequences = [DrivenSequence(i, p[:-1], range(i * 10, i * 10 + 10)) for i, p in enumerate(prompts)]
    for rows in (None, 1):  # three prompts, then three decodes
        batches = [begun(engine, s.next_slice()) for s in sequences]
        for layer in range(NUM_LAYERS):
            for batch in batches:
                engine.run_layers(batch, layer, layer + 1).result()
        logits = torch.cat([engine.head(batch) for batch in batches])
        assert_logits(logits, kind, [p[:-1] if rows is None else p for p in prompts])
        for sequence, prompt in zip(sequences, prompts, strict=True):
            sequence.tokens = prompt
    attention = attention_of(engine)
    # Planned for each batch once where each has a wrapper, and for each layer of it where the others take its own.
    assert attention.prefills.num_plans == attention.decodes.num_plans == (3 if most == 8 else 3 * NUM_LAYERS)
    made = [call.function for call in twin.calls if call.function.endswith("__init__")]
    assert len(made) == 2 * min(most, 3)


def test_a_wrapper_that_is_planned_on_by_another_batch_gives_what_that_one_has(twin: FlashInferTwin) -> None:
    backend, caches = made()
    first, second = decode_of([5, 9]), decode_of([20, 1])
    plans = [backend.plan(batch, torch.from_numpy(batch.pages), torch.zeros(2).long()) for batch in (first, second)]
    q = torch.randn(2, 4, 16)
    outs = [backend.run(plan, q, *caches) for plan in plans]
    assert not torch.allclose(*outs)
    wrapper = plans[0].wrapper()
    assert plans[0].holder is not None
    plans[0].holder.take(plans[1])
    out = torch.empty(q.shape)
    wrapper.run(q, caches, out=out)
    assert torch.equal(out.flatten(1), outs[1])
    assert torch.equal(backend.run(plans[0], q, *caches), outs[0])  # which the backend knows


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_host_waits_before_it_writes_over_a_plan_that_is_still_to_be_copied(
    monkeypatch: pytest.MonkeyPatch, twin: FlashInferTwin, kind: str
) -> None:
    twin.is_late = True
    monkeypatch.setattr(flashinfer, "WRAPPERS", 2)
    engine, tokens = loaded(kind), prompt_of(40)
    sequence = DrivenSequence(1, tokens[:30], SCATTERED)
    compute(engine, [sequence.next_slice()])
    for position in range(30, 40):
        sequence.tokens.append(tokens[position])
        logits = compute(engine, [sequence.next_slice()])
    assert_logits(logits, kind, [tokens])
    decodes = attention_of(engine).decodes
    # Ten plans on two wrappers in turn. Who waited for one knows that those before it have been copied.
    assert decodes.num_plans == 10
    assert decodes.num_waits == 8


def test_a_device_that_keeps_up_is_never_waited_for(twin: FlashInferTwin) -> None:
    engine, sequence = loaded("llama"), DrivenSequence(1, prompt_of(30), SCATTERED)
    for _ in range(10):
        compute(engine, [sequence.next_slice()])
        sequence.tokens.append(3)
    assert attention_of(engine).decodes.num_waits == 0
    assert twin.moment > 10


def test_the_twin_tells_who_does_not_wait(twin: FlashInferTwin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "WRAPPERS", 1)
    twin.is_late = True
    monkeypatch.setattr(torch.cuda, "Event", NeverAsked)
    backend, _ = made()
    batch = decode_of([5])
    backend.plan(batch, torch.from_numpy(batch.pages), torch.zeros(1).long())
    with pytest.raises(PinnedOverwritten):
        backend.plan(batch, torch.from_numpy(batch.pages), torch.zeros(1).long())


class NeverAsked:
    def query(self) -> bool:
        return True

    def record(self) -> None:
        pass


def test_a_plan_that_fails_leaves_its_wrapper_to_the_next(twin: FlashInferTwin) -> None:
    backend, caches = made()
    batch = decode_of([5])
    pages, slots = torch.from_numpy(batch.pages), torch.zeros(1).long()
    for _ in range(20):
        with pytest.raises(AssertionError, match="another type"):
            backend.plan(batch, pages.long(), slots)
    plan = backend.plan(batch, pages, slots)
    assert backend.run(plan, torch.randn(1, 4, 16), *caches).isfinite().all()
    assert sum(call.function.endswith("__init__") for call in twin.calls) <= flashinfer.WRAPPERS


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_prompt_in_parts_layer_by_layer(kind: str) -> None:
    engine, tokens = loaded(kind), prompt_of(100)
    batch = begun(engine, DrivenSequence(1, tokens, SCATTERED).next_slice())
    for layer in range(NUM_LAYERS):
        for begin in range(0, 100, 30):
            engine.run_part(batch, layer, begin, min(begin + 30, 100)).result()
    assert_logits(engine.head(batch), kind, [tokens])


def test_a_batch_that_samples_nothing_launches_nothing_without_rows(twin: FlashInferTwin) -> None:
    engine, sequence = loaded("llama"), DrivenSequence(1, prompt_of(30), SCATTERED)
    assert compute(engine, [sequence.next_slice(20)]).shape[0] == 0
    norms = [call for call in twin.calls if call.function == "norm.rmsnorm"]
    assert len(norms) == 2 * NUM_LAYERS - 1  # the last layer's rows are read by nobody, nor is the head's


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_half_precision_is_as_near_to_float32_as_the_cpu_is(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    tokens = prompt_of(60)
    exact = copy.deepcopy(reference_model(kind, "bfloat16")).float()  # of the same weights
    with torch.inference_mode():
        expected = exact(torch.tensor([tokens])).logits[0, -1]
    plain = compute(loaded_engine(kind, dtype="bfloat16"), [DrivenSequence(1, tokens, SCATTERED).next_slice()])[0]
    put_twin(monkeypatch, torch.bfloat16)
    fused = compute(loaded(kind, dtype="bfloat16"), [DrivenSequence(1, tokens, SCATTERED).next_slice()])[0]
    assert (fused - expected).abs().mean() < 1.5 * (plain - expected).abs().mean()


# Kernels alone


@pytest.mark.usefixtures("twin")
def test_kernels_compute_what_the_plain_forms_do(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, weight, heads = torch.randn(5, 32), torch.randn(32), torch.randn(5, 7, 24)
    positions = torch.tensor([0, 1, 77, 4000, 130_000])
    inv_freq = rope.inverse_frequencies(spec_of(24))
    results = []
    for is_on in (True, False):
        monkeypatch.setattr(kernels, "on_flashinfer", lambda x, is_on=is_on: is_on)
        monkeypatch.setattr(rope, "is_fused", lambda *of, is_on=is_on: is_on)
        turned = heads.clone()
        # Queries and keys lie in front of values: rows are not dense.
        rope.rotate_(turned[:, :5], rope.rotation(inv_freq, positions, torch.float32))
        results.append((kernels.rms_norm(x, weight, 1e-6), kernels.silu_and_mul(x), turned))
    torch.testing.assert_close(results[0], results[1])
    assert torch.equal(results[0][2][:, 5:], heads[:, 5:])


def test_what_flashinfer_is_for() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert rope.is_fused(cuda, torch.bfloat16, 128)
    assert not rope.is_fused(cuda, torch.float32, 128)
    assert not rope.is_fused(cuda, torch.float16, 80)
    assert not rope.is_fused(cpu, torch.bfloat16, 128)
    # A tensor of a GPU cannot be had here: what of one is looked at can.
    of = partial(SimpleNamespace, device=cuda, dtype=torch.float16, shape=(3, 4))
    assert kernels.on_flashinfer(of())
    for other in ({"device": cpu}, {"dtype": torch.float32}, {"shape": (0, 4)}):
        assert not kernels.on_flashinfer(of(**other))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "made_of"),
    [
        (64, "bfloat16", FlashInferAttention),
        (256, "float16", FlashInferAttention),
        (128, "float32", PlainAttention),
        (80, "bfloat16", PlainAttention),
    ],
)
def test_where_flashinfer_has_no_kernels_plain_operations_compute(head_dim: int, dtype: str, made_of: type) -> None:
    backend = flashinfer.MAKE(layout_of(spec_of(head_dim, dtype)), 16, HOST.tensors)
    assert isinstance(backend, made_of)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_operations_in_an_engine(kind: str) -> None:
    engine, tokens = loaded_engine(kind, attention="torch_plain"), prompt_of(100)
    sequence = DrivenSequence(1, tokens[:-1], SCATTERED)
    while sequence.num_computed < 99:
        compute(engine, [sequence.next_slice(40)])
    sequence.tokens = tokens
    assert_logits(compute(engine, [sequence.next_slice()]), kind, [tokens])


# For graphs


def test_a_fixed_plan_attends_as_any_other_and_gives_zeros_behind_it(twin: FlashInferTwin) -> None:
    backend, caches = made(window=12)
    fixed = backend.fixed(4, 6, torch.zeros(4).long())
    captured = fixed.attention  # a graph has this one for good
    for lengths in ([5, 20, 8], [16], [1, 2, 3, 4], [33, 1]):
        batch = decode_of(lengths)
        pages = torch.from_numpy(batch.pages)
        q = torch.randn(4, 4, 16)
        expected = backend.run(backend.plan(batch, pages, captured.slots), q[: len(lengths)], *caches)
        fixed.plan(batch, pages.clone())
        out = backend.run(captured, q, *caches)
        torch.testing.assert_close(out[: len(lengths)], expected)
        assert not out[len(lengths) :].any()
    assert sum("use_cuda_graph" in call.kwargs for call in twin.calls) == 1


def test_a_fixed_plan_takes_no_more_than_it_was_made_for(twin: FlashInferTwin) -> None:
    backend, _ = made()
    fixed = backend.fixed(2, 3, torch.zeros(2).long())
    for lengths, fits in (([16, 17], True), ([1, 1, 1], False), ([49], False)):
        batch = decode_of(lengths)
        assert fixed.fits(batch) == fits
        if not fits:
            with pytest.raises(ValueError, match="where a graph has 2 with 3"):
                fixed.plan(batch, torch.from_numpy(batch.pages))
    assert not [call for call in twin.calls if call.function.endswith("_plan_impl")]


def test_a_fixed_plan_waits_for_the_one_before(twin: FlashInferTwin) -> None:
    twin.is_late = True
    backend, _ = made()
    fixed = backend.fixed(2, 3, torch.zeros(2).long())
    batch = decode_of([3])
    for _ in range(3):
        fixed.plan(batch, torch.from_numpy(batch.pages))
    assert fixed.num_waits == 2


def test_a_fixed_plan_writes_where_its_slots_say_when_it_runs(twin: FlashInferTwin) -> None:
    backend, (k_cache, v_cache) = made()
    slots = torch.zeros(2).long()
    fixed: FixedDecode = backend.fixed(2, 3, slots)
    slots.copy_(torch.tensor([37, 80]))
    k, v = torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    before = k_cache.clone()
    backend.append(fixed.attention, k, v, k_cache, v_cache)
    for cache, new in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache.flatten(0, 1)[[37, 80]], new)
    changed = (k_cache != before).flatten(0, 1).any(-1).any(-1)
    assert changed.nonzero().flatten().tolist() == [37, 80]
