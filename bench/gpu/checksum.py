"""Row ``checksum``: the checksums of a unit's blocks, bit for bit those of the ``xxhash`` package, and their cost.

A receiver verifies each unit before it computes with it. On the host that is one pass at a few GB/s, with a copy from
the device before it; what the GPU takes decides whether weights keep their checksums there.
"""

from __future__ import annotations

import os
import time
from typing import Any

from bench.gpu.figures import Report
from bench.gpu.timing import captured, gbytes_per_s, median_ms
from services.worker.device.cuda import xxh3

UNIT_BYTES = 97_657 * 4096
"""400 MB: about a decoder layer of 8 B parameters in bfloat16. A multiple of 4 KiB, as units are, with a short last
block."""
CHUNK_BYTES = 8 << 20
ODD_BYTES = (241, 256, 1023, 1024, 1025, 4096, 100_001, xxh3.CHECK_BYTES - 1, xxh3.CHECK_BYTES + 241, 1_234_567)


def measure(report: Report) -> None:
    import torch

    os.environ["TRITON_CACHE_DIR"] = str(report.folder / "triton")
    from services.worker.device.cuda.xxh3_kernel import BlockChecksums

    checksums = BlockChecksums("cuda", UNIT_BYTES)
    torch.manual_seed(1)
    units = [torch.randint(256, (UNIT_BYTES,), dtype=torch.uint8, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    checksums(units[0])
    torch.cuda.synchronize()
    report.number("first call, with compilation", time.perf_counter() - begin_s, "s")

    on_host = units[0].cpu().numpy()
    begin_s = time.perf_counter()
    right = xxh3.expected(on_host)
    report.number("xxhash on the host, one thread", UNIT_BYTES / (time.perf_counter() - begin_s) / 1e9, "GB/s")
    wrong = num_wrong(checksums(units[0]), right)
    report.number("blocks that differ, of a unit", wrong, "", f"of {len(right)}, random data")
    num_odd_wrong = 0
    for size in ODD_BYTES:
        odd = torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
        num_odd_wrong += num_wrong(checksums(odd), xxh3.expected(odd.cpu().numpy()))
    report.number("blocks that differ, of odd sizes", num_odd_wrong, "", f"{len(ODD_BYTES)} sizes from 241 bytes")
    flipped = units[0].clone()
    flipped[UNIT_BYTES // 2] ^= 1
    report.number("blocks that differ after one flipped bit", num_wrong(checksums(flipped), right), "")
    del flipped

    # Each unit is eight times the second-level cache, and the two take turns.
    whole_ms = median_ms(lambda number: checksums(units[number % 2]), rounds=40)
    report.number("a unit of 400 MB", whole_ms, "ms", "aim: 4 ms")
    report.number("the same as a rate", gbytes_per_s(UNIT_BYTES, whole_ms), "GB/s")
    report.number("of it the sums", median_ms(lambda number: checksums.sum_rows(units[number % 2]), rounds=40), "ms")
    chains_ms = median_ms(lambda number: checksums.finish_blocks(units[number % 2]), rounds=40)
    report.number("of it the chains", chains_ms, "ms")
    chunks = [units[0][begin : begin + CHUNK_BYTES] for begin in range(0, 32 * CHUNK_BYTES, CHUNK_BYTES)]
    chunk_ms = median_ms(lambda number: checksums(chunks[number % 32]), rounds=40)
    report.number("a chunk of 8 MiB", chunk_ms * 1000, "µs", "its two launches from Python included")

    def all_chunks() -> None:
        for chunk in chunks:
            checksums(chunk)

    graph = captured(all_chunks)
    chunk_ms = median_ms(lambda _: graph.replay()) / len(chunks)
    report.number("a chunk of 8 MiB, in a graph", chunk_ms * 1000, "µs", f"{len(chunks)} chunks one after another")


def num_wrong(found: Any, expected: list[int]) -> int:
    """How many of the checksums, a tensor of int64 bit patterns, are not those expected."""
    given = [value & (1 << 64) - 1 for value in found.tolist()]
    return sum(one != other for one, other in zip(given, expected, strict=True))
