"""A stack as a process of the project's own environment. What is here and in the tests runs in the clients'."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.names import KEY

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv/bin/python"
"""Of the project's environment."""


@dataclass(frozen=True)
class Served:
    """A stack that serves."""

    url: str
    models: dict[str, str]
    """Where each checkpoint is."""

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """One stack for all tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    process = subprocess.Popen(
        [PYTHON, "-m", "tests.clients.serve"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, text=True,
    )  # fmt: skip
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the stack did not start"
        yield Served(**json.loads(line))
        process.stdin.close()


@pytest.fixture(scope="session", autouse=True)
def _environment(served: Served) -> Iterator[None]:
    """What clients find in the environment: one server, and no telemetry."""
    found = {
        "OPENAI_BASE_URL": served.openai_url,
        "OPENAI_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_API_KEY": KEY,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "DO_NOT_TRACK": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in found.items():
            patch.setenv(name, value)
        yield
