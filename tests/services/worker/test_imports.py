"""What a worker process imports before it knows that it needs it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import services.worker.__main__, services.worker.node.facts
print(sorted({"torch", "transformers", "safetensors"} & set(sys.modules)))
"""


def test_a_worker_whose_engine_computes_nothing_does_not_wait_for_pytorch() -> None:
    imported = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert imported.stdout.strip() == "[]"
