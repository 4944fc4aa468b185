"""What the command line shows: a row for each system, or for each setting of a sweep. In 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from bench.sim.evaluation import FULL, Evaluation
from bench.sim.frontier import Needed, Point, money, seconds
from bench.sim.run_result import Figures


def systems_table(evaluation: Evaluation) -> Table:
    """Times in milliseconds, attainment in per cent; ``host``: copies in host memory, at most."""
    of = "" if evaluation.slo_of == FULL.name else f"; 5x: the means of {evaluation.slo_of}, not of {FULL.name}"
    shown = table_of_systems(
        f"{evaluation.requests:,} requests on cluster {evaluation.cluster}, {evaluation.model}; ms and % in SLO{of}",
        ("TTFT", "p99", "TBT", "p99", "5x", "abs.", "GPU s", "host", "lost"),
        "TTFT, TBT: means, with p99 beside them, ms; 5x, abs.: % of requests within five times "
        f"{evaluation.slo_of}'s means, and within the objectives of --slo-ttft and --slo-tbt; GPU s: GPU seconds that "
        "instances held; host: most copies of the model in host memory; lost: requests without an answer",
    )
    for name, row in evaluation.systems.items():
        shown.add_row(
            name,
            in_ms(row.ttft_mean_s),
            in_ms(row.ttft_p99_s),
            in_ms(row.tbt_mean_s, 1),
            in_ms(row.tbt_p99_s, 1),
            in_percent(row.slo_attainment),
            in_percent(row.slo_attainment_absolute),
            f"{row.gpu_seconds:.0f}",
            f"{row.host_cache_bytes_max / evaluation.weights_bytes:.0f}",
            _lost(row),
        )
    return shown


def points_table(points: Sequence[Point]) -> Table:
    """The same of settings. ``*``: on the frontier of cost and objectives; ``+``: of cost and TTFT p99."""
    costs = any(point.cost is not None for point in points)
    shown = table_of_systems(
        "what if; ms and % within the absolute SLO; on the frontier of *: SLO, +: p99",
        ("GPUs", "NIC", "keep", "back", "TTFT", "p99", "SLO", "cost" if costs else "GPU s", "lost", ""),
        "NIC: Gbit/s; keep: for how long copies are kept; back: after how long instances are given back; TTFT: mean, "
        "with p99 beside it, ms; SLO: % within the absolute objectives; lost: requests without an answer",
    )
    for point in points:
        shown.add_row(
            point.system,
            f"{point.num_gpus}",
            f"{point.nic_gbps:g}",
            point.keep_copies or "",
            seconds(point.give_back_s) if point.give_back_s is not None else "",
            in_ms(point.ttft_mean_s),
            in_ms(point.ttft_p99_s),
            in_percent(point.slo_attainment_absolute),
            _price(point),
            _lost(point),
            ("*" if point.frontier else "") + ("+" if point.frontier_ttft else ""),
        )
    return shown


def needed_table(needed: Sequence[Needed]) -> Table:
    """What each system's cheapest setting costs by its share of requests within the absolute objectives."""
    costs = any(point is not None and point.cost is not None for one in needed for point in one.points.values())
    shown = table_of_systems(
        f"{'cost' if costs else 'GPU s'} of the cheapest with so many % within the absolute SLO",
        [in_percent(one.share, 2) for one in needed],
    )
    for name in needed[0].points:
        shown.add_row(name, *("-" if (point := one.points[name]) is None else _price(point) for one in needed))
    return shown


def table_of_systems(title: str, columns: Sequence[str], legend: str = "") -> Table:
    """Without rows, whose first cell is a name. What does not fit takes room from the names, which go on below: figures
    stay whole, and names can be told apart."""
    # What a cluster or a trace is called is no markup.
    shown = Table(
        title=Text(title, style="table.title"),
        title_justify="left",
        caption=Text(legend, style="table.caption") if legend else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=0,  # the box has a blank between columns
    )
    shown.add_column("", overflow="fold")
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True, min_width=max(4, len(column)))
    return shown


def in_ms(value: float | None, digits: int = 0) -> str:
    """Of seconds."""
    return "-" if value is None else f"{value * 1000:.{digits}f}"


def in_percent(value: float | None, digits: int = 1) -> str:
    """Of a share; the column says what it is."""
    return "-" if value is None else f"{value:.{digits}%}".removesuffix("%")


def _price(point: Point) -> str:
    return money(point.cost) if point.cost is not None else f"{point.paid_gpu_seconds:.0f}"


def _lost(row: Figures) -> str:
    return f"{row.failed + row.unfinished}"
