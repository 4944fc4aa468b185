"""The tables at the end of a replay."""

from __future__ import annotations

from rich.table import Table

from bench.replay.document import Document
from bench.replay.objectives import Attainment
from bench.replay.observations import Cluster
from bench.stats import Summary


def _latency_row(table: Table, label: str, summary: Summary | None) -> None:
    if summary is None:
        table.add_row(label, "-", "-", "-", "-")
        return
    values = (summary.mean, summary.p50, summary.p99, summary.max)
    table.add_row(label, *(f"{value * 1000:,.1f}" for value in values))


def latency_table(document: Document) -> Table:
    """TTFT, TBT and end-to-end times in milliseconds."""
    result = document.result
    table = Table(title="Latency of completed requests (ms)", title_justify="left")
    table.add_column("")
    for heading in ("mean", "p50", "p99", "max"):
        table.add_column(heading, justify="right")
    _latency_row(table, "first token (TTFT)", result.ttft_s)
    _latency_row(table, "between tokens (TBT)", result.tbt_s)
    _latency_row(table, "end to end", result.e2e_s)
    _latency_row(table, "client's own lateness", result.send_lag_s)
    return table


def totals_table(document: Document) -> Table:
    """Counts, tokens, failures by kind, objectives, and what it cost the cluster."""
    result, about = document.result, document.about
    table = Table(show_header=False, title="Requests", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("completed", f"{result.completed:,} of {result.planned:,}")
    for kind, count in result.failures.items():
        table.add_row(f"failed: {kind}", f"{count:,}")
    for label, count in (
        ("unfinished", result.unfinished),
        ("shortened to fit", result.shortened),
        ("rows of the trace without tokens", about.skipped_rows),
        ("rows of the trace out of order", about.unsorted_rows),
    ):
        if count:
            table.add_row(label, f"{count:,}")
    table.add_row("duration", f"{result.duration_s:,.1f} s")
    table.add_row("input tokens", f"{result.input_tokens:,}")
    table.add_row("output tokens", f"{result.output_tokens:,}")
    table.add_row("output tokens/s", f"{result.output_tokens_per_s:,.1f}")
    if document.slo is not None:
        _objectives(table, document.slo)
    if document.cluster is not None:
        _cluster(table, document.cluster)
    return table


def _objectives(table: Table, slo: Attainment) -> None:
    wanted = [
        f"{label} {limit_s * 1000:g} ms" for label, limit_s in (("TTFT", slo.ttft_s), ("TBT", slo.tbt_s)) if limit_s
    ]
    table.add_row(f"within {', '.join(wanted)}", f"{slo.share:.1%}")
    table.add_row("goodput", f"{slo.goodput_requests_per_s:,.2f} requests/s")


def _cluster(table: Table, cluster: Cluster) -> None:
    table.add_row("GPU seconds", f"{cluster.gpu_seconds:,.1f}")
    table.add_row("most GPUs at once", f"{cluster.peak_gpus}")
    if cluster.host_cache_max_bytes is not None:
        table.add_row("host memory of copies, at most", f"{cluster.host_cache_max_bytes / 1e6:,.1f} MB")
    for sent in cluster.carried[-1:]:
        for place, by_purpose in (("over the network", sent.network), ("within hosts", sent.host)):
            for purpose, num_bytes in by_purpose.items():
                if num_bytes or place == "over the network":
                    table.add_row(f"sent {place}: {purpose}", f"{num_bytes / 1e6:,.1f} MB")
    table.add_row("scale operations", f"{len(cluster.operations)}")
