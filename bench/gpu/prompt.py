"""Row ``prompt``: FlashInfer's attention of a long prompt over the paged cache, by the generations of its kernels."""

from __future__ import annotations

import time

from bench.gpu.attention import (
    HEAD_DIM,
    KV_HEADS,
    PAGE_TOKENS,
    QUERY_HEADS,
    WORKSPACE_BYTES,
    PagedCache,
    queries_of,
    relative_error,
    use_folder,
)
from bench.gpu.figures import Report
from bench.gpu.timing import median_ms, tflops

PROMPT_TOKENS = 8192
NOTES = {"fa2": "decode on tensor cores has the same kernels", "fa3": "Hopper only"}


def measure(report: Report) -> None:
    import torch

    use_folder(report.folder)
    torch.manual_seed(6)
    for backend in NOTES:
        with report.part(f"prompt, {backend}"):
            _measure_backend(report, backend)


def _measure_backend(report: Report, backend: str) -> None:
    import torch
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    from torch.nn.functional import scaled_dot_product_attention

    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    cache = PagedCache([PROMPT_TOKENS], 1)

    def plan(first: int) -> None:
        """The prompt's tokens from ``first`` on, behind those before."""
        begins = torch.tensor([0, PROMPT_TOKENS - first], dtype=torch.int32).pin_memory()
        wrapper.plan(
            begins,
            cache.indptr,
            cache.pages,
            cache.last_page_len,
            QUERY_HEADS,
            KV_HEADS,
            HEAD_DIM,
            PAGE_TOKENS,
            causal=True,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )

    begin_s = time.perf_counter()
    plan(PROMPT_TOKENS - 512)
    report.number(f"first plan, {backend}: compilation", time.perf_counter() - begin_s, "s", NOTES[backend])
    queries = queries_of(512)
    keys, values = cache.tokens(0, 0)
    mask = torch.ones(512, PROMPT_TOKENS, dtype=torch.bool, device="cuda").tril(PROMPT_TOKENS - 512)
    expected = scaled_dot_product_attention(
        queries.float().transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )[0].transpose(0, 1)
    error = relative_error(wrapper.run(queries, cache.layers[0]), expected)
    report.number(f"relative error of the last 512 tokens, {backend}", error, "", "against float32; aim: 0.01")
    plan(0)
    queries = queries_of(PROMPT_TOKENS)
    ms = median_ms(lambda _: wrapper.run(queries, cache.layers[0]))
    operations = 4 * QUERY_HEADS * HEAD_DIM * PROMPT_TOKENS * (PROMPT_TOKENS + 1) / 2
    note = f"{ms:.2f} ms a layer, causal"
    report.number(f"attention of {PROMPT_TOKENS} tokens, {backend}", tflops(operations, ms), "TFLOP/s", note)
