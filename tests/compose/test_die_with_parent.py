from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.wait_until import eventually_sync

PARENT = """
import asyncio, sys
from pathlib import Path
from compose.child import ChildSpec
from compose.supervisor import Supervisor

async def main():
    supervisor = Supervisor(Path(sys.argv[1]))
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    import os
    for name, argv in (("sleep", ("/bin/sleep", "600")), ("deaf", (sys.executable, "-S", "-c", deaf))):
        child = await supervisor.start(ChildSpec(name, argv, dict(os.environ)))
        print(child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_killing_the_supervisor_leaves_no_child(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close() if parent.stdout else None

    def gone(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    eventually_sync(lambda: all(gone(pid) for pid in pids))
