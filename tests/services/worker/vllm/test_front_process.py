"""What vLLM's process says, in the place of which a script speaks."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import pytest

from services.worker.vllm import blitz_vllm
from services.worker.vllm.blitz_vllm import words
from services.worker.vllm.front_process import MAX_REASON_CHARACTERS, FrontProcess, remove_leftovers
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


ASSERTED = """(Worker pid=8) ERROR 11-29 [multiproc.py:1]     assert weight.shape[0] == self.vocab_size
(Worker pid=8) ERROR 11-29 [multiproc.py:1]            ^^^^^^^^^^^
(Worker pid=8) ERROR 11-29 [multiproc.py:1] AssertionError
(EngineCore pid=7) Exception: WorkerProc initialization failed due to an exception. See stack trace for root cause.
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
        (ABOVE, ASSERTED, f"{ABOVE} AssertionError: assert weight.shape[0] == self.vocab_size"),
        (ABOVE, "the only line", f"{ABOVE} the only line"),
        ("ValueError: no room", LOG, "ValueError: no room"),
    ],
    ids=["of another process", "of one that has ended", "an assertion", "no error was logged", "it says itself why"],
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


MANY = """#!{python}
import socket, subprocess, sys, tempfile
sys.path.insert(0, {folder!r})
from blitz_vllm import words
subprocess.Popen(["sleep", "600"])
assert sys.argv[3].startswith(tempfile.mkdtemp().rpartition("/")[0])
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[3])
connection.sendall(words.frame(words.Failed(reason="ValueError:\\n  one of " + "many, " * 400, is_final=True)))
sys.exit(1)
"""


async def test_a_long_reason_is_cut_and_nothing_is_left(tmp_path: Path) -> None:
    script, folder = tmp_path / "python", str(Path(blitz_vllm.__file__).parents[1])
    script.write_text(MANY.format(python=sys.executable, folder=folder))
    script.chmod(0o755)
    front = FrontProcess(str(script))
    await front.start(threads=1)
    with pytest.raises(EngineBroken) as failed:
        await front.answer(words.Started, WAIT_S)
    assert failed.value.message.startswith("ValueError: one of many, many")
    assert len(failed.value.message) < MAX_REASON_CHARACTERS + 10
    assert front.failure_is_final
    assert await asyncio.to_thread(front.join, WAIT_S)
    assert not front.folder.exists()
    with pytest.raises(ProcessLookupError):  # nor what it has started
        os.killpg(front.pid or 0, 0)


ORPHANED = """
import asyncio, os, signal
from services.worker.vllm.front_process import FrontProcess
async def main():
    front = FrontProcess("/bin/true")
    print(front.folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


async def test_folders_of_killed_workers_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", ORPHANED, stdout=asyncio.subprocess.PIPE)
    said, _ = await killed.communicate()
    mine = FrontProcess("/bin/true")
    unknown = tmp_path / "blitz-vllm-unknown"
    unknown.mkdir()
    assert set(os.listdir(tmp_path)) == {Path(said.decode().strip()).name, mine.folder.name, unknown.name}
    remove_leftovers()
    assert set(os.listdir(tmp_path)) == {mine.folder.name, unknown.name}
    mine.close()
    assert not mine.folder.exists()
