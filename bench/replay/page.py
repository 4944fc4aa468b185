"""A report as one HTML file that needs nothing else: plotly's script is in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.embedded import as_literal, plotly_script
from bench.replay.document import Document
from bench.replay.figures import COLOURS, NOTHING, Beside, Curve, Panel, label_of, log_ticks, panels, table, time_ticks

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 2rem auto; max-width: 1240px;
       padding: 0 1.2rem; }
h1 { font-size: 1.45rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p.about { color: #555; margin: 0 0 1rem; }
.void { border: 2px solid #b00020; color: #b00020; background: #fff4f5; padding: .6rem 1rem; border-radius: 4px; }
.void ul { margin: .2rem 0; }
.legend span { display: inline-block; margin-right: 1.4rem; } .legend i { display: inline-block; width: 1.1em;
       height: .3em; margin-right: .45em; vertical-align: middle; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(360px, 1fr)); gap: .6rem 1rem; }
.two { grid-template-columns: repeat(auto-fit, minmax(520px, 1fr)); } .two .panel { height: 420px; }
.panel { height: 270px; min-width: 0; }
table { border-collapse: collapse; font-size: .92rem; } th, td { padding: .22rem .9rem .22rem 0; text-align: right;
       border-bottom: 1px solid #e6e6e6; vertical-align: top; } th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 1.5px solid #333; } td.text { text-align: left; } summary { cursor: pointer; }
@media print { body { max-width: none; margin: 0; } .panel { break-inside: avoid; } }
"""
_ABOUT = "<p class='about'>Each point over time is the mean of one second.</p>"
_DRAW = """
for (const [index, panel] of PANELS.entries())
  Plotly.newPlot("panel" + index, panel.data, panel.layout, {displayModeBar: false, responsive: true});
"""


def save(documents: Sequence[Document], path: Path, beside: Beside = NOTHING) -> None:
    """Write the page. Raises ``OSError``."""
    path.write_text(_page(documents, beside), encoding="utf-8")


def _page(documents: Sequence[Document], beside: Beside) -> str:
    rows = [*panels(documents), *beside.rows]
    drawn = [_drawn(panel) for row in rows for panel in row]
    traces = ", ".join(dict.fromkeys(d.about.trace for d in documents))
    said = "".join(f"<p>{escape(line)}</p>" for line in beside.lines)
    return "".join(
        (
            "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{escape(traces)}: {escape(beside.title.lower())}</title><style>{_STYLE}</style>",
            f"{plotly_script()}</head><body>",
            f"<h1>{escape(beside.title)} of {escape(traces)}</h1>{_ABOUT}{_void(documents)}{_legend(documents)}",
            f"{_grids(rows)}{said}<h2>Figures</h2>{_table(documents)}{_operations(documents)}",
            f"<script>const PANELS = {as_literal(drawn)};{_DRAW}</script></body></html>\n",
        )
    )


def _grids(rows: Sequence[Sequence[Panel]]) -> str:
    """Places for all panels, in order; rows of as many go on in the same grid."""
    count, parts = 0, []
    for width, alike in groupby(rows, len):
        num = sum(map(len, alike))
        divs = "".join(f'<div class="panel" id="panel{index}"></div>' for index in range(count, count + num))
        parts.append(f"<div class='grid{' two' * (width == 2)}'>{divs}</div>")
        count += num
    return "".join(parts)


def _void(documents: Sequence[Document]) -> str:
    reasons = [f"<li>{escape(label_of(d))}: {escape(reason)}</li>" for d in documents for reason in d.void]
    if not reasons:
        return ""
    return f"<div class='void'><b>Void: these figures are not those of the trace.</b><ul>{''.join(reasons)}</ul></div>"


def _legend(documents: Sequence[Document]) -> str:
    entries = (
        f"<span><i style='background:{COLOURS[index % len(COLOURS)]}'></i>{escape(label_of(document))}</span>"
        for index, document in enumerate(documents)
    )
    return f"<p class='legend'>{''.join(entries)}</p>"


def _table(documents: Sequence[Document]) -> str:
    head = "".join(f"<th>{escape(label_of(document))}</th>" for document in documents)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, cells in table(documents)
    )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _operations(documents: Sequence[Document]) -> str:
    parts = []
    for document in documents:
        if document.cluster is None or not document.cluster.operations:
            continue
        rows = "".join(
            f"<tr><td>{operation.at_s:.1f}</td><td class='text'>{escape(operation.direction)}</td>"
            f"<td class='text'>{escape(operation.role)}</td><td>{operation.desired}</td>"
            f"<td>{'' if (ms := operation.trigger_to_serving_ms) is None else f'{ms:,.0f}'}</td>"
            f"<td class='text'>{escape(operation.status)}</td><td class='text'>{escape(operation.reason)}</td></tr>"
            for operation in document.cluster.operations
        )
        parts.append(
            f"<details><summary>{len(document.cluster.operations)} scale operations: {escape(label_of(document))}"
            "</summary><table><thead><tr><th>s</th><th></th><th>role</th><th>instances</th><th>ms until serving</th>"
            f"<th></th><th>why</th></tr></thead><tbody>{rows}</tbody></table></details>"
        )
    return f"<h2>Scale operations</h2>{''.join(parts)}" if parts else ""


def _drawn(panel: Panel) -> dict[str, Any]:
    """What plotly takes."""
    data = _bars(panel) if panel.axis == "groups" else [_curve(curve, panel) for curve in panel.curves]
    x_axis: dict[str, Any] = {"title": {"text": panel.x_label, "standoff": 4}, "automargin": True, "zeroline": False}
    y_axis: dict[str, Any] = {
        "title": {"text": panel.y_label, "standoff": 6},
        "automargin": True,
        "rangemode": "tozero",
    }
    shapes: list[dict[str, Any]] = []
    if panel.axis == "time":
        ticks = time_ticks(panel.end_s)
        x_axis |= {"range": [0, panel.end_s], "title": {"text": "time (min:s)", "standoff": 4}}
        x_axis |= {"tickvals": [at_s for at_s, _ in ticks], "ticktext": [name for _, name in ticks]}
    elif panel.axis in ("log", "cost"):
        x_axis |= {"type": "log", "range": [math.log10(edge) for edge in panel.span]}
        ticks = log_ticks(*panel.span)
        x_axis |= {"tickvals": [place for place, _ in ticks], "ticktext": [name for _, name in ticks]}
        if panel.axis == "log":
            y_axis |= {"range": [0, 1.02]}
        else:
            del y_axis["rangemode"]
        if panel.limit is not None:
            line = {"dash": "dash", "width": 1, "color": "#444"}
            shapes.append(
                {
                    "type": "line",
                    "x0": panel.limit,
                    "x1": panel.limit,
                    "y0": 0,
                    "y1": 1,
                    "yref": "paper",
                    "line": line,
                    "label": {"text": "SLO", "textposition": "start", "textangle": 0, "xanchor": "left"},
                }
            )
    elif panel.axis == "plain":
        del y_axis["rangemode"]
    elif "log" in panel.y_label:
        y_axis |= {"type": "log", "dtick": 1}
    if panel.y_ticks:
        y_axis |= {"tickvals": [place for place, _ in panel.y_ticks], "ticktext": [name for _, name in panel.y_ticks]}
    if panel.whole:
        most = sum(max((value or 0 for value in curve.y), default=0) for curve in panel.curves)
        y_axis |= {"tickformat": "d", "tick0": 0, "dtick": max(1, math.ceil(most / 8))}
    layout = {
        "title": {"text": panel.title, "font": {"size": 14}, "x": 0.02, "y": 0.96},
        "margin": {"l": 50, "r": 12, "t": 34, "b": 40},
        "font": {"size": 12},
        "showlegend": panel.own_legend and len(panel.curves) > 1,
        "legend": {"x": 1, "xanchor": "right", "y": 1, "bgcolor": "rgba(255,255,255,0.6)", "font": {"size": 11}},
        "xaxis": x_axis,
        "yaxis": y_axis,
        "shapes": shapes,
        "barmode": "group",
        "plot_bgcolor": "#fafafa",
        "hovermode": "x unified" if panel.axis == "time" else "closest",
    }
    return {"data": data, "layout": layout}


def _curve(curve: Curve, panel: Panel) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": _mode(curve, panel),
        "marker": {"size": 5 + 2 * curve.width if curve.dots else 4},
        "opacity": curve.strength if curve.dots else 1.0,
        "name": escape(curve.label),
        "x": curve.x,
        "y": curve.y,
        "line": {"color": curve.colour, "width": 1.6 * curve.width, "shape": "hv" if curve.step else "linear"},
    }
    if curve.notes:
        trace["hovertext"] = [escape(note) for note in curve.notes]
    if curve.labels:
        trace["mode"] += "+text"
        trace |= {"text": [escape(label) for label in curve.labels], "textposition": "top center"}
        trace["textfont"] = {"size": 10, "color": curve.colour}
    if curve.filled:
        trace["line"]["width"] = 0
        trace["fillcolor"] = _translucent(curve.colour, curve.strength if curve.stacked else 0.55)
        if curve.stacked:
            # Curves of a stack have the same points, so that nothing is to be filled in between.
            trace["stackgroup"] = "one"
        else:
            trace["fill"] = "tozeroy"
    return trace


def _mode(curve: Curve, panel: Panel) -> str:
    if curve.dots:
        return "markers"
    return "lines+markers" if panel.axis == "time" and not curve.step and len(curve.x) < 60 else "lines"


def _translucent(colour: str, strength: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{strength:g})"


def _bars(panel: Panel) -> list[dict[str, Any]]:
    systems = list(dict.fromkeys(bar.label for bar in panel.bars))
    traces = []
    for system in systems:
        bars = [bar for bar in panel.bars if bar.label == system]
        traces.append(
            {
                "type": "bar",
                "name": escape(system),
                "x": [bar.group.replace("\n", " ") for bar in bars],
                "y": [bar.value for bar in bars],
                "marker": {"color": bars[0].colour},
                "text": [f"{bar.value:,.0f}" if bar.value >= 100 else f"{bar.value:.3g}" for bar in bars],
                "textposition": "outside",
            }
        )
    return traces
