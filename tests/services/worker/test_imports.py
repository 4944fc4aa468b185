"""What a worker process imports before it knows that it needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import importlib, sys
from compose.children import worker_modules
import compose.workers, services.worker.__main__
for module in worker_modules(sys.argv[1]):
    importlib.import_module(module)
print(sorted({"torch", "transformers", "safetensors", "llguidance"} & set(sys.modules)))
"""


@pytest.mark.parametrize("engine", ["mock", "none"])
def test_a_worker_whose_engine_computes_nothing_does_not_wait_for_pytorch(engine: str) -> None:
    command = [sys.executable, "-c", PROGRAM, engine]
    imported = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert imported.stdout.strip() == "[]"
