"""Endpoints without error handling whose failure is an error of their requests and no more.

Inside a host a receiver copies out of its sender's memory (``process_vm_readv``). Where the sender has died before it
does, UCX ends the receiver's process, unless somebody takes the endpoint's errors; and only endpoints that are made
with error handling, for which UCX then avoids that way of copying, get a handler from ``ucxx``. UCX itself gives any
endpoint one, by a call that ``ucxx`` does not have.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

_MAPS = Path("/proc/self/maps")
_FIELD_ERR_HANDLER = 1 << 2
_ErrorHandler = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)


class _EndpointParams(ctypes.Structure):
    """The head of ``ucp_ep_params_t``, as far as it is read when only the handler is given."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_void_p),
        ("err_mode", ctypes.c_int),
        ("err_handler", _ErrorHandler),
        ("err_handler_arg", ctypes.c_void_p),
        ("rest", ctypes.c_uint64 * 32),
    )


def _ignore(argument: int | None, endpoint: int | None, status: int) -> None:
    """Whoever waits learns of it: UCX ends the endpoint's requests with the error."""
    del argument, endpoint, status


_HANDLER = _ErrorHandler(_ignore)
"""Kept for the life of the process: endpoints point to it."""


def survive_failure(handle: int) -> None:
    """Take the errors of the endpoint with this handle (a ``ucp_ep_h``)."""
    modify = _modify()
    if modify is None:
        return
    params = _EndpointParams(field_mask=_FIELD_ERR_HANDLER, err_handler=_HANDLER)
    problem = modify(handle, ctypes.byref(params))
    if problem:
        _log.warning("UCX takes no error handler for an endpoint (status %s)", ctypes.c_int(problem).value)


@cache
def _modify() -> Any | None:
    """``ucp_ep_modify_nb`` of the UCX that this process has loaded."""
    files = {line.split()[-1] for line in _MAPS.read_text(encoding="utf-8").splitlines() if "/libucp" in line}
    for file in sorted(files):
        modify = getattr(ctypes.CDLL(file), "ucp_ep_modify_nb", None)
        if modify is not None:
            modify.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
            modify.restype = ctypes.c_void_p
            return modify
    _log.warning("this UCX has no ucp_ep_modify_nb: a process ends with the peer of its host that it copies from")
    return None
