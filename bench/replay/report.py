"""The table at the end of a replay."""

from __future__ import annotations

from rich.table import Table

from bench.replay.record import Result
from bench.stats import Summary


def _latency_row(table: Table, label: str, summary: Summary | None) -> None:
    if summary is None:
        table.add_row(label, "-", "-", "-", "-")
        return
    values = (summary.mean, summary.p50, summary.p99, summary.max)
    table.add_row(label, *(f"{value * 1000:,.1f}" for value in values))


def latency_table(result: Result) -> Table:
    """TTFT, TBT and end-to-end times in milliseconds."""
    table = Table(title="Latency of completed requests (ms)", title_justify="left")
    table.add_column("")
    for heading in ("mean", "p50", "p99", "max"):
        table.add_column(heading, justify="right")
    _latency_row(table, "first token (TTFT)", result.ttft_s)
    _latency_row(table, "between tokens (TBT)", result.tbt_s)
    _latency_row(table, "end to end", result.e2e_s)
    _latency_row(table, "client's own lateness", result.send_lag_s)
    return table


def totals_table(result: Result) -> Table:
    """Counts, tokens and failures by kind."""
    table = Table(show_header=False, title="Requests", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("completed", f"{result.completed:,} of {result.planned:,}")
    for kind, count in result.failures.items():
        table.add_row(f"failed: {kind}", f"{count:,}")
    if result.unfinished:
        table.add_row("unfinished", f"{result.unfinished:,}")
    if result.shortened:
        table.add_row("shortened to fit", f"{result.shortened:,}")
    table.add_row("duration", f"{result.duration_s:,.1f} s")
    table.add_row("input tokens", f"{result.input_tokens:,}")
    table.add_row("output tokens", f"{result.output_tokens:,}")
    table.add_row("output tokens/s", f"{result.output_tokens_per_s:,.1f}")
    return table
