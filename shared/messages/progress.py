"""What the members of a plan report to the planner, as it happens."""

from __future__ import annotations

from typing import Literal

from shared.messages.codec import Message
from shared.messages.common import Count, Figure, LayerIndex

ProgressEvent = Literal[
    "accepted", "first_byte", "live", "layer_ready", "loaded", "serving", "failed", "spare", "working"
]
"""``serving``, of a mutation: the pool knows the new role. ``working``: the first request that came for that role."""


class ScaleProgress(Message, frozen=True, kw_only=True, tag="scale_progress.v1"):
    """A target's (or source's) report on a plan, as it happens."""

    plan_id: str
    worker_id: str
    instance_id: str
    event: ProgressEvent
    after_s: Figure
    """Since this worker first reported on the plan, by its own clock."""
    layer: LayerIndex = -1
    """With ``layer_ready``: the decoder layer's index."""
    received_bytes: Count = 0
    detail: str = ""
