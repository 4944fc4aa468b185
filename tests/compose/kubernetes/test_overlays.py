"""The overlays as they are rendered: every rule holds, and what is rendered is what the sources say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.compose.kubernetes.manifests import FOLDER, OVERLAYS, load
from tests.compose.kubernetes.rules import Secrets, complaints


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_rule_holds(overlay: str, secrets: Secrets) -> None:
    assert complaints(load(overlay), secrets) == []


def test_every_overlay_is_rendered() -> None:
    assert {path.name for path in (FOLDER / "overlays").iterdir()} == set(OVERLAYS)
    assert {path.stem for path in (FOLDER / "rendered").glob("*.yaml")} == set(OVERLAYS)


def test_what_is_rendered_is_of_these_sources() -> None:
    script = FOLDER.parents[1] / ".ci" / "render_kubernetes.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
