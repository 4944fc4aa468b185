"""Row ``decode``: floors of a decode step and of a prompt, of a Llama of 8 B parameters in bfloat16.

Products alone, with random weights: what a step of the engine can come near to, and what launching from Python costs
without a graph. Then the same with FlashInfer's attention over 1,024 tokens per request, in one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.gpu.attention import HEAD_DIM, KV_HEADS, QUERY_HEADS, PagedCache, decode_wrapper, use_folder
from bench.gpu.ceilings import copy_gbytes_per_s, product_tflops
from bench.gpu.figures import Report
from bench.gpu.timing import captured, gbytes_per_s, median_ms, tflops

NUM_LAYERS = 32
HIDDEN = 4096
QKV = (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM
INNER = 14336
VOCABULARY = 128256
SHAPES = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
"""[out, in] of a layer's products: qkv, o, gate_up, down."""
LAYER_NUMBERS = sum(rows * columns for rows, columns in SHAPES)
WEIGHT_BYTES = 2 * (NUM_LAYERS * LAYER_NUMBERS + VOCABULARY * HIDDEN)
"""Read by a step: all but the embedding."""
BATCHES = (1, 64)
PROMPT_TOKENS = 8192
CONTEXT_TOKENS = 1024


class Products:
    """All products of a step, in order, each reading what the one before it wrote."""

    def __init__(self, num_tokens: int, layers: Any, head: Any) -> None:
        import torch

        def space(columns: int) -> Any:
            return torch.randn(num_tokens, columns, dtype=torch.bfloat16, device="cuda")

        self.layers, self.head = layers, head
        self.hidden, self.qkv, self.gate_up = space(HIDDEN), space(QKV), space(2 * INNER)
        self.logits: Any = space(VOCABULARY) if head is not None else None
        self.num_tokens = num_tokens

    def run(self, attention: Any = None) -> None:
        """``attention(layer, queries)`` gives what o reads; without it o reads the queries."""
        import torch

        for number, (qkv, o, gate_up, down) in enumerate(self.layers):
            torch.mm(self.hidden, qkv.t(), out=self.qkv)
            queries = self.qkv[:, :HIDDEN]
            read = queries if attention is None else attention(number, queries)
            torch.mm(read, o.t(), out=self.hidden)
            torch.mm(self.hidden, gate_up.t(), out=self.gate_up)
            torch.mm(self.gate_up[:, :INNER], down.t(), out=self.hidden)
        if self.logits is not None:
            torch.mm(self.hidden, self.head.t(), out=self.logits)


def _graph_ms(work: Callable[[], object]) -> float:
    graph = captured(work)
    return median_ms(lambda _: graph.replay())


def _eager_ms(work: Callable[[], object]) -> float:
    return median_ms(lambda _: work())


def measure(report: Report) -> None:
    import torch

    ceiling_gbytes_per_s, product = copy_gbytes_per_s(), product_tflops()
    report.number("ceiling here: copy", ceiling_gbytes_per_s, "GB/s")
    report.number("ceiling here: product", product, "TFLOP/s")
    torch.cuda.empty_cache()
    torch.manual_seed(2)

    def weight(rows: int, columns: int) -> Any:
        # Of this size numbers stay of the order of one from layer to layer.
        return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda").mul_(columns**-0.5)

    layers = [tuple(weight(*shape) for shape in SHAPES) for _ in range(NUM_LAYERS)]
    head = weight(VOCABULARY, HIDDEN)
    report.number("weights", WEIGHT_BYTES / 1e9, "GB")
    floors_ms: dict[int, float] = {}
    for batch in BATCHES:
        with report.part(f"products, batch {batch}"):
            products = Products(batch, layers, head)
            ms = floors_ms[batch] = _graph_ms(products.run)
            share = gbytes_per_s(WEIGHT_BYTES, ms) / ceiling_gbytes_per_s
            report.number(f"products, batch {batch}, graph", ms, "ms", f"{share:.1%} of the copy's rate")
            eager_ms = _eager_ms(products.run)
            report.number(f"products, batch {batch}, eager", eager_ms, "ms", f"{eager_ms / ms:.2f} times the graph")
            finite = bool(torch.isfinite(products.logits).all())
            report.text(f"logits, batch {batch}", "finite" if finite else "NOT finite")
    with report.part("prompt"):
        prompt = Products(PROMPT_TOKENS, layers, None)
        ms = median_ms(lambda _: prompt.run(), rounds=5)
        rate = tflops(2 * PROMPT_TOKENS * NUM_LAYERS * LAYER_NUMBERS, ms)
        report.number(f"products of {PROMPT_TOKENS} tokens", rate, "TFLOP/s", f"{rate / product:.1%} of the product's")
    for batch in BATCHES:
        with report.part(f"step with attention, batch {batch}"):
            _measure_step(report, batch, Products(batch, layers, head), floors_ms[batch], ceiling_gbytes_per_s)


def _measure_step(report: Report, batch: int, products: Products, floor_ms: float, ceiling_gbytes_per_s: float) -> None:
    import torch

    use_folder(report.folder)
    lengths = [CONTEXT_TOKENS] * batch
    cache = PagedCache(lengths, NUM_LAYERS)
    wrapper = decode_wrapper(batch, cache.num_pages, graph=True, tensor_cores=True)
    cache.plan(wrapper)
    out = torch.empty(batch, QUERY_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")

    def attention(layer: int, queries: Any) -> Any:
        wrapper.run(queries.view(batch, QUERY_HEADS, HEAD_DIM), cache.layers[layer], out=out)
        return out.view(batch, HIDDEN)

    ms = _graph_ms(lambda: products.run(attention))
    num_bytes = WEIGHT_BYTES + NUM_LAYERS * cache.layer_bytes
    share = gbytes_per_s(num_bytes, ms) / ceiling_gbytes_per_s
    note = f"{share:.1%} of the copy's rate, {ms / floor_ms:.2f} times the products"
    report.number(f"step with attention, batch {batch}, graph", ms, "ms", note)
    eager_ms = _eager_ms(lambda: products.run(attention))
    report.number(f"step with attention, batch {batch}, eager", eager_ms, "ms", f"{eager_ms / ms:.2f} times the graph")
