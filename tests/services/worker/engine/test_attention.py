"""The paged backends that run anywhere, against attention written out token by token in float64."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from services.worker.device.tensors import HostTensors
from services.worker.engine.attention import torch_cpu, torch_plain
from services.worker.engine.attention.backend import AttentionBackend, AttentionPlan, PagedBatch
from services.worker.engine.attention.torch_cpu import TorchAttention
from services.worker.engine.attention.torch_plain import PlainAttention
from shared.layout import layout_of
from shared.model_spec import ModelSpec

BLOCK_SIZE = 8
NUM_BLOCKS = 400


def _plan(
    backend: AttentionBackend, qo_indptr: list[int], kv_indptr: list[int], pages: list[int], last_page_len: list[int]
) -> AttentionPlan:
    batch = PagedBatch(*(np.array(x, dtype=np.int32) for x in (qo_indptr, kv_indptr, pages, last_page_len)))
    return backend.plan(batch, torch.from_numpy(batch.pages), torch.empty(0, dtype=torch.int64))


def _spec(window: int | None, num_heads: int, num_kv_heads: int, dtype: str) -> ModelSpec:
    return ModelSpec(
        architecture="MistralForCausalLM",
        dtype=dtype,
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        max_position=4096,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        sliding_window=window,
    )


def _written_out(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """``q [n, Hq, D]`` are the last of the positions of ``keys, values [m, Hkv, D]``."""
    group = q.shape[1] // keys.shape[1]
    out = torch.empty_like(q)
    for i in range(len(q)):
        position = len(keys) - len(q) + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            seen = keys[first : position + 1, head // group]
            weights = torch.softmax(seen @ q[i, head] / q.shape[2] ** 0.5, 0)
            out[i, head] = weights @ values[first : position + 1, head // group]
    return out


@pytest.mark.parametrize("window", [None, 13, 300])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("in_place_bytes", [0, 1 << 30], ids=["in place", "padded"])
@pytest.mark.parametrize("run_blocks", [1000, 9, 1], ids=["a run", "runs", "scattered"])
def test_a_mixed_batch_attends_as_written_out(
    monkeypatch: pytest.MonkeyPatch, window: int | None, heads: tuple[int, int], in_place_bytes: int, run_blocks: int
) -> None:
    monkeypatch.setattr(torch_cpu, "IN_PLACE_BYTES", in_place_bytes)
    monkeypatch.setattr(torch_cpu, "QUERY_TILE_TOKENS", 16)
    _check(_spec(window, *heads, "float32"), run_blocks, atol=1e-5)


@pytest.mark.parametrize("window", [None, 13, 300])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("tile_tokens", [7, 256])
def test_plain_operations_attend_as_written_out(
    monkeypatch: pytest.MonkeyPatch, window: int | None, heads: tuple[int, int], tile_tokens: int
) -> None:
    monkeypatch.setattr(torch_plain, "QUERY_TILE_TOKENS", tile_tokens)
    _check(_spec(window, *heads, "float32"), run_blocks=1, atol=1e-5, make=PlainAttention)


def test_plain_operations_round_what_they_computed_in_float32() -> None:
    _check(_spec(20, 4, 2, "bfloat16"), run_blocks=1, atol=1e-2, make=PlainAttention)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("run_blocks", [1000, 9])
def test_lower_precision_attends_alike(dtype: str, run_blocks: int) -> None:
    _check(_spec(20, 4, 2, dtype), run_blocks, atol=3e-2)


@pytest.mark.parametrize("window", [None, 20])
def test_prefill_in_float16_is_attended_in_float32_and_rounded(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setattr(torch_cpu, "CAST_DTYPES", frozenset({torch.float16}))  # also on a machine that has it
    monkeypatch.setattr(torch_cpu, "QUERY_TILE_TOKENS", 16)
    torch.manual_seed(2)
    q, k, v = torch.randn(48, 4, 16), *(torch.randn(NUM_BLOCKS, BLOCK_SIZE, 2, 16) for _ in range(2))
    outputs = []
    for dtype in (torch.float16, torch.float32):
        backend = TorchAttention(
            layout_of(_spec(window, 4, 2, str(dtype).removeprefix("torch."))), BLOCK_SIZE, HostTensors()
        )
        plan = _plan(backend, [0, 48], [0, 30], list(range(60, 0, -2)), [BLOCK_SIZE])
        outputs.append(backend.run(plan, *(x.half().to(dtype) for x in (q, k, v))))
    assert torch.equal(outputs[0], outputs[1].half())


@pytest.mark.parametrize("window", [None, 70])
def test_a_chunk_of_several_tiles_gathers_its_prefix_once_and_makes_its_mask_once_for_all_layers(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setattr(torch_cpu, "QUERY_TILE_TOKENS", 16)
    spec = _spec(window, 4, 2, "float32")
    pages = list(range(2 * 30, 0, -2))  # no run
    backend = TorchAttention(layout_of(spec), BLOCK_SIZE, HostTensors())
    plan = _plan(backend, [0, 48], [0, 30], pages, [BLOCK_SIZE])
    masks: list[torch.Tensor] = []
    gathers: list[int] = []
    attend, index_select = torch_cpu.scaled_dot_product_attention, torch.Tensor.index_select

    def noted(*args: torch.Tensor, attn_mask: torch.Tensor | None = None, **kwargs: object) -> torch.Tensor:
        assert attn_mask is not None
        assert attn_mask.dtype == torch.float32
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **kwargs)

    def counted(cache: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        gathers.append(id(cache))
        return index_select(cache, dim, index)

    monkeypatch.setattr(torch_cpu, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(torch.Tensor, "index_select", counted)
    caches = [torch.randn(NUM_BLOCKS, BLOCK_SIZE, 2, 16) for _ in range(4)]
    q = torch.randn(48, 4, 16)
    for k_cache, v_cache in (caches[:2], caches[2:]):
        backend.run(plan, q, k_cache, v_cache)
    assert gathers == [id(cache) for cache in caches]
    assert [id(mask) for mask in masks[:3]] == [id(mask) for mask in masks[3:]]


def _check(
    spec: ModelSpec, run_blocks: int, atol: float, make: Callable[..., AttentionBackend] = TorchAttention
) -> None:
    draw = random.Random(1)
    torch.manual_seed(1)
    dtype = getattr(torch, spec.dtype)
    # What no sequence owns is NaN: whoever reads it shows.
    shape = (NUM_BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
    runs = [list(range(NUM_BLOCKS))[first : first + run_blocks] for first in range(0, NUM_BLOCKS, run_blocks)]
    draw.shuffle(runs)
    free = [block for run in runs for block in run]
    # (queries, keys): decode slices of many lengths between prefills with and without a prefix
    sizes = [(1, 1), (1, 40), (30, 30), (1, 8), (50, 120), (1, 200), (1, 9), (1, 399), (2, 3), (1, 41)]
    qo_indptr, kv_indptr, kv_indices, last_page_len, expected = [0], [0], [], [], []
    q = torch.randn(sum(n for n, _ in sizes), spec.num_heads, spec.head_dim, dtype=dtype)
    for num_queries, num_keys in sizes:
        keys, values = (torch.randn(num_keys, spec.num_kv_heads, spec.head_dim, dtype=dtype) for _ in range(2))
        num_pages = -(-num_keys // BLOCK_SIZE)
        pages, free = free[:num_pages], free[num_pages:]
        for position in range(num_keys):
            k_cache[pages[position // BLOCK_SIZE], position % BLOCK_SIZE] = keys[position]
            v_cache[pages[position // BLOCK_SIZE], position % BLOCK_SIZE] = values[position]
        own = q[qo_indptr[-1] : qo_indptr[-1] + num_queries]
        expected.append(_written_out(own.double(), keys.double(), values.double(), spec.sliding_window))
        qo_indptr.append(qo_indptr[-1] + num_queries)
        kv_indices += pages
        kv_indptr.append(len(kv_indices))
        last_page_len.append(num_keys - (num_pages - 1) * BLOCK_SIZE)
    backend = make(layout_of(spec), BLOCK_SIZE, HostTensors())
    plan = _plan(backend, qo_indptr, kv_indptr, kv_indices, last_page_len)
    for _ in range(2):  # a plan serves every layer
        out = backend.run(plan, q, k_cache, v_cache)
        torch.testing.assert_close(out.double(), torch.cat(expected).flatten(1), atol=atol, rtol=0)
