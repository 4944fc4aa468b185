"""What code costs, counted: no clock, and so the same on every machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def operations(function: Callable[[], object]) -> int:
    """Bytecodes of Python that a call executes, those of what it calls included."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # what is collected may run Python of its own
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
