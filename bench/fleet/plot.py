"""The figure: instances of each model over time, on the workers that they share. The only module that imports
matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.fleet.judge import SystemResult


def save(result: SystemResult, path: Path) -> None:
    """Write a PNG. Raises ``OSError``."""
    names = sorted({name for sample in result.samples for name in sample.instances})
    times = [sample.at_s for sample in result.samples]
    counts = [[sample.instances.get(name, 0) for sample in result.samples] for name in names]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9.0, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.stackplot(times, counts, step="post", colors=[mpl.colormaps["tab20"](i % 20) for i in range(len(names))])
        axes.axhline(result.workers, color="#222222", linewidth=0.8, linestyle=":")
        axes.set_xlim(0, result.seconds)
        axes.set_ylim(0, result.workers * 1.1)
        axes.set_xlabel("seconds")
        axes.set_ylabel("instances, a colour per model")
        axes.set_title(f"{len(names)} models on {result.workers} workers", loc="left", fontsize=9)
        figure.savefig(path, format="png", dpi=150)
