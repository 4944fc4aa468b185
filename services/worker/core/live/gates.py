"""The split that the planner computed, kept until its batches are here, and dropped when layers come late."""

from __future__ import annotations

from collections.abc import Iterable

from shared.messages.live import Gate, ZigzagAssignment
from shared.zigzag.batch import ENDED
from shared.zigzag.playback import Lateness
from shared.zigzag.queue import Policy, Queue

LATE_LAYERS = 1.0
"""Gates lapse when a layer is later than planned by the time of so many layers' loading."""


class Gates:
    """Of one pair."""

    def __init__(self, assignment: ZigzagAssignment) -> None:
        self._gates: dict[str, int] = {}
        self._in_force = False
        planned = assignment.layers_ready_s
        self._lateness: Lateness | None = None
        if len(planned) > 1:
            each_s = (planned[-1] - planned[0]) / (len(planned) - 1)
            # The last layer counts as there when everything is.
            planned = (*planned[:-1], max(planned[-1], assignment.loaded_s))
            self._lateness = Lateness(planned, LATE_LAYERS * each_s)

    @property
    def may_lapse(self) -> bool:
        """Some are in force, and it is known when layers should come."""
        return self._in_force and bool(self._gates) and self._lateness is not None

    def set(self, queue: Queue, gates: Iterable[Gate]) -> None:
        """Put these in force; those of batches that are not here yet when they come. Nonsense is left out."""
        if queue.policy is not Policy.ZIGZAG:
            return
        queue.lapse()
        self._gates = {g.batch_id: g.num_layers for g in gates if 0 <= g.num_layers <= queue.num_layers}
        self._in_force = True
        for batch in queue.batches():
            self.added(queue, batch.batch_id)

    def added(self, queue: Queue, batch_id: str) -> None:
        """A batch is in the queue now."""
        if self._in_force and batch_id in self._gates and queue.batch(batch_id).state not in ENDED:
            queue.set_gate(batch_id, self._gates[batch_id])

    def lapse_if_late(self, queue: Queue, since_plan_s: float) -> bool:
        """Drop all gates if the next layer should have been here long ago, so long after the plan. Whether they were
        dropped now."""
        if not self._in_force or self._lateness is None or not self._lateness.late(queue.layers_ready, since_plan_s):
            return False
        queue.lapse()
        self._in_force = False
        return True
