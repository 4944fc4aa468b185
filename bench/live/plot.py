"""The figure: layers per second by each side over time, one row per mode. The only module that imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.live.result import EngineResult
from bench.live.run import Run

_TITLES = {
    "stop_the_world": "stop the world",
    "overlap": "overlap",
    "best_effort": "best effort",
    "zigzag": "ZigZag",
    "plain": "without live scaling",
}
_SOURCE, _TARGET, _TOKEN, _LOADED = "#4c78a8", "#f58518", "#222222", "#54a24b"
_WIDTH, _ROW_HEIGHT = 7.0, 2.1


def save(results: Sequence[EngineResult], path: Path) -> None:
    """Write a PNG: a column per engine, a row per mode, each with its typical run. Raises ``OSError``."""
    rows = max(len(result.modes) for result in results)
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(_WIDTH * len(results), _ROW_HEIGHT * rows + 0.8), layout="constrained")
        axes = figure.subplots(rows, len(results), sharex="col", sharey="col", squeeze=False)
        for column, result in enumerate(results):
            for row, mode in enumerate(result.modes):
                _draw(axes[row][column], result, result.typical(mode))
            axes[-1][column].set_xlim(0, _end_s(result) * 1.02)
            axes[-1][column].set_xlabel(f"seconds since the burst ({result.workload.engine} engine)")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        figure.savefig(path, format="png", dpi=150)


def _draw(axes: Axes, result: EngineResult, run: Run) -> None:
    timeline = run.timeline
    width = timeline.bucket_s
    starts = [timeline.start_s + index * width for index in range(len(timeline.layers))]
    source = [count / width for count in _padded(timeline.source_layers, len(starts))]
    target = [count / width for count in _padded(timeline.target_layers, len(starts))]
    axes.bar(starts, source, width, align="edge", color=_SOURCE, label="source")
    axes.bar(starts, target, width, bottom=source, align="edge", color=_TARGET, label="target")
    one = 1 / result.workload.layer_s
    axes.axhline(one, color="#888888", linewidth=0.8, linestyle=":", label="one instance alone")
    axes.axvline(timeline.loaded_s, color=_LOADED, linewidth=1.2, linestyle="--", label="weights complete")
    # Above the bars, whatever their height.
    axes.plot(
        timeline.first_tokens_s,
        [0.97] * len(timeline.first_tokens_s),
        linestyle="",
        marker="|",
        markersize=9,
        color=_TOKEN,
        transform=axes.get_xaxis_transform(),
        label="first tokens",
    )
    axes.set_ylim(0, max([2 * one, *[s + t for s, t in zip(source, target, strict=True)]]) * 1.2)
    axes.set_ylabel("layers/s")
    title = _TITLES.get(run.mode.name, run.mode.name)
    axes.set_title(f"{title}: first tokens after {run.mean_s:.2f} s on average", loc="left", fontsize=9)


def _end_s(result: EngineResult) -> float:
    lines = [result.typical(mode).timeline for mode in result.modes]
    return max(
        max(line.loaded_s, line.start_s + len(line.layers) * line.bucket_s, *line.first_tokens_s[-1:]) for line in lines
    )


def _padded(counts: Sequence[int], length: int) -> list[int]:
    return [*counts, *[0] * (length - len(counts))]
