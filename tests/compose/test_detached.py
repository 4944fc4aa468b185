"""A launcher that is interrupted, and a process that takes its time to end."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil

_CODE = """
import os, signal, sys, time
from compose.detached import launch

signals = 0

def work(launcher):
    def on_signal(*_):
        global signals
        signals += 1
        if signals == 1:
            launcher.ready(["ready all the same"])
        else:
            os._exit(7)

    signal.signal(signal.SIGTERM, on_signal)
    launcher.line("stack", str(os.getpid()))
    time.sleep(60)
    os._exit(1)

try:
    launch(work, lambda name, text: print(name, text, flush=True), lambda text: print(text, flush=True))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_each_interrupt_is_the_stacks_also_once_it_has_said_that_it_serves() -> None:
    with subprocess.Popen([sys.executable, "-c", _CODE], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        stack = psutil.Process(int(launcher.stdout.readline().split()[1]))
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout.readline() == "ready all the same\n"
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout.read() == "interrupted\n"
        assert launcher.wait() == 0
    assert not stack.is_running()
