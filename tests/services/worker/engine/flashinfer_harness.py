"""What tests of FlashInfer's backend have in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch

from services.worker.device.host import HOST
from services.worker.engine import kernels, rope
from services.worker.engine.attention import flashinfer, kinds
from services.worker.engine.attention.backend import PagedBatch
from services.worker.engine.attention.flashinfer import FlashInferAttention
from services.worker.engine.torch_engine import TorchEngine
from shared.layout import layout_of
from shared.model_spec import ModelSpec
from tests.services.worker.engine.flashinfer_twin import FlashInferTwin
from tests.services.worker.engine.harness import loaded_engine, reference_logits

SCATTERED = tuple(range(200, 0, -3))


def put_twin(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> FlashInferTwin:
    """Takes ``dtype``; everything that runs on FlashInfer on a GPU runs on the twin."""
    run_on_flashinfer(monkeypatch, dtype)
    twin = FlashInferTwin(dtypes=frozenset({dtype}))
    twin.put(monkeypatch)
    return twin


def run_on_flashinfer(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Have what is of ``dtype`` and the size of the tiny checkpoints computed there, on the CPU."""
    monkeypatch.setattr(flashinfer, "FLASHINFER_DTYPES", frozenset({dtype}))
    monkeypatch.setattr(flashinfer, "HEAD_DIMS", frozenset({16, 24}))
    monkeypatch.setattr(flashinfer, "FLOAT_WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setitem(kinds.ATTENTION, "flashinfer", ("cpu",))
    monkeypatch.setattr(kernels, "on_flashinfer", lambda x: x.dtype == dtype and x.shape[0] > 0)
    monkeypatch.setattr(rope, "is_fused", lambda device, of, head_dim: of == dtype)


def attention_of(engine: TorchEngine) -> FlashInferAttention:
    found = [value for value in vars(engine).values() if isinstance(value, FlashInferAttention)]
    assert len(found) == 1
    return found[0]


loaded = partial(loaded_engine, attention="flashinfer")


def assert_logits(logits: torch.Tensor, kind: str, prompts: Sequence[Sequence[int]]) -> None:
    """A row for each of the prompts, behind its last token."""
    expected = torch.stack([reference_logits(kind, prompt)[-1] for prompt in prompts])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def spec_of(head_dim: int, dtype: str = "float32", window: int | None = None) -> ModelSpec:
    return ModelSpec(
        architecture="MistralForCausalLM",
        dtype=dtype,
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        max_position=4096,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        sliding_window=window,
    )


def made(window: int | None = None) -> tuple[FlashInferAttention, tuple[torch.Tensor, torch.Tensor]]:
    """A backend, and one layer's caches of 8 blocks of 16."""
    torch.manual_seed(5)
    k_cache, v_cache = torch.randn(2, 8, 16, 2, 16)
    return FlashInferAttention(layout_of(spec_of(16, window=window)), 16, HOST.tensors), (k_cache, v_cache)


def decode_of(lengths: Sequence[int]) -> PagedBatch:
    """One query each behind so many tokens, in pages from the last on down."""
    num_pages = [-(-length // 16) for length in lengths]
    indptr = np.cumsum([0, *num_pages])
    arrays = (
        range(len(lengths) + 1),
        indptr,
        range(7, 7 - int(indptr[-1]), -1),
        [n - 16 * (p - 1) for n, p in zip(lengths, num_pages, strict=True)],
    )
    return PagedBatch(*(np.array(array, dtype=np.int32) for array in arrays))
