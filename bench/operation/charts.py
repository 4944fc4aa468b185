"""What plotly draws of an operation: layers over time by target, and who ran the layers of a pair's batches.

Plotly takes texts for a kind of HTML: names are escaped. Colours of text and grid are the page's.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from bench.command_line import printable
from shared.messages.operations import LiveRecord, ScaleRecord, TargetRecord

MAX_CURVES = 24
"""Targets in the chart; more cannot be told apart. Tables have more."""
MAX_BARS = 200
"""Batches of a pair in its chart."""
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Seen on white and on black, and by colour-blind people."""
_DASHES = ("solid", "dash", "dot", "dashdot")
_MAX_NAME = 24

Chart = dict[str, Any]
"""``data`` and ``layout``, as plotly takes them."""


def layers_chart(record: ScaleRecord) -> Chart | None:
    """Layers that each target held, against milliseconds since the trigger. None: nobody had any."""
    loading = [target for target in record.targets if target.layer_ready_ms][:MAX_CURVES]
    if not loading:
        return None
    tokens = [p.first_cooperative_token_ms for p in record.live if p.first_cooperative_token_ms is not None]
    moments = (("first cooperative token", min(tokens, default=None)), ("serving", record.trigger_to_serving_ms))
    marks = [(name, at_ms) for name, at_ms in moments if at_ms is not None]
    layout = _layout("milliseconds since the trigger", "layers held")
    layout["shapes"] = [
        {
            "type": "line",
            "x0": at_ms,
            "x1": at_ms,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "line": {"dash": "dot", "width": 1},
        }
        for _, at_ms in marks
    ]
    layout["annotations"] = [
        {"text": name, "x": at_ms, "xanchor": "right", "y": 1, "yref": "paper", "yanchor": "top", "textangle": -90}
        | {"showarrow": False, "font": {"size": 11}}
        for name, at_ms in marks
    ]
    return {"data": [_curve(number, target) for number, target in enumerate(loading)], "layout": layout}


def _curve(number: int, target: TargetRecord) -> dict[str, Any]:
    # Layers may come in another order than that of the model: what counts is how many there are.
    at_ms = sorted(target.layer_ready_ms)
    begins_ms = min(at_ms[0] if target.first_byte_ms is None else target.first_byte_ms, at_ms[0])
    return {
        "type": "scatter",
        "mode": "lines",
        "name": _name(target.worker_id),
        "x": [begins_ms, *at_ms],
        "y": list(range(len(at_ms) + 1)),
        "line": {
            "shape": "hv",
            "width": 2,
            "color": _COLOURS[number % len(_COLOURS)],
            "dash": _DASHES[number // len(_COLOURS) % len(_DASHES)],
        },
    }


def batches_chart(pair: LiveRecord) -> Chart | None:
    """Layers of each batch that the target and the source ran. None: there was no batch."""
    batches = pair.batches[:MAX_BARS]
    if not batches:
        return None
    numbers = list(range(1, len(batches) + 1))
    sides: Sequence[tuple[str, list[int], str]] = (
        (f"target {pair.target}", [batch.target_layers for batch in batches], _COLOURS[0]),
        (f"source {pair.source}", [batch.source_layers for batch in batches], _COLOURS[4]),
    )
    bars = [
        {"type": "bar", "name": _name(name), "x": numbers, "y": layers, "marker": {"color": colour}}
        for name, layers, colour in sides
    ]
    layout = _layout("batch, in the order of arrival", "layers run") | {"barmode": "stack"}
    layout["xaxis"] |= {"tickformat": "d", "range": [0.4, len(batches) + 0.6]}
    return {"data": bars, "layout": layout}


def _layout(x_label: str, y_label: str) -> dict[str, Any]:
    axis = {"automargin": True, "zeroline": False, "rangemode": "tozero"}
    return {
        "margin": {"l": 44, "r": 10, "t": 10, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "showlegend": True,
        "legend": {"orientation": "h", "y": -0.22, "yanchor": "top", "font": {"size": 11}},
        "xaxis": axis | {"title": {"text": x_label, "standoff": 6}},
        "yaxis": axis | {"title": {"text": y_label, "standoff": 6}, "tickformat": "d"},
    }


def _name(text: str) -> str:
    text = printable(text).replace("\n", " ")
    return escape(text if len(text) <= _MAX_NAME else f"{text[: _MAX_NAME - 1]}…")
