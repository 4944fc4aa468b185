"""Children that cannot outlive their parent, however it ends (Linux ``PR_SET_PDEATHSIG``)."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent(death_signal: int = signal.SIGKILL, *, parent: int | None = None) -> Callable[[], None]:
    """A function for ``preexec_fn``: the kernel sends the child ``death_signal`` when its parent dies.

    "Parent" is the *thread* that forks: call it where that thread lives as long as the child should.
    ``parent``: None is the process that calls this. Everything is looked up here, before the fork, so that the child
    makes one system call only.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid() if parent is None else parent

    def in_child() -> None:
        if prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0 or os.getppid() != parent:
            # Not guarded, or the parent died between the fork and the call.
            os._exit(127)

    return in_child


def live_without_parent() -> None:
    """Undoes that for this process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
