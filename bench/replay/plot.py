"""A report as a PNG for print. The only module here that imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import Bbox

from bench.replay.document import Document
from bench.replay.figures import COLOURS, NOTHING, Beside, Curve, Panel, label_of, log_ticks, panels, time_ticks

_LINE = 1.1
_STYLE: dict[Any, Any] = {
    # Names may have a dollar sign.
    "text.parse_math": False,
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.4,
    "grid.color": "#E4E4E4",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": _LINE,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
}
_WIDTH, _ROW_HEIGHT = 10.0, 2.0
_VOID = "#B00020"
_BESIDE = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1))
"""Where a label may stand beside its point: up, down, right, left, and between."""
_LABEL = 6.5


def save(documents: Sequence[Document], path: Path, beside: Beside = NOTHING) -> None:
    """Write a PNG: of documents, or of what is beside them alone. Raises ``OSError``."""
    rows = [*(panels(documents) if documents else ()), *beside.rows]
    void = [f"{label_of(d)}: {reason}" for d in documents for reason in d.void]
    with mpl.rc_context(_STYLE):
        # Fewer panels in a row are larger, in both directions.
        heights = [_ROW_HEIGHT * 3 / len(row) for row in rows]
        figure = Figure(figsize=(_WIDTH, sum(heights) + 0.45 + 0.17 * len(void)), layout="constrained")
        grid = figure.add_gridspec(len(rows), 6, height_ratios=heights)
        drawn: list[tuple[Axes, Panel]] = []
        for number, row in enumerate(rows):
            width = 6 // len(row)
            for place, panel in enumerate(row):
                axes = figure.add_subplot(grid[number, width * place : width * (place + 1)])
                _draw(axes, panel)
                drawn.append((axes, panel))
        legend = [(label_of(d), COLOURS[i % len(COLOURS)]) for i, d in enumerate(documents)] or beside.legend
        handles = [Line2D([], [], color=colour, linewidth=2.0) for _, colour in legend]
        figure.legend(handles, [name for name, _ in legend], loc="outside lower center", ncols=len(legend))
        if void:
            figure.suptitle("\n".join(["VOID", *void]), color=_VOID, fontsize=8, fontweight="bold")
        if any(curve.labels for _, panel in drawn for curve in panel.curves):
            figure.draw_without_rendering()  # where points are is known once all has its place
            for axes, panel in drawn:
                _write_labels(axes, [curve for curve in panel.curves if curve.labels], figure.dpi / 72)
        figure.savefig(path, format="png", dpi=200)


def _draw(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title)
    axes.set_ylabel(panel.y_label)
    axes.set_xlabel(panel.x_label)
    if panel.axis == "groups":
        _draw_bars(axes, panel)
    else:
        _draw_curves(axes, panel)
    if panel.axis == "time":
        ticks = time_ticks(panel.end_s)
        axes.set_xticks([at_s for at_s, _ in ticks], [name for _, name in ticks])
        axes.set_xlim(0, panel.end_s)
        axes.set_xlabel("time (min:s)")
        axes.set_ylim(bottom=0)
    if panel.whole:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.own_legend and (len(panel.curves) > 1):
        axes.legend(loc="upper right", ncols=2 if len(panel.curves) > 3 else 1, handlelength=1.2, columnspacing=0.9)
        axes.set_ylim(top=axes.get_ylim()[1] * 1.25)


def _draw_curves(axes: Axes, panel: Panel) -> None:
    below: list[float] = []
    for curve in panel.curves:
        heights = [value or 0.0 for value in curve.y] if curve.filled else []
        if curve.filled:
            below = below if curve.stacked and below else [0.0] * len(heights)
            top = [low + high for low, high in zip(below, heights, strict=True)]
            axes.fill_between(
                curve.x,
                below,
                top,
                step="post" if curve.step else None,
                color=curve.colour,
                alpha=curve.strength if curve.stacked else 0.55,
                linewidth=0,
                label=curve.label,
            )
            below = top
        else:
            # A few lonely points would not be seen as a line.
            few = "." if panel.axis == "time" and not curve.step and len(curve.x) < 60 else "o" if curve.dots else ""
            axes.plot(
                curve.x,
                [value if value is not None else float("nan") for value in curve.y],
                color=curve.colour,
                drawstyle="steps-post" if curve.step else "default",
                linestyle="none" if curve.dots else "-",
                alpha=curve.strength,
                marker=few,
                markersize=_size(curve) if curve.dots else 3,
                linewidth=_LINE * curve.width,
                label=curve.label,
            )
    if panel.y_ticks:
        axes.set_yticks([place for place, _ in panel.y_ticks], [name for _, name in panel.y_ticks])
    if panel.axis in ("log", "cost"):
        axes.set_xscale("log")
        axes.set_xlim(*panel.span)
        ticks = log_ticks(*panel.span)
        axes.set_xticks([place for place, _ in ticks], [name for _, name in ticks])
        axes.xaxis.set_minor_locator(LogLocator(subs="all"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if panel.axis == "log":
        axes.set_ylim(0, 1.02)
        axes.set_xlabel(panel.x_label)
        if panel.limit is not None:
            axes.axvline(panel.limit, color="#444444", linewidth=0.8, linestyle="--")
            axes.annotate(
                "SLO",
                (panel.limit, 0.03),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                xytext=(3, 0),
                fontsize=7,
            )


def _size(curve: Curve) -> float:
    """Of its dots, points."""
    return 1.8 + 1.2 * curve.width


def _write_labels(axes: Axes, curves: Sequence[Curve], dots_per_point: float) -> None:
    """Beside the points, where nothing else stands; where there is no room, none."""
    points = [
        (curve, (x, y), axes.transData.transform((x, y)) / dots_per_point, label)
        for curve in curves
        for x, y, label in zip(curve.x, curve.y, curve.labels, strict=True)
        if y is not None
    ]
    taken = [
        Bbox.from_bounds(x - (size := _size(curve)) / 2, y - size / 2, size, size) for curve, _, (x, y), _ in points
    ]
    for curve, point, (x, y), label in points:
        width, height = 0.6 * _LABEL * len(label), 0.9 * _LABEL
        for right, up in _BESIDE:
            away = _size(curve) / 2 + 1.5
            across, above = right * (width / 2 + away), up * (height / 2 + away)
            box = Bbox.from_bounds(x + across - width / 2, y + above - height / 2, width, height)
            if label and not box.count_overlaps(taken):
                taken.append(box)
                axes.annotate(
                    label,
                    point,
                    xytext=(across, above),
                    textcoords="offset points",
                    ha="center",
                    va="center",
                    color=curve.colour,
                    fontsize=_LABEL,
                    path_effects=[withStroke(linewidth=1.6, foreground="white")],
                ).set_in_layout(False)
                break


def _draw_bars(axes: Axes, panel: Panel) -> None:
    groups = list(dict.fromkeys(bar.group for bar in panel.bars))
    systems = list(dict.fromkeys(bar.label for bar in panel.bars))
    width = 0.8 / max(1, len(systems))
    for bar in panel.bars:
        at = groups.index(bar.group) + (systems.index(bar.label) - (len(systems) - 1) / 2) * width
        axes.bar(at, bar.value, width * 0.92, color=bar.colour)
        if len(systems) <= 3:
            axes.annotate(
                f"{bar.value:,.0f}" if bar.value >= 10 else f"{bar.value:.1f}",
                (at, bar.value),
                textcoords="offset points",
                xytext=(0, 1.5),
                ha="center",
                fontsize=6.5,
            )
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=False, axis="x")
    values = [bar.value for bar in panel.bars if bar.value > 0]
    if "log" in panel.y_label and values:
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 2, max(values) * 3)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
