"""What the figures were measured on."""

from __future__ import annotations

import os

from bench.gpu.figures import Report


def measure(report: Report) -> None:
    import torch

    given = torch.cuda.get_device_properties(0)
    report.text("gpu", given.name)
    report.text("torch", torch.__version__)
    report.number("cores", len(os.sched_getaffinity(0)), "cores")
    report.number("device memory", given.total_memory / 2**30, "GiB")
    report.number("second-level cache", given.L2_cache_size / 1e6, "MB")
    report.number("multiprocessors", given.multi_processor_count, "")
