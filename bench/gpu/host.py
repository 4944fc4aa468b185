"""Row ``host``: between host memory and the device, and what a worker pays once.

Host copies of models are large, made long before they are needed, and may come from files. What decides their design is
whether memory that exists already can be pinned in place, and what a copy from unpinned memory costs.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.gpu.figures import Report
from bench.gpu.timing import gbytes_per_s, median_ms

NUM_BYTES = 1 << 30
CHUNK_SIZES = (256 << 10, 1 << 20, 8 << 20)
_BEGINNING = """
import time
begin = time.time()
import torch
print("import of torch", time.time() - begin, flush=True)
begin = time.time()
torch.cuda.init()
torch.empty(1, device="cuda")
torch.cuda.synchronize()
print("context and first allocation", time.time() - begin, flush=True)
begin = time.time()
one = torch.randn(64, 64, dtype=torch.bfloat16, device="cuda")
torch.cuda.synchronize()
print("first random numbers", time.time() - begin, flush=True)
begin = time.time()
torch.mm(one, one)
torch.cuda.synchronize()
print("first product (cuBLAS)", time.time() - begin, flush=True)
begin = time.time()
large = torch.empty(32 << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("32 GiB of device memory", time.time() - begin, flush=True)
begin = time.time()
pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
print("1 GiB of pinned memory", time.time() - begin, flush=True)
"""
"""Of a new process: wall clocks, since each line is printed when it is over."""


def measure(report: Report) -> None:
    import torch

    device = torch.randint(256, (NUM_BYTES,), dtype=torch.uint8, device="cuda")
    with report.part("pinned"):
        _measure_pinned(report, device)
    with report.part("pageable"):
        pageable = torch.randint(256, (NUM_BYTES,), dtype=torch.uint8)
        _report_ways(report, "pageable", pageable, device, rounds=5)
        del pageable
    for name, advice in (("small pages", None), ("huge pages", getattr(mmap, "MADV_HUGEPAGE", None))):
        with report.part(f"registered, {name}"):
            _measure_registered(report, name, advice, device)
    with report.part("beginning"):
        _measure_beginning(report)


def _measure_pinned(report: Report, device: Any) -> None:
    import torch

    pinned = torch.empty(NUM_BYTES, dtype=torch.uint8, pin_memory=True)
    pinned.random_(256)
    _report_ways(report, "pinned", pinned, device, rounds=10)
    other, back = torch.empty_like(device), torch.empty(NUM_BYTES, dtype=torch.uint8, pin_memory=True)
    cuda: Any = torch.cuda
    up, down = cuda.Stream(), cuda.Stream()

    def both(_: int) -> None:
        current = torch.cuda.current_stream()
        for stream, target, source in ((up, device, pinned), (down, back, other)):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        current.wait_stream(up)
        current.wait_stream(down)

    both_ms = median_ms(both, rounds=5)
    report.number("pinned, both directions at once", gbytes_per_s(2 * NUM_BYTES, both_ms), "GB/s", "sum of both")
    for size in CHUNK_SIZES:

        def in_chunks(_: int, size: int = size) -> None:
            for begin in range(0, NUM_BYTES // 4, size):
                device[begin : begin + size].copy_(pinned[begin : begin + size], non_blocking=True)

        ms = median_ms(in_chunks, rounds=5)
        report.number(f"pinned to device in {size >> 10} KiB", gbytes_per_s(NUM_BYTES // 4, ms), "GB/s")


def _report_ways(report: Report, name: str, memory: Any, device: Any, *, rounds: int) -> None:
    ways: tuple[tuple[str, Callable[[int], object]], ...] = (
        (f"{name} to device", lambda _: device.copy_(memory, non_blocking=True)),
        (f"device to {name}", lambda _: memory.copy_(device, non_blocking=True)),
    )
    for way, copy in ways:
        report.number(way, gbytes_per_s(NUM_BYTES, median_ms(copy, rounds=rounds, warm_ups=1)), "GB/s", "1 GiB")


def _measure_registered(report: Report, name: str, advice: int | None, device: Any) -> None:
    """Memory as a weight arena has it: mapped, written, and pinned only then."""
    import torch

    mapped = mmap.mmap(-1, NUM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if advice is not None:
        mapped.madvise(advice)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    memory.random_(256)
    address = ctypes.c_void_p(memory.data_ptr())
    cuda: Any = torch.cuda
    runtime = cuda.cudart()
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    status = runtime.cudaHostRegister(address.value, NUM_BYTES, 0)
    took_s = time.perf_counter() - begin_s
    if int(status) != 0:
        raise RuntimeError(f"cudaHostRegister: {status}")
    report.number(f"to register 1 GiB, {name}", took_s, "s", "written before")
    _report_ways(report, f"registered, {name}", memory, device, rounds=5)
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    runtime.cudaHostUnregister(address.value)
    report.number(f"to unregister it, {name}", time.perf_counter() - begin_s, "s")


def _measure_beginning(report: Report) -> None:
    begin_s = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _BEGINNING], capture_output=True, text=True, timeout=90, check=False)
    report.number("a new process, from start to end", time.perf_counter() - begin_s, "s")
    for line in done.stdout.splitlines():
        name, _, seconds = line.rpartition(" ")
        report.number(name, float(seconds), "s", "in a new process")
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
