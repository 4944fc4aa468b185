"""The cold start elsewhere: a process of its own that loads the checkpoint with transformers and answers.

``python -m bench.zero.fresh CHECKPOINT``: says one token.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

from bench.lab.errors import LabFailed
from bench.zero.wake import PROMPT

_LIMIT_S = 300.0


def missing() -> str:
    """Why it cannot be measured here; empty if it can."""
    return "" if importlib.util.find_spec("transformers") else "transformers is not installed"


def seconds(path: Path) -> float:
    """From the start of the process to its first token. Raises ``LabFailed``."""
    began_s = time.perf_counter()
    command = (sys.executable, "-m", "bench.zero.fresh", str(path))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise LabFailed(f"a fresh process did not answer within {_LIMIT_S:g} s") from error
    if done.returncode != 0 or not done.stdout.strip().isdecimal():
        raise LabFailed(f"a fresh process failed: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
    return time.perf_counter() - began_s


def _main(path: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits
    sys.stdout.write(f"{int(logits[0, -1].argmax())}\n")


if __name__ == "__main__":
    _main(sys.argv[1])
