"""Called by vLLM in each of its processes (``vllm.general_plugins``), if ``VLLM_PLUGINS`` names it."""

from __future__ import annotations

import ctypes
import os
import signal

OURS = "BLITZ_VLLM_PARENT"
"""Set by our process for those that it starts: in somebody else's ``vllm serve`` this plugin does nothing."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Be killed as soon as the process that started this one has ended, whatever this one is doing."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # it ended before that
        os._exit(1)


def register() -> None:
    """Our ways for weights and grammars; and no process of ours outlives the one that started it."""
    parent = os.environ.get(OURS)
    if parent is None:
        return
    if parent != str(os.getpid()):
        die_with_parent()
    from . import grammars, weights

    weights.register()
    weights.register_refill()
    grammars.install()
