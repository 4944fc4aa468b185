"""The dashboard as Grafana reads it, and what Grafana is told of it and of Prometheus."""

from __future__ import annotations

import json
from typing import Any

from compose.boards.panels import ROWS, Panel, Query

UID = "blitzscale"
_COLUMNS = 24
_WIDTH, _HEIGHT = 8, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

DATASOURCES = """\
apiVersion: 1
datasources:
  - name: Prometheus
    type: prometheus
    uid: prometheus
    url: http://prometheus:9090
    isDefault: true
    jsonData:
      timeInterval: 5s
      exemplarTraceIdDestinations:
        - name: trace_id
          url: http://127.0.0.1:16686/trace/$${__value.raw}
"""
"""``$$``: Grafana replaces what begins with one dollar by its environment."""
DASHBOARDS = """\
apiVersion: 1
providers:
  - name: blitzscale
    type: file
    options:
      path: /etc/blitzscale/dashboards
"""


def dashboard() -> str:
    """``grafana.json``."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        position = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row.title, "gridPos": position, "panels": []})
        top += 1
        for place, panel in enumerate(row.panels):
            line, column = divmod(place, _COLUMNS // _WIDTH)
            position = {"x": column * _WIDTH, "y": top + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": position, **_panel(panel)})
        top += -(-len(row.panels) // (_COLUMNS // _WIDTH)) * _HEIGHT
    shown = {
        "uid": UID,
        "title": "BlitzScale",
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasources(), _models()]},
        "panels": panels,
    }
    return json.dumps(shown, indent=2) + "\n"


def _panel(panel: Panel) -> dict[str, Any]:
    custom = {"fillOpacity": 20, "stacking": {"mode": "normal"}} if panel.stacked else {}
    shown: dict[str, Any] = {
        "type": "bargauge" if panel.totals else "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [_target(place, query, panel) for place, query in enumerate(panel.queries)],
    }
    if panel.totals:
        shown["options"] = {"orientation": "horizontal", "reduceOptions": {"calcs": ["lastNotNull"], "values": False}}
    return shown


def _target(place: int, query: Query, panel: Panel) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + place),
        "datasource": _SOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "exemplar": query.exemplars,
        "instant": panel.totals,
        "range": not panel.totals,
    }


def _datasources() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _models() -> dict[str, Any]:
    query = "label_values(blitz_min_instances, model_name)"
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": "models"},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }
