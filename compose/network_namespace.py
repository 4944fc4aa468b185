"""Into a network namespace, as ``ip netns exec`` goes."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

NAMESPACES = Path("/run/netns")
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 0x4000, 0x80000, 2


def enter_network(name: str) -> None:
    """This process from now on: its sockets, and what ``/sys`` shows of interfaces. Needs root. Raises ``OSError``."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)

    fd = os.open(NAMESPACES / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        check(libc.setns(fd, _CLONE_NEWNET))
    finally:
        os.close(fd)
    # A /sys of its own, which nobody else sees.
    check(libc.unshare(_CLONE_NEWNS))
    check(libc.mount(b"", b"/", None, _MS_REC | _MS_SLAVE, None))
    libc.umount2(b"/sys", _MNT_DETACH)
    check(libc.mount(name.encode(), b"/sys", b"sysfs", 0, None))
