"""What reports show of replays: panels in the layout of the paper's Figures 17 to 22, and a table. Pure: ``plot`` and
``page`` draw them.

First row: rate, mean TTFT and mean TBT over time (Figure 17). Second: distributions of both, mean and p99 (Figures 17,
18). Third, where the cluster told it: GPUs over time, host memory of copies, bytes sent (Figures 18, 19, 22).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from bench.replay.document import Document
from bench.replay.observations import CarriedPoint, Cluster
from bench.stats import Summary
from shared.messages.traffic import Purpose

# Okabe and Ito's: told apart by the colour-blind, and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_GREY = "#B0B0B0"
_ROLE = {"colocated": "#0072B2", "prefill": "#D55E00", "decode": "#009E73"}
_PURPOSE: dict[Purpose, str] = {"weights": "#0072B2", "kv": "#E69F00", "activations": "#CC79A7"}
_STRENGTH = {"serving": 0.95, "live": 0.65, "loading": 0.45, "draining": 0.25}
_SMALLEST_MS = 0.01
"""Below it nothing is drawn on a logarithmic axis."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points joined by lines. ``stacked``: on top of the curve before."""

    label: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    colour: str
    strength: float = 1.0
    step: bool = False
    filled: bool = False
    stacked: bool = False
    dots: bool = False
    """Points that no line joins."""
    notes: tuple[str, ...] = ()
    """What each point is, where a page can show it."""
    labels: tuple[str, ...] = ()
    """Written beside the points, where there is room."""
    width: float = 1.0
    """Of the line, and of the dots, times the usual: what lies below others is to be seen."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a group."""

    label: str
    group: str
    value: float
    colour: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram: curves or bars."""

    title: str
    y_label: str
    x_label: str = ""
    curves: tuple[Curve, ...] = ()
    bars: tuple[Bar, ...] = ()
    axis: Literal["time", "log", "groups", "plain", "cost"] = "time"
    """``log``: of a distribution, whose y goes from 0 to 1; ``cost``: logarithmic, too, with any y."""
    end_s: float = 0.0
    """Of a time axis."""
    span: tuple[float, float] = (0.0, 0.0)
    """Of a logarithmic axis; few values may lie outside."""
    y_ticks: tuple[tuple[float, str], ...] = ()
    """Places on the y axis, and what they are called, where y is no number to be read."""
    limit: float | None = None
    """An objective on the x axis."""
    own_legend: bool = False
    """Its colours are not those of the systems."""
    whole: bool = False
    """Counts things."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What a report has beside its documents."""

    title: str = "Replay"
    rows: tuple[tuple[Panel, ...], ...] = ()
    """Of three, or of two that are larger, below the other panels. Colours are those of the documents."""
    lines: tuple[str, ...] = ()
    """Said below the figures, where there is room."""
    legend: tuple[tuple[str, str], ...] = ()
    """Names and colours, where there are no documents that have them."""


NOTHING = Beside()


def label_of(document: Document) -> str:
    """What the legend calls it."""
    return document.label or document.about.model


def panels(documents: Sequence[Document]) -> list[list[Panel]]:
    """In rows."""
    end_s = max(len(d.series.arrivals) * d.series.window_s for d in documents)
    end_s = max([end_s, *(d.cluster.end_s for d in documents if d.cluster is not None)])
    rows = [
        [
            _rate(documents, end_s),
            _over_time(documents, end_s, "Mean TTFT", lambda d: d.series.ttft_mean_s),
            _over_time(documents, end_s, "Mean TBT", lambda d: d.series.tbt_mean_s),
        ],
        [
            _distribution(
                documents,
                "TTFT",
                lambda d: d.distributions.ttft_s,
                [d.slo.ttft_s if d.slo else None for d in documents],
            ),
            _distribution(
                documents, "TBT", lambda d: d.distributions.tbt_s, [d.slo.tbt_s if d.slo else None for d in documents]
            ),
            _mean_and_p99(documents),
        ],
    ]
    seen = [(label_of(d), d.cluster) for d in documents]
    told = [(label, cluster, COLOURS[i % len(COLOURS)]) for i, (label, cluster) in enumerate(seen) if cluster]
    if told:
        rows.append([_gpus(told, end_s), _host_memory(told, end_s), _carried(told, end_s)])
    return rows


def _rate(documents: Sequence[Document], end_s: float) -> Panel:
    """Once, if all got the same."""
    curves = []
    for index, document in enumerate(documents):
        window_s, arrivals = document.series.window_s, list(document.series.arrivals)
        while arrivals and not arrivals[-1]:
            arrivals.pop()  # only the answers took longer, which differs between systems
        x = tuple(index * window_s for index in range(len(arrivals) + 1))
        curves.append(Curve(label_of(document), x, (*(n / window_s for n in arrivals), 0.0), _colour(index), step=True))
    if len({(curve.x, curve.y) for curve in curves}) == 1:
        curves = [replace(curves[0], label="arrivals", colour=_GREY, filled=True)]
    return Panel("Request rate", "requests/s", curves=tuple(curves), end_s=end_s)


def _over_time(
    documents: Sequence[Document], end_s: float, title: str, values: Callable[[Document], Sequence[float | None]]
) -> Panel:
    curves = []
    for index, document in enumerate(documents):
        window_s = document.series.window_s
        points = [(i * window_s + window_s / 2, v * 1000) for i, v in enumerate(values(document)) if v is not None]
        curves.append(
            Curve(label_of(document), tuple(x for x, _ in points), tuple(y for _, y in points), _colour(index))
        )
    return Panel(title, "ms", curves=tuple(curves), end_s=end_s)


def _distribution(
    documents: Sequence[Document],
    title: str,
    values: Callable[[Document], Sequence[float]],
    limits_s: Sequence[float | None],
) -> Panel:
    curves: list[Curve] = []
    typical: list[float] = []
    for index, document in enumerate(documents):
        quantiles = values(document)
        if quantiles:
            # Of gaps, a few are next to nothing: two tokens that came together.
            typical += [max(quantiles[len(quantiles) // 50], quantiles[-1] / 1e4) * 1000, quantiles[-1] * 1000]
        points = [(max(v * 1000, _SMALLEST_MS), step / (len(quantiles) - 1)) for step, v in enumerate(quantiles)]
        curves.append(
            Curve(label_of(document), tuple(x for x, _ in points), tuple(y for _, y in points), _colour(index))
        )
    limit_s = limits_s[0] if len(set(limits_s)) == 1 else None
    return Panel(
        f"{title} of {'requests' if title == 'TTFT' else 'all gaps'}",
        "CDF",
        "ms",
        curves=tuple(curves),
        axis="log",
        span=_span([*typical, *([limit_s * 1000] if limit_s is not None else [])]),
        limit=limit_s * 1000 if limit_s is not None else None,
    )


def _span(values: Sequence[float]) -> tuple[float, float]:
    positive = [max(value, _SMALLEST_MS) for value in values] or [1.0]
    return min(positive) / 1.25, max(positive) * 1.25


def _mean_and_p99(documents: Sequence[Document]) -> Panel:
    bars = []
    for index, document in enumerate(documents):
        result = document.result
        for group, summary in (("TTFT", result.ttft_s), ("TBT", result.tbt_s)):
            if summary is not None:
                bars.append(Bar(label_of(document), f"{group}\nmean", summary.mean * 1000, _colour(index)))
                bars.append(Bar(label_of(document), f"{group}\np99", summary.p99 * 1000, _colour(index)))
    order = {group: position for position, group in enumerate(("TTFT\nmean", "TTFT\np99", "TBT\nmean", "TBT\np99"))}
    bars.sort(key=lambda bar: order[bar.group])
    return Panel("Mean and 99th percentile", "ms (log)", bars=tuple(bars), axis="groups")


Told = Sequence[tuple[str, Cluster, str]]
"""Label, cluster and colour of the systems that said something."""


def _gpus(told: Told, end_s: float) -> Panel:
    if len(told) > 1:
        curves = []
        for label, cluster, colour in told:
            x = (*(point.at_s for point in cluster.instances), end_s)
            y = [float(sum(point.instances.values())) for point in cluster.instances]
            curves.append(Curve(label, x, (*y, y[-1]), colour, step=True))
        return Panel("GPUs with an instance", "GPUs", curves=tuple(curves), end_s=end_s, whole=True)
    [(_, cluster, _)] = told
    keys = {key for point in cluster.instances for key in point.instances}
    x = (*(point.at_s for point in cluster.instances), end_s)
    stack = []
    for key in sorted(keys, key=lambda key: (list(_ROLE).index(key.partition("/")[0]), _order(key))):
        role, _, state = key.partition("/")
        y = [float(point.instances.get(key, 0)) for point in cluster.instances]
        stack.append(
            Curve(
                f"{role}, {state}" if len({k.partition("/")[0] for k in keys}) > 1 else state,
                x,
                (*y, y[-1]),
                _ROLE[role],
                strength=_STRENGTH.get(state, 0.15),
                step=True,
                filled=True,
                stacked=True,
            )
        )
    return Panel("GPUs with an instance", "GPUs", curves=tuple(stack), end_s=end_s, own_legend=True, whole=True)


def _order(key: str) -> int:
    state = key.partition("/")[2]
    return list(_STRENGTH).index(state) if state in _STRENGTH else len(_STRENGTH)


def _host_memory(told: Told, end_s: float) -> Panel:
    curves = []
    for label, cluster, colour in told:
        if cluster.host_cache:
            x = (*(point.at_s for point in cluster.host_cache), end_s)
            y = [point.num_bytes / 1e6 for point in cluster.host_cache]
            curves.append(Curve(label, x, (*y, y[-1]), colour, step=True, filled=len(told) == 1))
    return Panel("Copies in host memory", "MB", curves=tuple(curves), end_s=end_s)


def _carried(told: Told, end_s: float) -> Panel:
    """Over the network; if nothing went there, which is so on a single host, between its processes."""
    over_network = any(sum(c.carried[-1].network.values()) for _, c, _ in told if c.carried)
    place = "network" if over_network else "shared memory of one host"

    def sent(point: CarriedPoint) -> dict[Purpose, int]:
        return point.network if over_network else point.host

    if len(told) > 1:
        bars = [
            Bar(label, purpose, num_bytes / 1e6, colour)
            for label, cluster, colour in told
            if cluster.carried
            for purpose, num_bytes in sent(cluster.carried[-1]).items()
        ]
        bars.sort(key=lambda bar: [str(purpose) for purpose in _PURPOSE].index(bar.group))
        return Panel(f"Sent over the {place}", "MB", bars=tuple(bars), axis="groups")
    [(_, cluster, _)] = told
    steps = [(a, b) for a, b in pairwise(cluster.carried) if b.at_s > a.at_s]
    curves = [
        Curve(
            purpose,
            tuple((a.at_s + b.at_s) / 2 for a, b in steps),
            tuple((sent(b)[purpose] - sent(a)[purpose]) * 8e-9 / (b.at_s - a.at_s) for a, b in steps),
            colour,
        )
        for purpose, colour in _PURPOSE.items()
    ]
    return Panel(f"Sent over the {place}", "Gb/s", curves=tuple(curves), end_s=end_s, own_legend=True)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


_NICE_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600)


def time_ticks(end_s: float, most: int = 6) -> list[tuple[float, str]]:
    """Places on a time axis, and what they are called: minutes and seconds."""
    step_s = next((step for step in _NICE_S if end_s / step <= most), max(3600, round(end_s / most)))
    return [(at_s, f"{at_s // 60}:{at_s % 60:02d}") for at_s in range(0, int(end_s) + 1, int(step_s))]


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Places on a logarithmic axis, and what they are called: powers of ten; of less than two decades, also twice and
    five times these, and of less than one, more."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps: tuple[float, ...] = (1,)
    if high < 2 * low:
        steps = (1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9)
    elif high < 8 * low:
        steps = (1, 1.5, 2, 3, 4, 5, 6, 8)
    elif high < 60 * low:
        steps = (1, 2, 5)
    places = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return [(place, f"{place:,.6g}") for place in places if low <= place <= high]


def table(documents: Sequence[Document]) -> list[tuple[str, list[str]]]:
    """The figures as rows, with a cell for each replay; rows that nobody has are left out."""

    def milliseconds(pick: Callable[[Document], Summary | None], part: Callable[[Summary], float]) -> list[str]:
        return [f"{part(s) * 1000:,.1f}" if (s := pick(d)) is not None else "" for d in documents]

    def of(show: Callable[[Document], str]) -> list[str]:
        return [show(document) for document in documents]

    def cluster(show: Callable[[Cluster], str]) -> list[str]:
        return [show(d.cluster) if d.cluster is not None else "" for d in documents]

    rows = [
        ("trace", of(lambda d: d.about.trace)),
        ("model", of(lambda d: d.about.model)),
        ("rate scaled by", of(lambda d: f"{d.about.scale_rate:g}" if d.about.scale_rate != 1 else "")),
        ("times as fast", of(lambda d: f"{d.about.speed:g}" if d.about.speed != 1 else "")),
        ("seed", of(lambda d: f"{d.about.seed}")),
        ("requests completed", of(lambda d: f"{d.result.completed:,} of {d.result.planned:,}")),
        ("failed", of(lambda d: ", ".join(f"{n:,} {kind}" for kind, n in d.result.failures.items()))),
        ("unfinished", of(lambda d: f"{d.result.unfinished:,}" if d.result.unfinished else "")),
    ]
    for name, pick in (("TTFT", _ttft), ("TBT", _tbt), ("end to end", _e2e)):
        rows.append((f"{name} mean (ms)", milliseconds(pick, lambda s: s.mean)))
        rows.append((f"{name} p50 (ms)", milliseconds(pick, lambda s: s.p50)))
        rows.append((f"{name} p99 (ms)", milliseconds(pick, lambda s: s.p99)))
    rows += [
        ("objectives (ms)", of(_objectives)),
        ("requests within them", of(lambda d: f"{d.slo.share:.1%}" if d.slo else "")),
        ("goodput (requests/s)", of(lambda d: f"{d.slo.goodput_requests_per_s:,.2f}" if d.slo else "")),
        ("output tokens/s", of(lambda d: f"{d.result.output_tokens_per_s:,.1f}")),
        ("client late, p99 (ms)", milliseconds(_lateness, lambda s: s.p99)),
        ("GPU seconds", cluster(lambda c: f"{c.gpu_seconds:,.1f}")),
        ("most GPUs at once", cluster(lambda c: f"{c.peak_gpus}")),
        ("scale operations", cluster(lambda c: f"{len(c.operations)}")),
        ("copies in host memory, at most (MB)", cluster(lambda c: _megabytes(c.host_cache_max_bytes))),
    ]
    for purpose in _PURPOSE:
        rows.append((f"{purpose} over the network (MB)", cluster(lambda c, p=purpose: _sent(c, p))))  # type: ignore[misc]
    return [(name, cells) for name, cells in rows if any(cells)]


def _ttft(document: Document) -> Summary | None:
    return document.result.ttft_s


def _tbt(document: Document) -> Summary | None:
    return document.result.tbt_s


def _e2e(document: Document) -> Summary | None:
    return document.result.e2e_s


def _lateness(document: Document) -> Summary | None:
    """None of a client that is never late: it was simulated."""
    late = document.result.send_lag_s
    return late if late is not None and late.max > 0 else None


def _objectives(document: Document) -> str:
    slo = document.slo
    if slo is None:
        return ""
    limits = (("TTFT", slo.ttft_s), ("TBT", slo.tbt_s))
    return ", ".join(f"{name} {limit * 1000:g}" for name, limit in limits if limit is not None)


def _megabytes(num_bytes: int | None) -> str:
    return f"{num_bytes / 1e6:,.1f}" if num_bytes is not None else ""


def _sent(cluster: Cluster, purpose: Purpose) -> str:
    return _megabytes(cluster.nic_bytes[purpose]) if cluster.nic_bytes is not None else ""
