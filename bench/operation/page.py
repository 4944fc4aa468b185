"""The report of an operation as one HTML file that needs nothing else, and hardly a script: tables have all figures.

All texts are foreign: workers, models and errors name themselves. They are escaped in ``_text``, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from bench.command_line import printable
from bench.operation.charts import MAX_BARS, MAX_CURVES, Chart, batches_chart, layers_chart
from bench.operation.frame import framed
from bench.operation.report import HopRate, OperationReport, Phase, ended, failures_of
from compose.cli.tables import shown_time
from compose.cli.why import headline, particulars
from shared.messages.operations import LiveRecord, ScaleRecord, TargetRecord

MAX_ROWS = 200
"""Of a table."""
MAX_PAIRS = 32
_OF_WORDS = ("", "from", "instance", "target", "to", "was")
"""Columns; all others are of numbers."""
_DIRECTIONS = {"out": "scaling out", "in": "scaling in", "mutate": "changing roles", "none": "nothing to do"}


def save(report: OperationReport, path: Path) -> None:
    """Write the page. Raises ``OSError``."""
    path.write_text(page_of(report), encoding="utf-8")


def page_of(report: OperationReport) -> str:
    """The page."""
    record = report.record
    charts: list[Chart] = []
    body = "".join(
        (
            f"<h1>{_text(record.model)}: {_DIRECTIONS[record.direction]}</h1>",
            f"<p>{_text(report.sentence)}</p>",
            _about(record),
            _phases(report.phases),
            _list("How it was planned", record.explain),
            _list("Left out", record.left_out),
            _list("Failures", failures_of(record)),
            _targets(record, charts),
            _hops(report.hops),
            _pairs(record.live, charts),
            _decision(report),
        )
    )
    return framed(f"{_text(record.model)}: {_text(record.plan_id)}", body, charts)


def _text(text: str) -> str:
    """A foreign text in HTML. What no one would see, or what turns the direction of writing, is shown as it is
    written."""
    return escape(printable(text))


def _about(record: ScaleRecord) -> str:
    facts = [
        ("operation", record.plan_id),
        ("status", "advised, not carried out" if record.advice else record.status),
        ("role", record.role),
        ("wanted", f"{record.desired}"),
        ("triggered", shown_time(record.triggered_at_s)),
        ("received", _megabytes(record.bytes) if record.bytes else ""),
        ("slowest target", f"{_gbps(record.gbps)} Gbit/s from accepting the plan until loaded" if record.gbps else ""),
        ("trace", record.trace_id),
    ]
    rows = [(f'<th scope="row">{name}</th>', _cell(value)) for name, value in facts if value]
    return _table((), rows)


def _phases(phases: Sequence[Phase]) -> str:
    if not phases:
        return ""
    most_ms = max((phase.after_ms or 0.0 for phase in phases), default=0.0)
    rows = []
    for phase in phases:
        share = min(1.0, max(0.0, phase.after_ms / most_ms)) if phase.after_ms and most_ms > 0 else 0.0
        bar = f'<i style="width:{share:.1%}"></i>' if phase.after_ms is not None else ""
        name = f'<th scope="row" class="name">{_text(phase.name)}</th>'
        after = "-" if phase.after_ms is None else f"{_ms(phase.after_ms)} ms"
        rows.append((name, _number(after), f'<td class="track">{bar}</td>', _cell(phase.meaning)))
    return "<h2>Phases</h2>" + _table((), rows)


def _list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{_text(line)}</li>" for line in lines[:MAX_ROWS])
    return f"<h2>{title}</h2><ul>{items}</ul>{_more(len(lines), MAX_ROWS)}"


def _targets(record: ScaleRecord, charts: list[Chart]) -> str:
    if not record.targets:
        return ""
    rows, times = [], []
    for target in record.targets[:MAX_ROWS]:
        is_, style = _state(record, target)
        cells = [_name(target.worker_id), f'<td class="state {style}">{is_}</td>']
        if record.direction == "out":
            figures = (
                _ms(target.first_byte_ms),
                str(len(target.layer_ready_ms)),
                _ms(target.live_ms),
                _ms(target.loaded_ms),
                _ms(target.serving_ms),
                _megabytes(target.received_bytes),
                _gbps(target.gbps),
            )
            cells += map(_number, figures)
        elif record.direction == "mutate":
            cells += [_cell(target.was or "-"), _number(_ms(target.serving_ms)), _number(_ms(target.working_ms))]
        else:
            cells.append(_number(_ms(target.spare_ms)))
        rows.append([*cells, _cell(target.instance_id)])
        if target.layer_ready_ms:
            at_ms = ", ".join(_ms(each) for each in target.layer_ready_ms)
            times.append(f"<p><b>{_text(target.worker_id)}</b>: {at_ms}</p>")
    columns = {
        "out": ("first byte ms", "layers", "live ms", "loaded ms", "serving ms", "received", "Gbit/s"),
        "mutate": ("was", "new role ms", "first request ms"),
    }.get(record.direction, ("spare ms",))
    each = f"<details><summary>ms of each layer</summary>{''.join(times)}</details>" if times else ""
    table = _table(("target", "", *columns, "instance"), rows, len(record.targets))
    loading = sum(bool(target.layer_ready_ms) for target in record.targets)
    return f"<h2>Targets</h2>{_place(layers_chart(record), charts, loading, MAX_CURVES)}{table}{each}"


def _state(record: ScaleRecord, target: TargetRecord) -> tuple[str, str]:
    """In a word, and the class that gives its colour."""
    if target.failure:
        return "failed", "failed"
    if ended(record, target):
        return ("spare" if record.direction == "in" else "serving"), "done"
    return "not ended", "dim"


def _hops(hops: Sequence[HopRate]) -> str:
    if not hops:
        return ""
    rows = [
        (
            _name(hop.source or "disk"),
            _cell({"gpu": "GPU", "host": "host copy", "disk": "checkpoint"}[hop.source_kind]),
            _name(hop.target),
            _number(f"{hop.share:.0%}"),
            _number(_megabytes(hop.bytes)),
            _number(_gbps(hop.gbps)),
        )
        for hop in hops[:MAX_ROWS]
    ]
    said = "Who sent to whom. Rates are means from accepting the plan until loaded."
    table = _table(("from", "", "to", "share", "received", "Gbit/s"), rows, len(hops))
    return f'<h2>Chain</h2><p class="dim">{said}</p>{table}'


def _pairs(pairs: Sequence[LiveRecord], charts: list[Chart]) -> str:
    if not pairs:
        return ""
    return f"<h2>Live scaling</h2>{''.join(_pair(p, charts) for p in pairs[:MAX_PAIRS])}{_more(len(pairs), MAX_PAIRS)}"


def _pair(pair: LiveRecord, charts: list[Chart]) -> str:
    facts = [
        ("why", pair.why),
        ("outcome", f"{pair.outcome}: {pair.reason}" if pair.reason else pair.outcome),
        ("policy", pair.policy),
        ("began, ms", _ms(pair.started_ms)),
        ("first cooperative token, ms", _ms(pair.first_cooperative_token_ms)),
        ("ended, ms", _ms(pair.ended_ms)),
    ]
    about = _table((), [(f'<th scope="row">{name}</th>', _cell(value)) for name, value in facts])
    rows = [
        tuple(
            map(
                _number,
                (
                    str(number),
                    str(batch.num_requests),
                    str(batch.num_tokens),
                    str(batch.target_layers),
                    str(batch.source_layers),
                    # A batch that ended without a token has none since before the beginning.
                    _ms(batch.first_token_ms if batch.first_token_ms >= 0 else None),
                ),
            )
        )
        for number, batch in enumerate(pair.batches[:MAX_ROWS], 1)
    ]
    columns = ("batch", "requests", "tokens", "target layers", "source layers", "first token ms")
    batches = _table(columns, rows, len(pair.batches)) if rows else "<p>No batch.</p>"
    title = f"<h3>{_text(pair.source)} (source) with {_text(pair.target)} (target)</h3>"
    return title + about + _place(batches_chart(pair), charts, len(pair.batches), MAX_BARS) + batches


def _decision(report: OperationReport) -> str:
    title = "<h2>What was decided, and what otherwise</h2>"
    decision = report.decision
    if decision is None:
        why = report.lacking or "none is remembered of this operation, or of its role within a minute"
        return f'{title}<p class="dim">No decision: {_text(why)}.</p>'
    near = "" if report.is_its_decision else '<p class="dim">No decision names it: this is the nearest in time.</p>'
    rows = [(f'<th scope="row">{name}</th>', _cell(value)) for name, value in particulars(decision)]
    return f"{title}{near}<p>{_text(headline(decision).plain)}</p>{_table((), rows)}"


def _place(chart: Chart | None, charts: list[Chart], count: int, most: int) -> str:
    """Where the script draws it, if there is one."""
    if chart is None:
        return ""
    charts.append(chart)
    some = f'<p class="dim">The chart shows the first {most} of {count}.</p>' if count > most else ""
    return f'<div class="chart" id="chart{len(charts) - 1}"></div>{some}'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], count: int = 0) -> str:
    """Cells are HTML. ``count``: of the rows that there are."""
    heads = "".join(
        f'<th scope="col" class="{"" if column in _OF_WORDS else "number"}">{column}</th>' for column in columns
    )
    lines = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    head = f"<thead><tr>{heads}</tr></thead>" if columns else ""
    return f'<div class="scrolls"><table>{head}<tbody>{lines}</tbody></table></div>{_more(count, MAX_ROWS)}'


def _more(count: int, shown: int) -> str:
    return f'<p class="dim">and {count - shown} more; --json has all</p>' if count > shown else ""


def _name(text: str) -> str:
    return f'<td class="name">{_text(text)}</td>'


def _cell(text: str) -> str:
    return f'<td class="words">{_text(text)}</td>'


def _number(text: str) -> str:
    return f'<td class="number">{_text(text)}</td>'


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _gbps(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
