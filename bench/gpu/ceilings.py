"""Row ``copy``: what the device can do at best, against which the other rows are read."""

from __future__ import annotations

from bench.gpu.figures import Report
from bench.gpu.timing import gbytes_per_s, median_ms, tflops

COPY_BYTES = 4 << 30
PRODUCT_SIZE = 8192


def copy_gbytes_per_s() -> float:
    """Of a copy inside the device, bytes read and bytes written both counted."""
    import torch

    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return gbytes_per_s(2 * COPY_BYTES, median_ms(lambda _: target.copy_(source)))


def product_tflops() -> float:
    """Of a large product in bfloat16, on random numbers: zeros are faster."""
    import torch

    left, right = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    target = torch.empty_like(left)
    return tflops(2 * PRODUCT_SIZE**3, median_ms(lambda _: torch.mm(left, right, out=target), rounds=30))


def read_gbytes_per_s() -> float:
    """Of a sum over device memory."""
    import torch

    source = torch.randn(COPY_BYTES // 4, device="cuda")
    return gbytes_per_s(COPY_BYTES, median_ms(lambda _: source.sum()))


def measure(report: Report) -> None:
    report.number("device to device, read + written", copy_gbytes_per_s(), "GB/s", "4 GiB")
    report.number("read alone (a sum)", read_gbytes_per_s(), "GB/s", "4 GiB")
    report.number(f"product {PRODUCT_SIZE}³, bfloat16", product_tflops(), "TFLOP/s")
