"""From what is needed now to the number of instances: up at once, down late.

- Up to ``ceil(needed)``. Down only when the largest ``needed`` of a whole window would fit fewer instances with
  headroom, or when there was no request anywhere for as long; and no earlier than a window after the connection to
  the bus: before, silence says nothing. How long the window is, the policy or ``services.monitor.core.give_back`` says;
  the latter of one instance where another model has none and no worker is spare.
- What is not needed now is idle. It is spare, too, if two windows of the rate would fit what remains with headroom: a
  role may do without it that would have to load one again, however long that takes.
- The last instance stays for the model's keep-alive after its last request.
- While prompts are overdue, ``needed`` does not fall: the instances were asked for when the prompts came. If as many
  serve and the overdue prompts still do not become fewer, the instances are slower than they say: one more is needed,
  and so on; if they become more, one more than serve.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from services.monitor.core.give_back import MAX_WINDOW_S, idle_window_s
from services.monitor.core.policy import DemandPolicy
from services.monitor.core.windows import MaxWindow


class SizingInputs(NamedTuple):
    """What a number of instances depends on beside the load."""

    observed: int
    """Instances that serve or are on their way."""
    num_serving: int
    load_s: float
    """To fetch one again."""
    keep_alive_s: float
    """How long the last instance stays after the last request, if that is longer than it would by itself."""
    connected_s: float
    """Since when this process's connection is up."""
    idle_s: float
    """Since when there is no request anywhere."""
    crowded: bool = False
    """Another model that was asked for lately has no instance, and no worker is spare."""


class Size(NamedTuple):
    """A number of instances."""

    desired: int
    needed: float
    """Before rounding."""
    idle: int
    """Of those observed, that the load does not need at this moment, whatever is kept for later."""
    spare: int
    """Of these, those that would not be missed if what was needed lately came again."""
    fewer_for_s: float = 0.0
    """Where it is fewer than there are: for how long no more were needed."""
    kept_for_s: float = 0.0
    """Where it is as many as there are, and more than are needed now: the time within which they were needed."""
    keep_alive_s: float = 0.0
    """Where only this keeps the last one."""


class Sizing:
    """The number of one role's instances."""

    def __init__(self, policy: DemandPolicy) -> None:
        self._policy = policy
        self._needed = MaxWindow(max(MAX_WINDOW_S, policy.down_window_s))
        self._asked = MaxWindow(MAX_WINDOW_S)
        """What the load asked for, without what is held for what is overdue: that must not hold itself."""
        self._overdue = _Overdue(policy.rate_window_s)

    def size(
        self,
        needed: float,
        inputs: SizingInputs,
        now_s: float,
        *,
        most: float,
        least: int = 0,
        overdue_tokens: float = 0.0,
    ) -> Size:
        """``most``: as many as there are requests to use them. ``least``: not less, however little is needed."""
        policy, observed = self._policy, inputs.observed
        self._asked.add(now_s, needed)
        if overdue_tokens > 0:
            lately = self._asked.largest(now_s, self._worth_s(inputs))
            needed = max(needed, self._overdue.hold(overdue_tokens, lately, inputs.num_serving, now_s))
        else:
            self._overdue.end()
        needed = min(needed, most)
        self._needed.add(now_s, needed)
        desired, idle, spare, window_s, kept_for_s, keep_alive_s = max(rounded_up(needed), least), 0, 0, 0.0, 0.0, 0.0
        if desired < observed:
            now = desired
            if inputs.connected_s >= policy.report_ttl_s:
                idle = observed - desired
                lately_s = 2 * policy.rate_window_s
                if self._needed.full(now_s, lately_s):
                    spare = max(0, min(idle, observed - self._fitting(now_s, lately_s)))
            kept, window_s = self._kept(policy.down_window_s, inputs, now_s)
            if inputs.crowded and kept >= observed:
                # One at a time: it is not known whether the next one is wanted, too.
                kept, window_s = self._kept(0.0, inputs, now_s)
                kept = max(kept, observed - 1)
            desired = min(observed, max(desired, kept))
            if desired < observed:
                return Size(desired, needed, idle, spare, window_s)
            if self._fitting(now_s, window_s) > now:
                kept_for_s = window_s
            elif observed == 1 and inputs.keep_alive_s > inputs.idle_s:
                keep_alive_s = inputs.keep_alive_s
        return Size(desired, needed, idle, spare, kept_for_s=kept_for_s, keep_alive_s=keep_alive_s)

    def _fitting(self, now_s: float, within_s: float) -> int:
        """Instances that the largest need of that time fits with headroom."""
        return rounded_up(self._needed.largest(now_s, within_s) / self._policy.down_headroom)

    def _kept(self, set_s: float, inputs: SizingInputs, now_s: float) -> tuple[int, float]:
        """Instances that stay for what may come, whatever is needed now, and for how long that was looked at.
        ``set_s``: for which they stay; 0: for as long as that is worth it."""
        # Never shorter than two windows of the rate, or random arrivals would be taken for ups and downs.
        window_s = set_s or self._worth_s(inputs)
        if inputs.connected_s < max(window_s, self._policy.report_ttl_s):
            return inputs.observed, window_s
        idle_s = set_s or idle_window_s(inputs.load_s)
        last = 1 if inputs.idle_s < max(idle_s, inputs.keep_alive_s) else 0
        if inputs.idle_s >= idle_s:
            return last, idle_s
        if not self._needed.full(now_s, window_s):
            return inputs.observed, window_s
        # In small steps of evidence: the whole window's peak must fit what would remain.
        return max(last, self._fitting(now_s, window_s)), window_s

    def _worth_s(self, inputs: SizingInputs) -> float:
        """For how long keeping an instance costs less than to fetch it again. What is overdue has waited for about as
        long: what was needed before that was not needed for it, however long instances are kept."""
        return max(idle_window_s(inputs.load_s), 2 * self._policy.rate_window_s)


class _Overdue:
    """What was needed since prompts became overdue, as long as some are."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._held = 0.0
        self._since: tuple[float, float] | None = None
        """When all that was asked for began to serve, or what is overdue last shrank, and how much there was then."""

    def end(self) -> None:
        """Nothing is overdue."""
        self._held, self._since = 0.0, None

    def hold(self, overdue_tokens: float, lately: float, num_serving: int, now_s: float) -> float:
        """Instances that are needed for what is overdue; ``lately``: the most that were needed while it waited."""
        self._held = max(self._held, lately)
        if num_serving < rounded_up(self._held):
            self._since = None
        elif self._since is None or overdue_tokens < self._since[1]:
            self._since = (now_s, overdue_tokens)
        elif now_s - self._since[0] >= self._patience_s:
            # What is kept for what may come is too few only if there is even more to do in spite of it.
            too_few = num_serving if overdue_tokens > self._since[1] else 0
            self._held, self._since = max(rounded_up(self._held), too_few) + 1.0, None
        return self._held


def rounded_up(instances: float) -> int:
    """To whole instances; what floating point adds is none."""
    return ceil(instances - 1e-6)
