"""What the plugin changes of vLLM is still there to be changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from services.worker.vllm.blitz_vllm.plugin import SPIN_S
from tests.vllm.conftest import PYTHON

SCRIPT = """
import sys, zmq
from blitz_vllm import plugin
plugin.share_cores()
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
print(SpinCondition(is_reader=True, context=zmq.Context(), notify_address="ipc://" + sys.argv[1]).busy_loop_s)
"""


def test_who_waits_for_another_process_soon_sleeps(tmp_path: Path) -> None:
    command = [PYTHON, "-c", SCRIPT, str(tmp_path / "socket")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert float(done.stdout.splitlines()[-1]) == SPIN_S
