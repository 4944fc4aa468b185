"""What the services count, read from where the code makes each metric.

A metric's name, its help and its labels have to be written out there: what is put together at run time is found by
nobody who looks for it, and not here either.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compose.reference.table import table

NAME = re.compile(
    r"blitz_(gateway|monitor|planner|pool|worker|event|bus|nats|gpu|scale|min)_[a-z0-9_]+|blitz_instances|vllm:[a-z0-9_]+"
)
_KINDS = {
    "Counter": "counter", "CounterMetricFamily": "counter", "counter_family": "counter", "ModelCounter": "counter",
    "Gauge": "gauge", "GaugeMetricFamily": "gauge", "gauge_family": "gauge", "ModelGauge": "gauge",
    "Histogram": "histogram", "ModelHistogram": "histogram", "Summary": "summary",
}  # fmt: skip
"""By what makes them."""
_FOLDERS = ("services/gateway", "services/monitor", "services/planner", "services/pool", "services/worker", "shared")


class NotWrittenOut(ValueError):
    """Help or labels of a metric cannot be read from the code."""


@dataclass(frozen=True, slots=True)
class DeclaredMetric:
    """A metric as its maker declares it."""

    name: str
    """As it is exported."""
    kind: str
    labels: tuple[str, ...]
    text: str


def metrics_page(root: Path) -> str:
    """``docs/reference/metrics.md``."""
    parts = ["# Metrics\n\n"]
    for folder in _FOLDERS:
        rows = [
            (f"`{metric.name}`", metric.kind, ", ".join(metric.labels), metric.text)
            for metric in sorted(declared_metrics(root / folder), key=lambda metric: metric.name)
        ]
        title = "All services" if folder == "shared" else folder.rpartition("/")[2].capitalize()
        parts += [f"## {title}\n\n", table(("name", "type", "labels", "meaning"), rows)]
    return "".join(parts).rstrip() + "\n"


def declared_metrics(folder: Path) -> Iterator[DeclaredMetric]:
    """Of all modules below. Raises ``NotWrittenOut``."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
            match node:
                case ast.Call(func=ast.Name(id=maker), args=[ast.Constant(value=str(name)), *rest]) if (
                    maker in _KINDS and NAME.fullmatch(name)
                ):
                    try:
                        yield _declared(name, maker, rest, node.keywords)
                    except NotWrittenOut as error:
                        raise NotWrittenOut(f"{file}:{node.lineno}: {error} of {name} must be written out") from None


def _declared(name: str, maker: str, rest: list[ast.expr], keywords: list[ast.keyword]) -> DeclaredMetric:
    kind = _KINDS[maker]
    if kind == "counter" and not name.endswith("_total"):
        # The client library adds it.
        name += "_total"
    given = next((k.value for k in keywords if k.arg in ("labels", "labelnames")), None)
    if maker.startswith("Model"):
        labels: tuple[str, ...] = ("model_name",)
    elif maker == "GaugeMetricFamily" and given is None:
        # Its third argument is the value.
        labels = ()
    else:
        labels = _labels(given if given is not None or len(rest) < 2 else rest[1])
    return DeclaredMetric(name, kind, labels, _text(rest[0] if rest else None))


def _text(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
    raise NotWrittenOut("the help")


def _labels(node: ast.expr | None) -> tuple[str, ...]:
    if node is None:
        return ()
    match node:
        case ast.List(elts=names) | ast.Tuple(elts=names) if all(isinstance(n, ast.Constant) for n in names):
            return tuple(str(ast.literal_eval(name)) for name in names)
    raise NotWrittenOut("the labels")
