"""The KV pool: views that share one buffer and never overlap."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.host import HOST
from services.worker.device.memory import HUGE_PAGE_BYTES, HostMemory
from services.worker.engine.kv_pool import SPARE_BYTES, KvCache, KvPool, kv_block_bytes, kv_pool_bytes
from services.worker.engine.loop import EngineLoop
from services.worker.engine.torch_engine import TorchEngine
from services.worker.memory.arena import Arena
from shared.checkpoint import inspect_checkpoint
from shared.errors import BadRequest
from shared.layout import ArenaLayout
from shared.messages.generation import SamplingParams
from tests.checkpoints import tiny_checkpoint


def _layout(kind: str = "mistral") -> ArenaLayout:
    return inspect_checkpoint(tiny_checkpoint(kind), with_hash=False).layout


def test_pages_of_all_layers_lie_apart_inside_of_the_buffer() -> None:
    layout, held = _layout(), HostMemory(1 << 20)
    pool = KvPool(held)
    cache = pool.view(layout, 8)
    assert cache.num_blocks == pool.num_blocks(layout, 8) > 0
    for number, pages in enumerate((*cache.k, *cache.v), start=1):
        assert pages.shape == (cache.num_blocks + 1, 8, layout.num_kv_heads, layout.spec.head_dim)
        assert held.address <= pages.data_ptr() <= held.address + pool.capacity_bytes - pages.nbytes
        pages.fill_(number)
    for number, pages in enumerate((*cache.k, *cache.v), start=1):
        assert (pages == number).all()


def test_nearly_all_of_the_buffer_is_blocks() -> None:
    layout, pool = _layout(), KvPool(HOST.allocate(8 << 20))
    assert pool.num_blocks(layout, 16) * kv_block_bytes(layout, 16) > 0.99 * pool.capacity_bytes


def test_a_new_view_starts_from_zeros_at_the_same_address() -> None:
    held = HostMemory(1 << 20)
    pool = KvPool(held)
    address = held.address
    pool.view(_layout(), 16).k[0].fill_(float("nan"))
    assert not pool.view(_layout("llama"), 16).k[0].any()
    assert held.address == address


@pytest.mark.parametrize("kind", ["mistral", "llama"])
@pytest.mark.parametrize("num_blocks", [1, 7, 200])
def test_a_pool_made_for_so_many_blocks_holds_them(kind: str, num_blocks: int) -> None:
    layout = _layout(kind)
    pool = KvPool(HOST.allocate(kv_pool_bytes(layout, 16, num_blocks)))
    assert pool.num_blocks(layout, 16) == num_blocks
    assert pool.view(layout, 16, num_blocks).v[-1].shape[0] == num_blocks + 1


@pytest.mark.parametrize("num_blocks", [0, -1, 10_000])
def test_blocks_that_do_not_fit_are_refused(num_blocks: int) -> None:
    with pytest.raises(BadRequest, match="blocks"):
        KvPool(HOST.allocate(1 << 20)).view(_layout(), 16, num_blocks)


def _committed(tensor: torch.Tensor) -> bool:
    """Whether all pages of a tensor are in memory, as the kernel says."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes = tensor.data_ptr() + tensor.nbytes - begin
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), pages) == 0
    return all(page & 1 for page in pages)


def test_the_first_blocks_of_every_layer_can_be_committed_without_a_change_to_what_is_there() -> None:
    layout = _layout()
    pool = KvPool(HOST.allocate(kv_pool_bytes(layout, 16, 40_000)))
    cache = pool.view(layout, 16)
    for pages in (*cache.k, *cache.v):
        assert not _committed(pages[:30])
        pages[0, 0] = 7
    pool.populate_blocks(cache, 0, 30)
    for pages in (*cache.k, *cache.v):
        assert _committed(pages[:30])
        assert not _committed(pages)
        assert (pages[0, 0] == 7).all()
        assert not pages[0, 1:].any()


@pytest.mark.parametrize("num_blocks", [1, 100, 10_000])
def test_the_blocks_in_the_pages_of_the_first_ones_are_whole_pages_of_the_fullest_layer(num_blocks: int) -> None:
    layout = _layout()
    pool = KvPool(HOST.allocate(kv_pool_bytes(layout, 16, 40_000)))
    cache = pool.view(layout, 16)
    found = pool.blocks_in_pages_of(cache, num_blocks)
    assert found >= num_blocks
    ends = [pages[found - 1].data_ptr() + pages[0].nbytes for pages in (*cache.k, *cache.v)]
    last_asked = [pages[num_blocks - 1].data_ptr() + pages[0].nbytes for pages in (*cache.k, *cache.v)]
    for end, asked in zip(ends, last_asked, strict=True):
        assert (end - 1) // HUGE_PAGE_BYTES == (asked - 1) // HUGE_PAGE_BYTES
    assert any(-end % HUGE_PAGE_BYTES < cache.k[0][0].nbytes for end in ends)
    assert pool.blocks_in_pages_of(cache, 10**9) == cache.num_blocks


def test_a_pool_that_rests_keeps_some_memory_and_the_next_view_starts_from_zeros() -> None:
    held = HostMemory(2 * SPARE_BYTES)
    pool = KvPool(held)
    pool.view(_layout(), 16).v[-1].fill_(7)
    pool.rest()
    kept = torch.from_numpy(held.bytes)
    assert _committed(kept[:SPARE_BYTES])
    assert not _committed(kept[SPARE_BYTES : 2 * SPARE_BYTES])
    kept[0] = 7
    assert not pool.view(_layout(), 16).k[0].any()


def test_sixteen_prompts_touch_no_memory_but_what_was_prepared() -> None:
    layout, held = _layout("llama"), HostMemory(256 << 20)
    pool = KvPool(held)
    engine = TorchEngine(layout, Arena(HOST.allocate(layout.num_bytes)), pool)
    config = SchedulerConfig(
        num_blocks=engine.num_blocks, block_size=engine.block_size, prepared_blocks=engine.prepared_blocks
    )
    loop = EngineLoop(engine, config, clock=lambda: 0.0)
    for number in range(16):
        params = SamplingParams(max_tokens=40, seed=0, temperature=0.0, ignore_eos=True)
        prompt = tuple(range(3, 13 + number))
        loop.add(ActiveSequence(request_id=str(number), attempt=1, gateway_id="g", prompt=prompt, params=params))
    while loop.has_work:
        loop.step()
    memory, first = torch.from_numpy(held.bytes), engine.prepared_blocks
    for pages in (*engine.cache.k, *engine.cache.v):
        end = pages[first - 1].data_ptr() + pages[0].nbytes - held.address
        begin = -(-end // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        until = (pages.data_ptr() - held.address + pages.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        assert until - begin > 8 * HUGE_PAGE_BYTES
        assert not any(_committed(memory[at : at + 1]) for at in range(begin, until, HUGE_PAGE_BYTES))


def test_only_the_pages_of_the_layers_that_are_asked_for_are_touched() -> None:
    no_pages = torch.empty(0)  # whoever touches them gets an error
    k, v = (torch.arange(24.0).view(3, 4, 1, 2) + base for base in (0, 100))
    cache = KvCache((no_pages, k, no_pages), (no_pages, v, no_pages), num_blocks=3, block_size=4)
    slots, kv = torch.tensor([9, 0]), torch.empty(1, 2, 2, 1, 2)
    cache.gather(slots, kv, 1)
    assert kv.flatten().tolist() == [18, 19, 0, 1, 118, 119, 100, 101]
    cache.scatter(slots, -kv, 1)
    assert k[2, 1].tolist() == [[-18, -19]]
    assert v[0, 0].tolist() == [[-100, -101]]
    assert k[0, 1].tolist() == [[2, 3]]
