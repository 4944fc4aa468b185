"""The overlays as they are rendered: every rule holds, and what is rendered is what the sources say."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from tests.compose.kubernetes.manifests import FOLDER, NAME, OVERLAYS, load
from tests.compose.kubernetes.rules import RULES, Secrets, complaints


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_rule_holds(overlay: str, secrets: Secrets) -> None:
    assert complaints(load(overlay), secrets) == []


def test_what_is_rendered_is_of_these_sources() -> None:
    script = FOLDER.parents[1] / ".ci" / "render_kubernetes.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pod_that_fills_the_claim_is_as_restricted_as_the_others(secrets: Secrets) -> None:
    pod = yaml.safe_load((FOLDER / "fill-models.yaml").read_text())
    template = {"metadata": {"labels": {NAME: "fill-models"}}, "spec": pod["spec"]}
    workload = {"kind": "Deployment", "metadata": pod["metadata"], "spec": {"template": template}}
    assert list(RULES["security"]([workload], secrets)) == []
    assert list(RULES["schema"]([pod], secrets)) == []
