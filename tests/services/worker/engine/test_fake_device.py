"""An engine on a device of its own kind, whose tensors have shapes and no numbers: nothing is mixed with the host's,
nothing waits for the device, and what goes there and back is in pinned memory."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.completion import Completion, waited
from services.worker.device.cuda.device import CudaDevice
from services.worker.engine.attention import kinds
from services.worker.engine.forward_batch import Slice
from services.worker.engine.kv_pool import KvPool, kv_pool_bytes
from services.worker.engine.loop import EngineLoop
from services.worker.engine.torch_engine import REHEARSED_PROMPTS, TorchEngine
from services.worker.memory.arena import Arena
from shared.checkpoint import inspect_checkpoint
from shared.messages.generation import SamplingParams, StreamPart
from tests.checkpoints import KINDS, VOCAB_SIZE, tiny_checkpoint
from tests.services.worker.device.cuda.drivers import FAKE, FakeDriver
from tests.services.worker.engine.batches import forward, slice_of

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
NUM_BLOCKS = 64
_COPIES = frozenset({"aten::_to_copy", "aten::to", "aten::copy_"})


class Mixed(AssertionError):
    """What a device would wait for, or take for wrong."""


class Guard(TorchDispatchMode):
    """Fails what copies between host and device but through pinned memory and without waiting, and what takes memory of
    the host that is not pinned."""

    def __init__(self, driver: FakeDriver) -> None:
        super().__init__()
        self._driver = driver
        self._views: dict[int, torch.Tensor] = {}
        """Of pinned memory. Kept, so that none has another's identity."""
        self.num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        hosts = [x for x in given if x.device.type == "cpu"]
        # ``copy_(self, source, non_blocking)``; ``_to_copy(source, ..., non_blocking=...)``
        ends = args[:2] if func.name() == "aten::copy_" else (*given, *made)
        if func.name().partition(".")[0] in _COPIES and len({x.device.type for x in ends}) > 1:
            self.num_copies += 1
            is_ahead = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            cpu = [x for x in ends if x.device.type == "cpu"]
            if not is_ahead or not all(map(self._is_pinned, cpu)):
                raise Mixed(f"{func} between {[x.device for x in given]} and {[x.device for x in made]}")
        elif hosts and any(map(self._is_pinned, hosts)):
            self._views |= {id(x): x for x in made if x.device.type == "cpu"}
        elif not given and any(x.device.type == "cpu" for x in made):
            raise Mixed(f"{func}: memory of the host")
        return out

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._views or self._driver.is_pinned(tensor)


class OnFake:
    """An engine of a checkpoint on the fake device."""

    def __init__(self, kind: str, dtype: str) -> None:
        self.driver = FakeDriver()
        self.guard = Guard(self.driver)
        device = CudaDevice(
            self.driver,
            lambda memory: torch.empty(len(memory) >> 18, dtype=torch.int64, device=memory.device),
            share_bytes=1 << 20,
        )
        layout = inspect_checkpoint(tiny_checkpoint(kind, dtype=dtype), with_hash=False).layout
        arena = Arena(device.allocate(layout.num_bytes))
        pool = KvPool(device.allocate(kv_pool_bytes(layout, 16, NUM_BLOCKS)))
        self.engine = TorchEngine(layout, arena, pool, num_blocks=NUM_BLOCKS, attention="torch_plain", device=device)

    def run(self, ask: Callable[[TorchEngine], Completion[Any]]) -> Any:
        with self.guard:
            return waited(ask(self.engine))


@pytest.fixture(params=[(kind, dtype) for kind in KINDS for dtype in ("float32", "bfloat16")], ids="-".join)
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnFake]:
    monkeypatch.setitem(kinds.ATTENTION, "torch_plain", (FAKE,))
    tiny_checkpoint(request.param[0], dtype=request.param[1])  # with numbers in it
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        yield OnFake(*request.param)


def prompt(sequence_id: int, num_tokens: int, *, start: int = 0, samples: bool = True) -> Slice:
    blocks = range(sequence_id * 10, sequence_id * 10 + 10)
    return slice_of(sequence_id, [5] * num_tokens, start, blocks, samples)


BATCHES = {
    "a prompt": [prompt(0, 40)],
    "prompts": [prompt(0, 16), prompt(1, 17), prompt(2, 1)],
    "a chunk": [prompt(0, 20, samples=False)],
    "behind a prefix": [prompt(0, 20, start=33)],
    "a decode": [prompt(0, 1, start=50)],
    "decodes": [prompt(n, 1, start=30 + n) for n in range(5)],
    "all": [prompt(0, 1, start=9), prompt(1, 30, start=16, samples=False), prompt(2, 12), prompt(3, 1, start=15)],
}


def test_batches_run_on_the_device_alone(fake: OnFake) -> None:
    for slices in BATCHES.values():
        batch = forward(*slices)
        with fake.guard:
            activation = fake.engine.embed(batch)
        for layer in range(fake.engine.num_layers):
            fake.run(functools.partial(TorchEngine.run_layers, activation=activation, first=layer, last=layer + 1))
        with fake.guard:
            logits = fake.engine.head(activation)
        assert logits.shape == (sum(piece.row is not None for piece in batch.slices), VOCAB_SIZE)
        assert logits.device.type == FAKE
    assert fake.guard.num_copies > 0


PARAMS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_p": 0.9},
    {"top_k": 20, "logprobs": 3},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": ((5, 2.0),), "min_tokens": 2, "stop_token_ids": (7,)},
    {"prompt_logprobs": 3, "logprobs": 0},
)


def test_a_loop_samples_in_every_way_on_the_device_alone(fake: OnFake) -> None:
    config = SchedulerConfig(num_blocks=NUM_BLOCKS, block_size=16, prefill_chunk_tokens=24)
    loop, landing = EngineLoop(fake.engine, config, time.monotonic), threading.Event()
    loop.wake = landing.set
    loop.scheduler.table.scores_prompts = True
    for index, params in enumerate(PARAMS):
        sampling = SamplingParams(max_tokens=4, seed=index, **params)  # type: ignore[arg-type]
        prompt = tuple(range(5, 20 + 9 * index))
        loop.add(ActiveSequence(request_id=str(index), attempt=1, gateway_id="g", prompt=prompt, params=sampling))
    endings: dict[str, StreamPart] = {}
    scored: dict[str, int] = {}
    with fake.guard:
        while len(endings) < len(PARAMS):
            step = loop.step()
            if step is None:
                assert landing.wait(60)
                landing.clear()
                continue
            assert step.error is None
            endings |= {part.request_id: part for part in step.outputs if part.finish_reason is not None}
            scored |= {part.request_id: part.prompt.end for part in step.prompts if part.prompt is not None}
    assert {part.finish_reason for part in endings.values()} == {"length"}
    assert scored == {str(n): 15 + 9 * n for n, params in enumerate(PARAMS) if "prompt_logprobs" in params}


def test_a_batch_and_its_kv_move_through_pinned_memory(fake: OnFake) -> None:
    engine, batch = fake.engine, forward(*BATCHES["prompts"])
    tables, ends = [piece.block_table for piece in batch.slices], [len(piece.token_ids) for piece in batch.slices]
    with fake.guard:
        activation = engine.embed(batch)
    fake.run(lambda engine: engine.run_part(activation, 0, 0, 20))
    fake.run(lambda engine: engine.run_part(activation, 0, 20, batch.num_tokens))
    hidden = fake.run(lambda engine: engine.hidden_states(activation))
    assert hidden.nbytes == batch.num_tokens * engine.hidden_bytes_per_token
    assert fake.run(lambda engine: engine.embed_tokens([1, 2, 3])).nbytes == 3 * engine.hidden_bytes_per_token
    kv = fake.run(lambda engine: engine.export_kv(tables, ends, 1))
    assert kv.nbytes == batch.num_tokens * engine.kv_bytes_per_token_layer
    fake.run(lambda engine: engine.import_kv(tables, ends, 1, kv))
    with fake.guard:
        resumed = engine.resume(batch, hidden, next_layer=1)
    for layer in range(1, engine.num_layers):
        fake.run(lambda engine, layer=layer: engine.run_layers(resumed, layer, layer + 1))
    assert len(fake.run(lambda engine: engine.sample(resumed))) == len(batch.rows)


def test_prompts_are_rehearsed_on_the_device_alone(fake: OnFake) -> None:
    count = 0
    with fake.guard:
        while (rehearsed := fake.engine.rehearse()) is not None:
            waited(rehearsed)
            count += 1
    assert count == len(REHEARSED_PROMPTS)


def test_the_guard_sees_what_would_wait(fake: OnFake) -> None:
    device = fake.driver.device
    with fake.guard:
        there = torch.empty(4, device=device)
        with pytest.raises(Mixed):
            there.cpu()
        with pytest.raises(Mixed):
            there.copy_(torch.ones(4))
        with pytest.raises(Mixed):
            torch.zeros(4)
        pinned = fake.driver.pinned(16).tensor
        with pytest.raises(Mixed):
            there.view(torch.uint8).copy_(pinned)
        there.view(torch.uint8).copy_(pinned, non_blocking=True)
        with pytest.raises(DataDependentOutputException):
            there.sum().item()
        with pytest.raises(FakeTensorDeviceMismatchError):
            there.view(torch.uint8) + pinned
