"""vLLM's process, in an environment without vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from services.worker.vllm import blitz_vllm

DISTRIBUTION = Path(blitz_vllm.__file__).parents[1]


def test_what_ended_it_is_said() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "blitz_vllm", "/nowhere.sock", str(os.getpid())],
        cwd=DISTRIBUTION,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("FileNotFoundError")
