"""Row ``plans``: whether FlashInfer may be planned ahead of the device.

``plan`` does not wait for the device: it writes into pinned memory of its wrapper, and a copy to the device follows in
the stream. A second plan before that copy has begun overwrites what the first run is to read. An engine that prepares
step n+1 while the device runs step n does just that, so this row has two plans and two runs before the device begins.
"""

from __future__ import annotations

import math
import time
from typing import Any

from bench.gpu.attention import KERNELS, PagedCache, decode_wrapper, queries_of, relative_error, use_folder
from bench.gpu.figures import Report
from bench.gpu.timing import keep_busy

BATCH = 16
WAIT_S = 8.0
"""A kernel with another batch's plan may never end: seen with FlashInfer 0.7.2."""


def measure(report: Report) -> None:
    use_folder(report.folder)
    for shared in (False, True):
        for name, tensor_cores in KERNELS.items():
            what = f"{'one wrapper' if shared else 'a wrapper each'}, {name}"
            if not _ends(report, what, shared=shared, tensor_cores=tensor_cores):
                report.text(
                    f"two steps ahead, {what}", f"the device had not ended after {WAIT_S:g} s; no more of this row"
                )
                return


def _ends(report: Report, what: str, *, shared: bool, tensor_cores: bool) -> bool:
    """Whether the device ends what it was given; if so, how right both steps are."""
    import torch

    torch.manual_seed(7)
    short = PagedCache([100 + 10 * number for number in range(BATCH)], 1)
    long = PagedCache([4000 - 100 * number for number in range(BATCH)], 1)
    first = decode_wrapper(BATCH, long.num_pages, graph=True, tensor_cores=tensor_cores)
    second = first if shared else decode_wrapper(BATCH, long.num_pages, graph=True, tensor_cores=tensor_cores)
    queries = queries_of(BATCH)
    for wrapper in (first, second):
        short.plan(wrapper)
        wrapper.run(queries, short.layers[0])
    steps = ((first, short, torch.full_like(queries, math.nan)), (second, long, torch.full_like(queries, math.nan)))
    references = [cache.reference(queries, 0) for _, cache, _ in steps]
    torch.cuda.synchronize()
    keep_busy()
    for wrapper, cache, out in steps:
        cache.plan(wrapper)
        wrapper.run(queries, cache.layers[0], out=out)
    cuda: Any = torch.cuda
    end = cuda.Event()
    end.record()
    limit_s = time.monotonic() + WAIT_S
    while not end.query():
        if time.monotonic() > limit_s:
            return False
        time.sleep(0.01)
    errors = [relative_error(out, expected) for (_, _, out), expected in zip(steps, references, strict=True)]
    report.number(f"first of two steps ahead, {what}", errors[0], "", "relative error; aim: 0.01")
    report.number(f"second, {what}", errors[1], "", "relative error; aim: 0.01")
    return True
