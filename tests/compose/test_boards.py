"""Boards are as the code makes them, and ask for metrics that there are."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from compose.boards.alerts import ALERTS
from compose.boards.files import COMMAND, FOLDER, board_files
from compose.boards.panels import ROWS, Panel
from compose.cli.app import run
from compose.reference.metrics import declared_metrics

ROOT = Path(__file__).parents[2]
PANELS = tuple(itertools.chain.from_iterable(row.panels for row in ROWS))


def exprs() -> Iterator[str]:
    yield from (query.expr for panel in PANELS for query in panel.queries)
    yield from (alert.expr for alert in ALERTS)


def test_committed_files_are_as_the_code_makes_them() -> None:
    committed = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.iterdir()}
    assert committed == board_files(), f"make them again: {COMMAND}"


def test_what_is_asked_for_is_exported_with_the_labels_that_are_named() -> None:
    declared = {metric.name: metric for folder in ("services", "shared") for metric in declared_metrics(ROOT / folder)}
    for expr in exprs():
        for name, matchers in re.findall(r"((?:blitz_|vllm:)[a-z0-9_]+)(?:\{([^}]*)\})?", expr):
            plain = re.sub(r"_bucket$", "", name)
            assert plain in declared, expr
            assert (declared[plain].kind == "histogram") == (name != plain), expr
            named = set(re.findall(r"(\w+)[=!]", matchers))
            assert named <= {*declared[plain].labels, "le"}, expr


def test_the_dashboard_has_a_picture_of_every_panel_and_none_hides_another() -> None:
    shown = json.loads(board_files()["grafana.json"])["panels"]
    assert [p["title"] for p in shown if p["type"] != "row"] == [panel.title for panel in PANELS]
    assert len({p["id"] for p in shown}) == len(shown)
    covered = [
        (x, y)
        for at in (p["gridPos"] for p in shown)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(covered)) == len(covered)
    assert max(x for x, _ in covered) < 24


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_lines_are_told_apart_by_the_labels_that_a_query_keeps(panel: Panel) -> None:
    for query in panel.queries:
        outer = re.match(r"(?:histogram_quantile\([\d.]+, )?\(?(?:sum|max|avg) by \(([^)]*)\)", query.expr)
        kept = {label.strip() for label in outer[1].split(",")} - {"le"} if outer else set()
        assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) == kept


def test_every_alert_has_an_example_of_both_and_files_are_yaml() -> None:
    files = board_files()
    rules = yaml.safe_load(files["alerts.yml"])["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [alert.name for alert in ALERTS]
    tests = yaml.safe_load(files["alerts_test.yml"])["tests"]
    fired = [(t["alert_rule_test"][0]["alertname"], bool(t["alert_rule_test"][0]["exp_alerts"])) for t in tests]
    assert fired == [(alert.name, fires) for alert in ALERTS for fires in (True, False)]
    assert all(test["input_series"] for test in tests)


def test_the_command_writes_them_and_replaces_nothing_that_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "boards"
    assert run(["boards", str(folder)]) == 0
    assert {file.name for file in folder.iterdir()} == set(board_files())
    (folder / "targets.yml").write_text("- targets: [mine:1]\n")
    capsys.readouterr()
    assert run(["boards", str(folder)]) == 1
    assert capsys.readouterr().err == f"error: {folder}/targets.yml is there, and is another: --force replaces it\n"
    assert (folder / "targets.yml").read_text() == "- targets: [mine:1]\n"
    assert run(["boards", str(folder), "--force"]) == 0
    assert (folder / "targets.yml").read_text() == board_files()["targets.yml"]
    (tmp_path / "file").touch()
    assert run(["boards", str(tmp_path / "file")]) == 1
