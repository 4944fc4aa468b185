"""What vLLM's process says, in the place of which a script speaks."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from services.worker.vllm import blitz_vllm
from services.worker.vllm.blitz_vllm import words
from services.worker.vllm.front_process import FrontProcess
from shared.errors import EngineBroken
from tests.wait_until import WAIT_S

SCRIPT = """#!{python}
import socket, sys, time
sys.path.insert(0, {folder!r})
from blitz_vllm import words
print({said!r}, flush=True)
time.sleep(0.2)
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[3])
connection.sendall(words.frame(words.Failed(reason={reason!r})))
sys.exit(1)  # at once, as vLLM's does
"""
ABOVE = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
LOGS = "Model architectures ['LlavaForConditionalGeneration'] failed to be inspected. Please check the logs."
LOG = """(EngineCore pid=7) ERROR 11-29 [core.py:1] Traceback (most recent call last):
(Worker pid=8) ERROR 11-29 [multiproc.py:1] torch.OutOfMemoryError: no room
(EngineCore pid=7) Exception: WorkerProc initialization failed due to an exception. See stack trace for root cause.
RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("reason", "said", "shown"),
    [
        (ABOVE, LOG, f"{ABOVE} torch.OutOfMemoryError: no room"),
        (
            LOGS,
            "ModuleNotFoundError: No module named 'torchvision'",
            f"{LOGS} ModuleNotFoundError: No module named 'torchvision'",
        ),
        (ABOVE, "the only line", f"{ABOVE} the only line"),
        ("ValueError: no room", LOG, "ValueError: no room"),
    ],
    ids=["of another process", "of one that has ended", "no error was logged", "it says itself why"],
)
async def test_what_failed_is_shown_wherever_it_was_logged(tmp_path: Path, reason: str, said: str, shown: str) -> None:
    script, folder = tmp_path / "python", str(Path(blitz_vllm.__file__).parents[1])
    script.write_text(SCRIPT.format(python=sys.executable, folder=folder, said=said, reason=reason))
    script.chmod(0o755)
    front = FrontProcess(str(script))
    await front.start(threads=1)
    try:
        with pytest.raises(EngineBroken) as failed:
            await front.answer(words.Started, WAIT_S)
        assert failed.value.message == shown
    finally:
        front.close()
    assert await asyncio.to_thread(front.join, WAIT_S)
