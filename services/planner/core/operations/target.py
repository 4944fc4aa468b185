"""One target of a scale operation: what it has told, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shared.messages.common import Role
from shared.messages.operations import TargetRecord
from shared.messages.plans import ChainMember, DrainTarget, MutateTarget
from shared.messages.progress import ScaleProgress
from shared.subjects import Process

Direction = Literal["out", "in", "mutate", "none"]
NamedTarget = ChainMember | DrainTarget | MutateTarget
"""As a plan names it."""


@dataclass(slots=True)
class Target:
    """Follows the events of one instance, in any order. Times are by the planner's monotonic clock. A worker tells how
    long after its first report something was: the report that was fastest on its way tells best when that was."""

    worker: Process
    instance_id: str
    direction: Direction
    _began_s: float = float("inf")
    """When its first report was sent, at the latest."""
    accepted_s: float | None = None
    first_byte_s: float | None = None
    layers_s: dict[int, float] = field(default_factory=dict)
    live_s: float | None = None
    loaded_s: float | None = None
    serving_s: float | None = None
    spare_s: float | None = None
    working_s: float | None = None
    was: Role | None = None
    """Of a mutation: the role before."""
    received_bytes: int = 0
    failure: str = ""

    @property
    def worker_id(self) -> str:
        return self.worker.id

    @property
    def knows_plan(self) -> bool:
        """It has shown a sign of that."""
        return bool(self.accepted_s or self.first_byte_s or self.layers_s or self.loaded_s)

    @property
    def ended(self) -> bool:
        """Well or not."""
        return bool(self.failure) or (self.spare_s if self.direction == "in" else self.serving_s) is not None

    @property
    def gbps(self) -> float | None:
        """At which it loaded; None while that is not known."""
        if self.accepted_s is None or self.loaded_s is None or self.loaded_s <= self.accepted_s:
            return None
        return self.received_bytes * 8 / (self.loaded_s - self.accepted_s) / 1e9

    def apply(self, event: ScaleProgress, now_s: float) -> None:
        """Take one of its progress events, which came now."""
        self._began_s = min(self._began_s, now_s - event.after_s)
        at_s = self._began_s + event.after_s
        self.received_bytes = max(self.received_bytes, event.received_bytes)
        match event.event:
            case "accepted":
                self.accepted_s = self.accepted_s or at_s
            case "first_byte":
                self.first_byte_s = self.first_byte_s or at_s
            case "layer_ready":
                self.layers_s.setdefault(event.layer, at_s)
            case "live":
                self.live_s = self.live_s or at_s
            case "loaded":
                # The registry may have told before, later than it was.
                self.loaded_s = min(self.loaded_s or at_s, at_s)
            case "serving":
                self.serving_s = min(self.serving_s or at_s, at_s)
            case "spare":
                self.spare_s = self.spare_s or at_s
                if self.direction == "out" and self.serving_s is None:
                    self.failure = self.failure or event.detail or "the worker went back to spare"
            case "working":
                self.working_s = self.working_s or at_s
            case "failed":
                self.failure = self.failure or event.detail or "failed"

    def record(self, triggered_s: float) -> TargetRecord:
        """The record as of now, in milliseconds since the trigger."""

        def ms(at_s: float | None) -> float | None:
            return since_ms(triggered_s, at_s)

        return TargetRecord(
            worker_id=self.worker_id,
            instance_id=self.instance_id,
            first_byte_ms=ms(self.first_byte_s),
            layer_ready_ms=tuple(ms(self.layers_s[i]) or 0.0 for i in sorted(self.layers_s)),
            live_ms=ms(self.live_s),
            loaded_ms=ms(self.loaded_s),
            serving_ms=ms(self.serving_s),
            spare_ms=ms(self.spare_s),
            received_bytes=self.received_bytes,
            failure=self.failure,
            working_ms=ms(self.working_s),
            was=self.was,
            gbps=self.gbps,
        )


def since_ms(triggered_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else round((at_s - triggered_s) * 1000, 3)
