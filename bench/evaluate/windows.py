"""Which parts of a trace are replayed. Pure.

A window lasts 90 s and begins 20 s before a burst. The trace is divided into as many equal parts as windows are wanted
and one more; of each part one window is taken. Of the windows that lie in the part and have at least as many requests
as the trace has in 90 s on average, it is the one whose burst, 10 s, is the most above its mean rate; of equals, the
earliest. A part in which no window has so many gives the one with the most. The first part's window is for tuning
(search of rate and split): nothing of it is reported as a result.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.traces.request import Trace
from shared.errors import BadRequest

WINDOW_S = 90.0
BURST_S = 10.0
LEAD_S = 20.0
"""Of a window before its burst."""
MAX_WINDOWS = 100


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of a trace."""

    start_s: float
    seconds: float = WINDOW_S

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds

    def __str__(self) -> str:
        return f"{self.start_s:g}:{self.seconds:g}"

    @classmethod
    def parse(cls, text: str) -> Window:
        """``START:SECONDS``. Raises ``BadRequest``."""
        start, _, seconds = text.partition(":")
        try:
            window = cls(float(start), float(seconds))
        except ValueError:
            raise BadRequest(f"a window is START:SECONDS, as 1960:90, not {text!r}", param="window") from None
        if not (0 <= window.start_s < math.inf and 0 < window.seconds < math.inf):
            raise BadRequest(f"a window begins at 0 s or later and has a length, not {text!r}", param="window")
        return window


@dataclass(frozen=True, slots=True)
class Windows:
    """Of a trace, in the order of time."""

    tuning: Window
    measured: tuple[Window, ...]


def count(trace: Trace, start_s: float, end_s: float) -> int:
    """Requests from ``start_s`` up to ``end_s``."""
    return _first_at(trace, end_s) - _first_at(trace, start_s)


def _first_at(trace: Trace, at_s: float) -> int:
    return bisect_left(trace.requests, at_s, key=lambda request: request.arrival_s)


def choose(trace: Trace, number: int) -> Windows:
    """See the module. Raises ``BadRequest`` for a trace that is too short for so many."""
    if not 1 <= number <= MAX_WINDOWS:
        raise BadRequest(f"from 1 to {MAX_WINDOWS} windows, not {number}", param="windows")
    part_s = trace.span_s / (number + 1)
    if part_s < WINDOW_S:
        raise BadRequest(
            f"{trace.name} lasts {trace.span_s:.0f} s: not enough for {number} windows of {WINDOW_S:g} s and one for "
            "tuning; give fewer, or one with --window",
            param="windows",
        )
    tuning, *measured = (_best(trace, index * part_s, (index + 1) * part_s) for index in range(number + 1))
    return Windows(tuning, tuple(measured))


def beside(trace: Trace, window: Window) -> Windows:
    """With a window that was given. It is tuned on the best one of 90 s, whatever its own length, in the rest of the
    trace that is longer, before or after; of a trace without room for one, on itself. Raises ``BadRequest`` for an
    empty window."""
    if not count(trace, window.start_s, window.end_s):
        raise BadRequest(
            f"{trace.name} has no request from {window.start_s:g} to {window.end_s:g} s "
            f"(it lasts {trace.span_s:.0f} s)",
            param="window",
        )
    before, after = (0.0, window.start_s), (window.end_s, trace.span_s)
    begin_s, end_s = max(before, after, key=lambda rest: rest[1] - rest[0])
    if end_s - begin_s < WINDOW_S:
        return Windows(window, (window,))
    return Windows(_best(trace, begin_s, end_s), (window,))


def _best(trace: Trace, begin_s: float, end_s: float) -> Window:
    """Starts are whole seconds. In time and memory linear in the part's seconds, which may be millions."""
    usual = WINDOW_S * len(trace.requests) / max(trace.span_s, WINDOW_S)
    starts = range(math.ceil(begin_s), math.floor(end_s - WINDOW_S) + 1) or range(round(begin_s), round(begin_s) + 1)
    before = _before(trace, starts[0], starts[-1] + int(WINDOW_S))

    def within(lead_s: float, seconds: float) -> npt.NDArray[np.int64]:
        """Requests from so long after each start, for so long."""
        first, last = int(lead_s), int(lead_s + seconds)
        return before[last : last + len(starts)] - before[first : first + len(starts)]

    sizes = within(0, WINDOW_S)
    enough = sizes >= max(1.0, usual)
    if not enough.any():
        return Window(starts[int(np.argmax(sizes))])
    bursts = within(LEAD_S, BURST_S) / np.maximum(sizes, 1)
    return Window(starts[int(np.argmax(np.where(enough, bursts, -1.0)))])


def _before(trace: Trace, begin_s: int, end_s: int) -> npt.NDArray[np.int64]:
    """How many requests come from ``begin_s`` up to each whole second, up to ``end_s``."""
    first, last = (_first_at(trace, at_s) for at_s in (begin_s, end_s))
    seconds = np.fromiter((math.floor(r.arrival_s) - begin_s for r in trace.requests[first:last]), np.int64)
    return np.concatenate([[0], np.cumsum(np.bincount(seconds, minlength=end_s - begin_s))])
