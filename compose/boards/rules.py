"""The alerts, and promtool's tests of them, as YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping

from compose.boards.alerts import ALERTS, Alert, Samples

AT = "10m"


def alerts() -> str:
    """``alerts.yml``."""
    return "groups:\n  - name: blitzscale\n    rules:\n" + "".join(map(_rule, ALERTS))


def alerts_test() -> str:
    """``alerts_test.yml``: ``promtool test rules alerts_test.yml``."""
    tests = "".join(_test(alert, alert.fires, fires=True) + _test(alert, alert.quiet, fires=False) for alert in ALERTS)
    return f"rule_files: [alerts.yml]\nevaluation_interval: 15s\ntests:\n{tests}"


def _rule(alert: Alert) -> str:
    return (
        f"      - alert: {alert.name}\n"
        f"        expr: {_quoted(alert.expr)}\n"
        f"        for: {alert.for_}\n"
        f"        labels: {_mapping({'severity': alert.severity})}\n"
        f"        annotations: {_mapping({'summary': alert.summary})}\n"
    )


def _test(alert: Alert, samples: Samples, *, fires: bool) -> str:
    series = "".join(
        f"      - series: {_quoted(name)}\n        values: {_quoted(values)}\n" for name, values in samples
    )
    expected = " []"
    if fires:
        labels = _mapping({"severity": alert.severity, **alert.labels})
        annotations = _mapping({"summary": alert.shown or alert.summary})
        expected = f"\n          - exp_labels: {labels}\n            exp_annotations: {annotations}"
    return (
        f"  - interval: 1m\n    input_series:\n{series}    alert_rule_test:\n"
        f"      - eval_time: {AT}\n        alertname: {alert.name}\n        exp_alerts:{expected}\n"
    )


def _mapping(values: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{name}: {_quoted(value)}" for name, value in values.items()) + "}"


def _quoted(text: str) -> str:
    return json.dumps(text)
