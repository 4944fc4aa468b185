"""How fast this instance computes, by its own steps: the one place where speed is estimated. Others read the reports.

A step's time is not proportional to its size: all weights are read however few tokens there are. So times are kept by
size, the last few of each power of two, and a size's time is their median: one stall of the machine says nothing. A
size that was measured only once, or long ago, counts as far as the others allow: a larger step takes no less time than
a smaller one, and no more per token.

- **Prefill**: prompt tokens per second at the largest size measured, which is what an instance with a queue does. A
  step with prompts and decodes counts with its time less that of a step of as many decodes alone.
- **Decode**: a step of ``n`` requests takes ``base + n · request`` seconds, a line through the times of all sizes.

Pure: sizes and seconds come in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

NUM_RECENT = 5
"""Steps of one size that are remembered: a speed that changed shows after three."""
FORGET_STEPS = 500
"""Steps after which a size that did not occur among them counts as measured long ago."""
LEAST_PREFILL_SHARE = 0.25
"""Of a step with more prompt tokens than decodes. The decodes in it never take more, whatever was measured before."""

Step = tuple[int, float]
"""Its size, and its seconds."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured; each 0 until it is known."""

    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    """At the largest batch measured."""
    decode_base_s: float = 0.0
    """What a decode step takes however few requests it has."""
    decode_request_s: float = 0.0
    """What each of its requests adds. 0 with a base: only one size is known, a lone request."""


class SpeedEstimator:
    """Takes the times of steps, gives the speed."""

    def __init__(self) -> None:
        self._prefill = _TimeBySize()
        self._decode = _TimeBySize()
        self._mixed = _TimeBySize()
        """Steps with prompts, by their decodes, which took no longer alone."""
        self._speed: Speed | None = Speed()
        """None, only behind ``decoded``: to be found out. Else it can be read while another thread steps."""

    @property
    def speed(self) -> Speed:
        """By all steps so far."""
        if self._speed is None:
            self._speed = self._measured()
        return self._speed

    def stepped(self, num_prefill_tokens: int, num_decode_tokens: int, seconds: float) -> None:
        """A step of that many tokens took so long through all layers."""
        if seconds <= 0:
            return
        if not num_prefill_tokens:
            self._decode.add(num_decode_tokens, (seconds,))
            self._speed = self._measured()
            return
        if num_decode_tokens:
            self._mixed.add(num_decode_tokens, (seconds,))
        if num_prefill_tokens > num_decode_tokens:
            decode_s = self._decode_s(num_decode_tokens, seconds / (num_prefill_tokens + num_decode_tokens))
            self.prefilled(num_prefill_tokens, max(seconds - decode_s, LEAST_PREFILL_SHARE * seconds))
        else:  # of few prompt tokens beside decodes: it mostly shows these
            self._speed = self._measured()

    def decoded(self, num_requests: int, seconds: Iterable[float]) -> None:
        """Steps of so many decodes alone took so long, one after another. The speed is found out when it is asked for:
        by one thread alone."""
        self._decode.add(num_requests, [step_s for step_s in seconds if step_s > 0])
        self._speed = None

    def decode_s(self, num_requests: int) -> float:
        """Seconds of a step of so many decodes alone, or of what it takes with none; 0 while nothing was measured."""
        return self.speed.decode_base_s + num_requests * self.speed.decode_request_s

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """So many prompt tokens took so long through all layers, and nothing else was computed at the same time."""
        if seconds > 0:
            self._prefill.add(num_tokens, (seconds,))
            self._speed = self._measured()

    def _decode_s(self, num_requests: int, token_s: float) -> float:
        """Seconds of a step of so many decodes alone; at ``token_s`` each while nothing was measured."""
        if not num_requests:
            return 0.0
        return self.decode_s(num_requests) or num_requests * token_s

    def _measured(self) -> Speed:
        prefill, decode = self._prefill.times(), self._decode.times(self._mixed.recent_steps)
        base_s, request_s = _line(self._decode.of_late(decode))
        return Speed(_tokens_per_s(prefill), _tokens_per_s(decode), base_s, request_s)


class _TimeBySize:
    """Per power of two, the median of the last few steps."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._num_steps = 0

    def add(self, size: int, seconds: Collection[float]) -> None:
        if not seconds:
            return
        self._num_steps += len(seconds)
        known = self._sizes.setdefault(size.bit_length(), _Size())
        known.recent.extend([(size, step_s) for step_s in seconds])
        known.time = None
        known.last_step = self._num_steps

    @property
    def recent_steps(self) -> list[Step]:
        """The last few of each size that occurred of late."""
        return [step for known in self._sizes.values() if self._is_recent(known) for step in known.recent]

    def times(self, at_most: Collection[Step] = ()) -> list[Step]:
        """One step of each size, and its seconds. ``at_most``: such steps had something else in them, too.

        In the order in which sizes were first seen: it decides how sums are rounded.
        """
        settled = [known.median for known in self._sizes.values() if self._is_settled(known)]
        if len(settled) == len(self._sizes):
            return settled
        return [
            known.median if self._is_settled(known) else _within(known.median, settled, at_most)
            for known in self._sizes.values()
        ]

    def of_late(self, times: list[Step]) -> list[Step]:
        """Of all ``times``, those of sizes that occurred of late; all, if fewer than two did."""
        recent = [time for time, known in zip(times, self._sizes.values(), strict=True) if self._is_recent(known)]
        return recent if len(recent) > 1 else times

    def _is_recent(self, known: _Size) -> bool:
        return self._num_steps - known.last_step < FORGET_STEPS

    def _is_settled(self, known: _Size) -> bool:
        return len(known.recent) > 1 and self._is_recent(known)


class _Size:
    """What steps of about one size took."""

    __slots__ = ("last_step", "recent", "time")

    def __init__(self) -> None:
        self.recent: deque[Step] = deque(maxlen=NUM_RECENT)
        self.time: Step | None = None
        """None: to be found out."""
        self.last_step = 0

    @property
    def median(self) -> Step:
        if self.time is None:
            # The faster of two: what slows a single step down (the first one, a stall) is not the engine.
            self.time = sorted(self.recent, key=_unit_s)[(len(self.recent) - 1) // 2]
        return self.time


def _within(step: Step, known: Collection[Step], at_most: Collection[Step]) -> Step:
    """The step with seconds that those of others allow."""
    size, seconds = step
    for other, other_s in (*known, *at_most):
        seconds = min(seconds, other_s * max(1.0, size / other))
    for other, other_s in known:
        seconds = max(seconds, other_s * min(1.0, size / other))
    return size, seconds


def _tokens_per_s(times: Collection[Step]) -> float:
    """At the largest size; 0 without any."""
    return 1 / _unit_s(max(times)) if times else 0.0


def _unit_s(step: Step) -> float:
    return step[1] / step[0]


def _line(times: Collection[Step]) -> tuple[float, float]:
    """Base and slope of the line nearest to all (size, seconds), neither of them negative."""
    if len(times) < 2:
        # Of one size alone nothing tells the two apart: all of a lone request's step is base, all of a batch's slope.
        return next(((seconds, 0.0) if size == 1 else (0.0, seconds / size) for size, seconds in times), (0.0, 0.0))
    mean_size = sum(size for size, _ in times) / len(times)
    mean_s = sum(seconds for _, seconds in times) / len(times)
    slope = sum((size - mean_size) * (seconds - mean_s) for size, seconds in times) / sum(
        (size - mean_size) ** 2 for size, _ in times
    )
    slope = min(max(slope, 0.0), mean_s / mean_size)
    return max(0.0, mean_s - slope * mean_size), slope
