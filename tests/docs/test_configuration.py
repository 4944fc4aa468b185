"""The documentation names every environment variable, and none that does not exist."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ROOT / "docs/reference/settings.md"
_VARIABLE = re.compile(r"\bBLITZ_[A-Z0-9_]*[A-Z0-9]\b")
_TEXT_FILES = {".py", ".yml", ".yaml", ".conf", ""}
_NOT_SETTINGS = {"BLITZ_PLANS", "BLITZ_RECORDS"}
"""Names of JetStream streams."""


def _names(files: Iterable[Path]) -> set[str]:
    return {name for file in files for name in _VARIABLE.findall(file.read_text(encoding="utf-8"))}


def _in_code() -> set[str]:
    files = [*ROOT.glob("services/*/config.py"), ROOT / "shared/bus/access.py", ROOT / "shared/service.py"]
    for folder in ("compose", "bench"):
        files += [f for f in (ROOT / folder).rglob("*") if f.is_file() and f.suffix in _TEXT_FILES]
    return _with_files(_names(files)) - _NOT_SETTINGS


def _with_files(names: set[str]) -> set[str]:
    """A secret's variable has one beside it that names a file (``Settings.secret``)."""
    return names | {f"{name}_FILE" for name in names if name.endswith("_PASSWORD")}


def _documented() -> set[str]:
    pages = [SETTINGS, *(ROOT / "docs" / f"{name}.md" for name in ("configuration", "operations", "api"))]
    # "BLITZ_WORKER_*" stands for a family, not for a variable.
    text = "".join(re.sub(r"BLITZ_[A-Z_]*\*", "", page.read_text(encoding="utf-8")) for page in pages)
    return set(_VARIABLE.findall(text)) - _NOT_SETTINGS


def test_every_variable_in_the_code_is_documented() -> None:
    assert len(_in_code()) > 50, "the pattern finds nothing"
    assert _in_code() - set(_VARIABLE.findall(SETTINGS.read_text(encoding="utf-8"))) == set()


def test_every_documented_variable_exists() -> None:
    assert _documented() - _in_code() == set()
