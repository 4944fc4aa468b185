"""What is around the report of an operation: its style, light and dark, and the script that draws its charts."""

from __future__ import annotations

from collections.abc import Sequence

from bench.embedded import as_literal, plotly_script
from bench.operation.charts import Chart

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1b1b; --dim: #555; --line: #d8dde3; --bar: #0072B2;
        --good: #176b34; --bad: #a3161b; }
@media (prefers-color-scheme: dark) { :root { --back: #12151a; --text: #eef1f5; --dim: #aab4c1; --line: #3a434f;
        --bar: #56b4e9; --good: #6fd08c; --bad: #ff8a8a; } }
* { box-sizing: border-box; }
body { font: 16px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 0 auto;
       max-width: 64rem; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; } p { margin: .3rem 0; } ul { margin: .3rem 0; padding-left: 1.2rem; }
.dim { color: var(--dim); } .done { color: var(--good); } .failed { color: var(--bad); }
.scrolls { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .25rem 1rem .25rem 0; border-bottom: 1px solid var(--line);
         font-weight: normal; }
th { overflow-wrap: normal; }
thead th { color: var(--dim); white-space: nowrap; } tbody th { font-weight: 600; }
.number, thead .number { text-align: right; } .number, .state { white-space: nowrap; }
.name { min-width: 8rem; } .words { min-width: 11rem; }
.track { min-width: 6rem; width: 30%; } .track i { display: block; height: .6em; margin-top: .45em;
         background: var(--bar); min-width: 2px; }
.chart { display: none; height: 340px; } summary { cursor: pointer; }
@media (max-width: 30rem) { body { padding: .75rem; } .track { display: none; } .name { min-width: 6rem; }
        .words { min-width: 8rem; } th, td { padding-right: .7rem; } }
"""
_DRAW = """
const dark = matchMedia("(prefers-color-scheme: dark)");
function draw() {
  const style = getComputedStyle(document.body), text = style.color, line = style.getPropertyValue("--line");
  CHARTS.forEach((chart, index) => {
    const place = document.getElementById("chart" + index), layout = structuredClone(chart.layout);
    place.style.display = "block";
    layout.font = {color: text, size: 12};
    layout.xaxis.gridcolor = layout.yaxis.gridcolor = line;
    for (const shape of layout.shapes || []) shape.line.color = text;
    Plotly.react(place, chart.data, layout, {displayModeBar: false, responsive: true});
  });
}
draw();
dark.addEventListener("change", draw);
"""
# What is in it needs nobody else: should a text have become markup all the same, it can ask for nothing.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def framed(title: str, body: str, charts: Sequence[Chart]) -> str:
    """The whole page. ``title`` and ``body`` are HTML; ``body`` has a place for each chart, ``chart0`` and so on.
    Without charts there is no script."""
    script = f"{plotly_script()}<script>const CHARTS = {as_literal(charts)};{_DRAW}</script>" if charts else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>"
        f"<body>{body}{script}</body></html>\n"
    )
