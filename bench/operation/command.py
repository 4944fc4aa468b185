"""``blitzscale report OPERATION``: on the terminal, as a page, or as JSON."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from bench.command_line import printable, say_wrong, show, writing
from bench.operation.find import find_operation
from bench.operation.report import OperationReport, failures_of
from compose.admin import GatewayUnreachable
from compose.cli.options import ask, print_json

MAX_LINES = 20
"""Of what went wrong, on the terminal."""


def report_operation(name: str, url: str, *, as_json: bool, html_file: Path | None) -> None:
    """``name``: as in ``find_operation``, and of no file. Raises what it raises, and ``NotWritten``."""
    try:
        report = ask(url, lambda client: find_operation(client, name))
    except GatewayUnreachable as error:
        raise GatewayUnreachable(f"{name}: no such file here, and no stack to ask for an operation: {error}") from error
    if html_file is not None:
        from bench.operation import page

        with writing(html_file):
            page.save(report, html_file)
    if as_json:
        print_json(report)
    else:
        _show(report)


def _show(report: OperationReport) -> None:
    phases = Table(box=None, pad_edge=False, show_header=False)
    phases.add_column(no_wrap=True)
    phases.add_column(justify="right", no_wrap=True)
    phases.add_column(overflow="fold")
    for phase in report.phases:
        after = "-" if phase.after_ms is None else f"{phase.after_ms:,.1f} ms"
        phases.add_row(phase.name, after, Text(phase.meaning, style="dim"))
    show(printable(report.sentence))
    if report.phases:
        show(phases)
    wrong = [f"failed: {line}" for line in failures_of(report.record)]
    wrong += [f"left out: {line}" for line in report.record.left_out]
    for line in wrong[:MAX_LINES]:
        say_wrong(line)
    if len(wrong) > MAX_LINES:
        say_wrong(f"and {len(wrong) - MAX_LINES} more; --json has all")
