"""What is imported before workers are forked."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from compose.children import worker_modules
from services.worker.engine.kinds import ENGINES

PROGRAM = """
import importlib, json, os, sys, threading
import pynvml  # PyTorch imports it, and asks it nothing yet
asked = []
pynvml.nvmlInit = pynvml.nvmlInitWithFlags = lambda *_: asked.append("NVML")
for name in sys.argv[1:]:
    importlib.import_module(name)
mapped = open("/proc/self/maps").read()
torch = sys.modules.get("torch")
print(json.dumps({
    # FlashInfer asks for every GPU's compute capability when it is imported, by which CUDA starts.
    "modules": sorted({"cupy", "flashinfer", "triton", "ucxx"} & sys.modules.keys()),
    "asked": asked,
    "cuda_started": torch is not None and torch.cuda.is_initialized(),
    "libraries": [name for name in ("libcuda.so", "libnvidia-ml.so", "libucp.so") if name in mapped],
    "devices": [path for fd in os.listdir("/proc/self/fd")
                if os.path.exists(link := f"/proc/self/fd/{fd}") and "/dev/nvidia" in (path := os.readlink(link))],
    "threads": threading.active_count(),
}))
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_what_workers_are_forked_from_touches_neither_driver_nor_nvml(engine: str) -> None:
    """A fork of a process in which CUDA has started cannot use it, and NVML's handles are those of one process."""
    argv = [sys.executable, "-c", PROGRAM, *worker_modules(engine)]
    found = json.loads(subprocess.run(argv, capture_output=True, check=True, text=True).stdout)
    nothing = {"modules": [], "asked": [], "libraries": [], "devices": []}
    assert found == {**nothing, "cuda_started": False, "threads": 1}
