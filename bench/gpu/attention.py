"""Row ``flashinfer``: what FlashInfer's paged attention costs to compile, to plan and to run, and whether it waits.

The engine plans a batch on the host and runs it layer by layer, in a CUDA graph where it decodes. So beside rates it
matters whether ``plan`` waits for the device, and whether a graph that was captured once is right after another plan.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu.figures import Report, one_line
from bench.gpu.timing import gbytes_per_s, keep_busy, median_host_us, median_ms

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PAGE_TOKENS = 16
NUM_LAYERS = 32
"""One batch's cache of all layers is larger than the second-level cache, even for one request."""
CONTEXT_TOKENS = 1024
BATCHES = (1, 64)
PLAN_BATCHES = (1, 16, 64, 256)
WORKSPACE_BYTES = 256 << 20


def use_folder(folder: Path) -> None:
    """Where FlashInfer compiles; before it is imported."""
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(folder / "flashinfer")


class PagedCache:
    """KV of requests of these lengths, in pages in random order; page numbers lie on the device, the rest is pinned."""

    def __init__(self, lengths: Sequence[int], num_layers: int) -> None:
        import torch

        self.lengths = tuple(lengths)
        counts = [-(-length // PAGE_TOKENS) for length in lengths]
        self.num_pages = sum(counts)
        shape = (self.num_pages, 2, PAGE_TOKENS, KV_HEADS, HEAD_DIM)
        self.layers = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(num_layers)]
        self.indptr = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).pin_memory()
        last = [length - (count - 1) * PAGE_TOKENS for length, count in zip(lengths, counts, strict=True)]
        self.last_page_len = torch.tensor(last, dtype=torch.int32).pin_memory()
        self.pages = torch.randperm(self.num_pages, device="cuda", dtype=torch.int32)
        self.layer_bytes = sum(lengths) * 2 * KV_HEADS * HEAD_DIM * 2
        """That a step reads of a layer: the tokens' own."""

    def plan(self, wrapper: Any) -> None:
        """Plan a decode step of all requests."""
        import torch

        wrapper.plan(
            self.indptr,
            self.pages,
            self.last_page_len,
            QUERY_HEADS,
            KV_HEADS,
            HEAD_DIM,
            PAGE_TOKENS,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )

    def tokens(self, request: int, layer: int) -> Any:
        """[2, heads, tokens, dim] of one request, in float32."""
        first, end = int(self.indptr[request]), int(self.indptr[request + 1])
        pages = self.layers[layer][self.pages[first:end].long()]
        whole = pages.transpose(0, 1).reshape(2, -1, KV_HEADS, HEAD_DIM)[:, : self.lengths[request]]
        return whole.transpose(1, 2).float()

    def reference(self, queries: Any, layer: int) -> Any:
        """PyTorch's attention of one query per request, in float32."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        rows = []
        for request in range(len(self.lengths)):
            keys, values = self.tokens(request, layer)
            query = queries[request].float()[:, None]
            rows.append(scaled_dot_product_attention(query[None], keys[None], values[None], enable_gqa=True)[0, :, 0])
        return torch.stack(rows)


def decode_wrapper(batch: int, most_pages: int, *, graph: bool, tensor_cores: bool) -> Any:
    """FlashInfer's, for ``batch`` requests; with ``graph`` it keeps plans where a captured graph reads them."""
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    if not graph:
        return BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    return BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=torch.zeros(batch + 1, dtype=torch.int32, device="cuda"),
        paged_kv_indices_buffer=torch.zeros(most_pages, dtype=torch.int32, device="cuda"),
        paged_kv_last_page_len_buffer=torch.zeros(batch, dtype=torch.int32, device="cuda"),
    )


def relative_error(found: Any, expected: Any) -> float:
    """‖found − expected‖ / ‖expected‖; NaN where anything is."""
    return float((found.float() - expected).norm() / expected.norm())


def queries_of(batch: int) -> Any:
    import torch

    return torch.randn(batch, QUERY_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")


KERNELS = {"CUDA cores": False, "tensor cores": True}


def measure(report: Report) -> None:
    import torch

    use_folder(report.folder)
    begin_s = time.perf_counter()
    import flashinfer

    report.number("import", time.perf_counter() - begin_s, "s", f"FlashInfer {flashinfer.__version__}")
    torch.manual_seed(4)
    for name, tensor_cores in KERNELS.items():
        with report.part(f"decode, {name}"):
            _measure_decode(report, name, tensor_cores=tensor_cores)
    for name, tensor_cores in KERNELS.items():
        with report.part(f"plan, {name}"):
            _measure_plan(report, name, tensor_cores=tensor_cores)
        with report.part(f"waits, {name}"):
            _measure_waits(report, name, tensor_cores=tensor_cores)
        with report.part(f"graph, {name}"):
            _measure_graph(report, name, tensor_cores=tensor_cores)


def _measure_decode(report: Report, name: str, *, tensor_cores: bool) -> None:
    import torch

    odd = PagedCache((1, 15, 16, 17, 1000, 1024, 5000), 1)
    wrapper = decode_wrapper(len(odd.lengths), odd.num_pages, graph=False, tensor_cores=tensor_cores)
    begin_s = time.perf_counter()
    odd.plan(wrapper)
    report.number(f"first plan, {name}: compilation", time.perf_counter() - begin_s, "s", "bfloat16, head 128, sm_90a")
    queries = queries_of(len(odd.lengths))
    error = relative_error(wrapper.run(queries, odd.layers[0]), odd.reference(queries, 0))
    report.number(f"relative error, {name}", error, "", "against float32; aim: 0.01")
    for batch in BATCHES:
        cache = PagedCache([CONTEXT_TOKENS] * batch, NUM_LAYERS)
        wrapper = decode_wrapper(batch, cache.num_pages, graph=True, tensor_cores=tensor_cores)
        cache.plan(wrapper)
        queries, out = queries_of(batch), queries_of(batch)
        graph = _captured(wrapper, queries, cache, out)
        ms = median_ms(partial(_replay, graph))
        rate = gbytes_per_s(NUM_LAYERS * cache.layer_bytes, ms)
        note = f"of KV; {ms / NUM_LAYERS * 1000:.1f} µs a layer, 32 layers in a graph"
        report.number(f"decode, batch {batch}, {name}", rate, "GB/s", note)
        del graph, cache, wrapper
        torch.cuda.empty_cache()


def _captured(wrapper: Any, queries: Any, cache: PagedCache, out: Any) -> Any:
    import torch

    wrapper.run(queries, cache.layers[0], out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in cache.layers:
            wrapper.run(queries, layer, out=out)
    return graph


def _replay(graph: Any, _: int) -> None:
    graph.replay()


def _measure_plan(report: Report, name: str, *, tensor_cores: bool) -> None:
    for batch in PLAN_BATCHES:
        cache = PagedCache([CONTEXT_TOKENS] * batch, 1)
        wrapper = decode_wrapper(batch, cache.num_pages, graph=True, tensor_cores=tensor_cores)
        report.number(f"plan, batch {batch}, {name}", median_host_us(partial(cache.plan, wrapper)), "µs", "of the host")
    queries = queries_of(PLAN_BATCHES[-1])
    taken_us = median_host_us(lambda: wrapper.run(queries, cache.layers[0]))
    report.number(f"run, batch {PLAN_BATCHES[-1]}, {name}", taken_us, "µs", "of the host")


def _measure_waits(report: Report, name: str, *, tensor_cores: bool) -> None:
    """By what PyTorch sees of it, and by whether a busy device is still busy afterwards."""
    import torch

    cache = PagedCache([CONTEXT_TOKENS] * 16, 1)
    wrapper = decode_wrapper(16, cache.num_pages, graph=True, tensor_cores=tensor_cores)
    queries, out = queries_of(16), queries_of(16)
    cache.plan(wrapper)
    wrapper.run(queries, cache.layers[0], out=out)
    torch.cuda.synchronize()
    for what, work in (
        ("plan", lambda: cache.plan(wrapper)),
        ("run", lambda: wrapper.run(queries, cache.layers[0], out=out)),
    ):
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
            seen = "PyTorch sees no waiting"
        except RuntimeError as error:
            seen = one_line(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        keep_busy()
        cuda: Any = torch.cuda
        end = cuda.Event()
        end.record()
        begin_s = time.perf_counter()
        work()
        taken_ms = (time.perf_counter() - begin_s) * 1000
        waited = "waited for it" if end.query() else "did not wait"
        torch.cuda.synchronize()
        report.text(f"{what} waits, {name}?", f"{seen}; behind a busy device it {waited} ({taken_ms:.2f} ms)")


def _measure_graph(report: Report, name: str, *, tensor_cores: bool) -> None:
    """Captured with one plan, replayed with others: longer, shorter, other pages."""
    import torch

    first = PagedCache([CONTEXT_TOKENS] * 16, 1)
    wrapper = decode_wrapper(16, 16 * 4096 // PAGE_TOKENS, graph=True, tensor_cores=tensor_cores)
    queries, out = queries_of(16), queries_of(16)
    first.plan(wrapper)
    pool = torch.randn(16 * 4096 // PAGE_TOKENS, *first.layers[0].shape[1:], dtype=torch.bfloat16, device="cuda")
    first.layers[0] = pool
    graph = _captured(wrapper, queries, first, out)
    errors: list[float] = []
    for lengths in (
        [CONTEXT_TOKENS] * 16,
        [1 + 250 * number for number in range(16)],
        [4096] * 16,
        [1] * 16,
        [4096] + [7] * 15,
    ):
        cache = PagedCache(lengths, 0)
        cache.layers.append(pool)
        cache.plan(wrapper)
        queries.normal_()
        out.fill_(float("nan"))
        graph.replay()
        error = relative_error(out, cache.reference(queries, 0))
        errors.append(error)
    worst = math.nan if any(map(math.isnan, errors)) else max(errors)
    report.number(f"replay after other plans, {name}", worst, "", "worst relative error of five plans")
