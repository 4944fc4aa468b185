"""Decode steps as graphs: what a recording gives for other tokens, places and weights than it was made with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from services.worker.device.completion import waited
from services.worker.device.cuda.device import CudaDevice
from services.worker.engine.decode_graphs import FIRST_SIZES, SIZES, DecodeGraphs
from services.worker.engine.forward_batch import Slice
from services.worker.engine.kv_pool import KvPool, kv_pool_bytes
from services.worker.engine.torch_engine import REHEARSED_PROMPTS, TorchEngine
from services.worker.memory.arena import Arena
from services.worker.memory.loader import load_unit
from shared.checkpoint import inspect_checkpoint
from tests.checkpoints import KINDS, tiny_checkpoint
from tests.services.worker.device.cuda.drivers import PlayedDriver, RecordedGraph
from tests.services.worker.engine.batches import forward, slice_of
from tests.services.worker.engine.flashinfer_twin import FlashInferTwin
from tests.services.worker.engine.harness import DrivenSequence, loaded_engine, prompt_of, reference_logits
from tests.services.worker.engine.test_flashinfer import put_twin


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> FlashInferTwin:
    return put_twin(monkeypatch, torch.float32)


class PlayedDevice(CudaDevice):
    driver: PlayedDriver


@pytest.fixture
def device() -> PlayedDevice:
    return PlayedDevice(PlayedDriver(), lambda memory: torch.zeros(-(-len(memory) // (1 << 18)), dtype=torch.int64))


def graph_engine(kind: str, device: PlayedDevice) -> TorchEngine:
    return loaded_engine(kind, attention="flashinfer", device=device)


def rehearsed(engine: TorchEngine, device: PlayedDevice) -> int:
    """How many graphs came of it."""
    before = device.driver.num_recorded
    while (completion := engine.rehearse()) is not None:
        waited(completion)
    return device.driver.num_recorded - before


def graphs_of(engine: TorchEngine) -> DecodeGraphs:
    (found,) = [value for value in vars(engine).values() if isinstance(value, DecodeGraphs)]
    return found


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Each replay's graph."""
    made: list[RecordedGraph] = []
    replay = RecordedGraph.replay
    monkeypatch.setattr(RecordedGraph, "replay", lambda self: (made.append(self), replay(self))[1])
    return made


def logits_of(engine: TorchEngine, slices: Sequence[Slice]) -> torch.Tensor:
    activation = engine.embed(forward(*slices))
    waited(engine.run_layers(activation, 0, engine.num_layers))
    return engine.head(activation)


def prompts(engine: TorchEngine, count: int) -> list[DrivenSequence]:
    """Sequences of several lengths, at page edges and not, with KV of all but their last token."""
    sequences = []
    for number in range(count):
        tokens = prompt_of((15, 16, 17, 3, 40, 31, 32, 1, 9)[number] + 1, number)
        sequence = DrivenSequence(number, tokens[:-1], range(number * 5, number * 5 + 5))
        logits_of(engine, [sequence.next_slice()])
        sequence.tokens = tokens
        sequences.append(sequence)
    return sequences


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_decodes_of_each_size_have_the_logits_of_transformers(
    kind: str, count: int, device: PlayedDevice, replays: list[RecordedGraph]
) -> None:
    engine = graph_engine(kind, device)
    assert rehearsed(engine, device) == len(FIRST_SIZES)
    sequences = prompts(engine, count)
    replays.clear()  # a prompt of one token is no other than a decode
    for step in range(3):
        found = logits_of(engine, [s.next_slice() for s in sequences]).clone()
        assert len(replays) == step + 1
        expected = torch.stack([reference_logits(kind, s.tokens)[-1] for s in sequences])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        for number, sequence in enumerate(sequences):
            sequence.tokens.append(7 * step + number)


@pytest.mark.usefixtures("twin")
def test_a_size_that_is_not_recorded_runs_all_the_same_and_is_recorded_next(
    device: PlayedDevice, replays: list[RecordedGraph]
) -> None:
    engine = graph_engine("llama", device)
    sequences = prompts(engine, 9)
    for count, num_replays in ((2, 0), (9, 0)):
        chosen = sequences[:count]
        slices = [slice_of(s.sequence_id, s.tokens[-1:], len(s.tokens) - 1, s.blocks, True) for s in chosen]
        expected = torch.stack([reference_logits("llama", s.tokens)[-1] for s in chosen])
        torch.testing.assert_close(logits_of(engine, slices), expected, atol=1e-4, rtol=0)
        assert len(replays) == num_replays
    assert rehearsed(engine, device) == len(FIRST_SIZES) + 1
    torch.testing.assert_close(logits_of(engine, slices), expected, atol=1e-4, rtol=0)
    assert len(replays) == 1
    assert rehearsed(engine, device) == 0


@pytest.mark.usefixtures("twin")
def test_what_is_no_decode_of_all_or_only_some_layers_is_not_run_as_one(
    device: PlayedDevice, replays: list[RecordedGraph]
) -> None:
    engine = graph_engine("llama", device)
    rehearsed(engine, device)
    sequence = prompts(engine, 1)[0]
    activation = engine.embed(forward(sequence.next_slice()))
    for layer in range(engine.num_layers):
        waited(engine.run_layers(activation, layer, layer + 1))
    expected = reference_logits("llama", sequence.tokens)[-1:]
    torch.testing.assert_close(engine.head(activation), expected, atol=1e-4, rtol=0)
    chunk = slice_of(3, [5], 0, range(50, 51), False)
    logits_of(engine, [chunk])
    assert not replays


def test_prompts_are_rehearsed_once_in_nobodys_block(device: PlayedDevice, twin: FlashInferTwin) -> None:
    engine = graph_engine("llama", device)
    rehearsed(engine, device)
    prefills = [call for call in twin.calls if call.function.startswith("prefill.") and call.function.endswith(".run")]
    assert [len(call.args[1]) for call in prefills] == [n for n in sorted(REHEARSED_PROMPTS) for _ in range(2)]
    assert engine.rehearse() is None


@pytest.mark.usefixtures("twin")
def test_rows_of_padding_write_into_nobodys_block_alone(device: PlayedDevice) -> None:
    engine = graph_engine("llama", device)
    sequences = prompts(engine, 3)
    pages = [(pages, pages.clone()) for pages in (*engine.cache.k, *engine.cache.v)]
    rehearsed(engine, device)
    for now, before in pages:
        assert torch.equal(now[:-1], before[:-1])
        before.copy_(now)
    slices = [s.next_slice() for s in sequences]
    logits_of(engine, slices)
    own = [(s.blocks[(len(s.tokens) - 1) // 16], (len(s.tokens) - 1) % 16) for s in sequences]
    for now, before in pages:
        changed = {tuple(at) for at in (now != before).flatten(2).any(-1).nonzero().tolist()}
        assert {at for at in changed if at[0] != engine.cache.scratch_block} == set(own)
        assert changed - set(own) <= {(engine.cache.scratch_block, 0)}


@pytest.mark.usefixtures("twin")
def test_a_model_of_the_same_layout_at_the_same_place_is_served_by_what_was_recorded(
    device: PlayedDevice, replays: list[RecordedGraph]
) -> None:
    checkpoint = inspect_checkpoint(tiny_checkpoint("llama"), with_hash=False)
    layout = checkpoint.layout
    arena, pool = Arena(device.allocate(layout.num_bytes)), KvPool(device.allocate(kv_pool_bytes(layout, 16, 64)))

    def engine() -> TorchEngine:
        return TorchEngine(layout, arena, pool, num_blocks=64, attention="flashinfer", device=device)

    first = engine()
    assert rehearsed(first, device) == len(FIRST_SIZES)  # before there are weights
    second = engine()
    assert graphs_of(second) is graphs_of(first)
    assert rehearsed(second, device) == 0
    for unit in layout.units:
        load_unit(checkpoint, layout, unit, arena)
    sequences = prompts(second, 2)
    found = logits_of(second, [s.next_slice() for s in sequences])
    expected = torch.stack([reference_logits("llama", s.tokens)[-1] for s in sequences])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert len(replays) == 1
    other = TorchEngine(layout, arena, pool, num_blocks=63, attention="flashinfer", device=device)
    assert graphs_of(other) is not graphs_of(first)


@pytest.mark.usefixtures("twin")
def test_a_size_that_cannot_be_recorded_is_tried_once(device: PlayedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = graph_engine("llama", device)

    def full(work: object, pool: object) -> None:
        pools.append(pool)
        raise MemoryError("no memory for a graph")

    pools: list[object] = []
    monkeypatch.setattr(device.driver, "record", full)
    for _ in FIRST_SIZES:
        completion = engine.rehearse()
        assert completion is not None
        with pytest.raises(MemoryError):
            waited(completion)
    sequence = prompts(engine, 1)[0]
    found = logits_of(engine, [sequence.next_slice()])
    torch.testing.assert_close(found, reference_logits("llama", sequence.tokens)[-1:], atol=1e-4, rtol=0)
    assert rehearsed(engine, device) == 0
    assert len(set(map(id, pools))) == len(FIRST_SIZES)  # one that failed may be none to record with


def test_sizes_double_and_the_first_are_among_them() -> None:
    assert all(small * 2 == large for small, large in pairwise(SIZES))
    assert set(FIRST_SIZES) <= set(SIZES)
