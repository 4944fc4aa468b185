"""The KV pool: views that share one buffer and never overlap."""

from __future__ import annotations

import pytest

from services.worker.engine.kv_pool import KvPool, kv_block_bytes, kv_pool_bytes
from shared.checkpoint import inspect_checkpoint
from shared.errors import BadRequest
from shared.model_spec import ModelSpec
from tests.checkpoints import tiny_checkpoint


def _spec(kind: str = "mistral") -> ModelSpec:
    return inspect_checkpoint(tiny_checkpoint(kind), with_hash=False).spec


def test_pages_of_all_layers_lie_apart_inside_of_the_buffer() -> None:
    spec, pool = _spec(), KvPool.allocate(1 << 20)
    cache = pool.view(spec, 8)
    assert cache.num_blocks == pool.num_blocks(spec, 8) > 0
    for number, pages in enumerate((*cache.k, *cache.v), start=1):
        assert pages.shape == (cache.num_blocks, 8, spec.num_kv_heads, spec.head_dim)
        assert pool.address <= pages.data_ptr() <= pool.address + pool.capacity_bytes - pages.nbytes
        pages.fill_(number)
    for number, pages in enumerate((*cache.k, *cache.v), start=1):
        assert (pages == number).all()


def test_nearly_all_of_the_buffer_is_blocks() -> None:
    spec, pool = _spec(), KvPool.allocate(8 << 20)
    assert pool.num_blocks(spec, 16) * kv_block_bytes(spec, 16) > 0.99 * pool.capacity_bytes


def test_a_new_view_starts_from_zeros_at_the_same_address() -> None:
    pool = KvPool.allocate(1 << 20)
    address = pool.address
    pool.view(_spec(), 16).k[0].fill_(float("nan"))
    assert not pool.view(_spec("llama"), 16).k[0].any()
    assert pool.address == address


@pytest.mark.parametrize("kind", ["mistral", "llama"])
@pytest.mark.parametrize("num_blocks", [1, 7, 200])
def test_a_pool_made_for_so_many_blocks_holds_them(kind: str, num_blocks: int) -> None:
    spec = _spec(kind)
    pool = KvPool.allocate(kv_pool_bytes(spec, 16, num_blocks))
    assert pool.num_blocks(spec, 16) == num_blocks
    assert pool.view(spec, 16, num_blocks).v[-1].shape[0] == num_blocks


@pytest.mark.parametrize("num_blocks", [0, -1, 10_000])
def test_blocks_that_do_not_fit_are_refused(num_blocks: int) -> None:
    with pytest.raises(BadRequest, match="blocks"):
        KvPool.allocate(1 << 20).view(_spec(), 16, num_blocks)
