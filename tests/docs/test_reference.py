"""docs/reference is what the code says, and says of everything in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from compose.reference.metrics import NAME, NotWrittenOut, declared_metrics
from compose.reference.pages import COMMAND, FOLDER, ROOT, pages
from compose.reference.settings import settings_of_services
from compose.variables import OF_CONTAINERS


def test_pages_are_as_the_code_makes_them() -> None:
    committed = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.iterdir()}
    assert committed == pages(), f"make them again: {COMMAND}"


def test_every_setting_has_a_meaning() -> None:
    asked = settings_of_services()
    assert sum(map(len, asked.values())) > 100
    assert [key for settings in asked.values() for key, s in settings.items() if not s.meaning.endswith(".")] == []


def test_every_metric_in_the_code_is_found() -> None:
    found = {
        metric.name.removesuffix("_total") for f in ("services", "shared") for metric in declared_metrics(ROOT / f)
    }
    written = {
        node.value.removesuffix("_total")
        for folder in ("services", "shared")
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value)
    }
    assert len(written) > 50
    assert written == found


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ('Counter("blitz_pool_x_total", text, registry=r)', "the help"),
        ('Gauge("blitz_pool_x", "Of x.", labels, registry=r)', "the labels"),
    ],
)
def test_what_is_put_together_at_run_time_is_refused(tmp_path: Path, code: str, what: str) -> None:
    (tmp_path / "module.py").write_text(code)
    with pytest.raises(NotWrittenOut, match=rf"module\.py:1: {what} of blitz_pool_x"):
        list(declared_metrics(tmp_path))


def test_what_docker_compose_reads_is_described_with_its_default() -> None:
    read: dict[str, str] = {}
    for name in ("docker-compose.gpu.yml", "docker-compose.vllm.yml", "docker-compose.yml"):
        text = (ROOT / "compose" / name).read_text(encoding="utf-8")
        read |= dict(re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", text))
        read |= dict.fromkeys(re.findall(r"\$\{([A-Z_]+):\?", text), "required")
    described = {setting.key: setting.default for setting in OF_CONTAINERS}
    services = {key for asked in settings_of_services().values() for key in asked}
    assert set(read) - services - set(described) == set()
    blitz = {key for key in described if key.startswith("BLITZ_")}
    assert blitz - set(read) == set()
    for key in blitz - {"BLITZ_PROFILES"}:
        assert read[key] in described[key], key
