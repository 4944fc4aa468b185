"""Device time by events, and the arithmetic of rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any


def median_ms(work: Callable[[int], object], *, rounds: int = 20, warm_ups: int = 3) -> float:
    """Milliseconds on the device from before ``work`` to after it, the median.

    ``work`` gets the round's number, so that it can take turns with memory that the cache would keep. Where it launches
    little work at a time, this is the time of launching: capture it in a graph first.
    """
    import torch

    for number in range(warm_ups):
        work(number)
    torch.cuda.synchronize()
    cuda: Any = torch.cuda
    events = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for number, (begin, end) in enumerate(events):
        begin.record()
        work(number)
        end.record()
    torch.cuda.synchronize()
    return median(float(begin.elapsed_time(end)) for begin, end in events)


def median_host_us(work: Callable[[], object], *, rounds: int = 50, warm_ups: int = 5) -> float:
    """Microseconds of the calling thread, the median, with a device that has nothing else to do."""
    import torch

    taken: list[float] = []
    for _ in range(warm_ups + rounds):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        work()
        taken.append((time.perf_counter() - begin_s) * 1e6)
    torch.cuda.synchronize()
    return median(taken[warm_ups:])


def captured(work: Callable[[], object]) -> Any:
    """``work`` as a CUDA graph, without the time of launching."""
    import torch

    cuda: Any = torch.cuda
    stream = cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def keep_busy() -> None:
    """Some 80 ms of work for the device, launched and not waited for."""
    import torch

    large = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    for _ in range(60):
        torch.mm(large, large)


def gbytes_per_s(num_bytes: float, ms: float) -> float:
    """In 1e9 bytes per second."""
    return num_bytes / ms / 1e6


def tflops(operations: float, ms: float) -> float:
    """In 1e12 operations per second, a multiplication and an addition counted as two."""
    return operations / ms / 1e9
