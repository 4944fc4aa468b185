"""How long scaling out took, from the records of operations that ended."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from shared.messages.operations import ScaleRecord


class ScaleSeconds:
    """A histogram per phase."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "blitz_scale_seconds",
            "Scaling out, from the trigger until: plan (published), first_byte (the first target had its first piece), "
            "first_cooperative_token (of a pair: a prompt of which both ran layers), serving (the last target accepted "
            "requests).",
            ["phase"],
            buckets=(
                0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
            ),
            registry=registry,
        )  # fmt: skip

    def observe(self, record: ScaleRecord) -> None:
        """An operation has ended: count the phases that it got to, if it scaled out."""
        if record.direction != "out":
            return
        cooperative = (pair.first_cooperative_token_ms for pair in record.live)
        phases = {
            "plan": record.trigger_to_plan_ms,
            "first_byte": record.trigger_to_first_byte_ms,
            "first_cooperative_token": min((ms for ms in cooperative if ms is not None), default=None),
            "serving": record.trigger_to_serving_ms,
        }
        exemplar = {"trace_id": record.trace_id} if record.trace_id else None
        for phase, ms in phases.items():
            if ms is not None:
                self._seconds.labels(phase).observe(ms / 1000, exemplar)
