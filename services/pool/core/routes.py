"""From a worker's report to its route: which instances may hold requests."""

from __future__ import annotations

from shared.messages.registry import Route, WorkerHeartbeat

ROUTABLE = ("live", "serving", "draining")
"""States that a gateway must know of. Only ``serving`` takes new requests: ``live`` works for the instance that it
cooperates with, ``draining`` finishes what it has."""


def route_of(report: WorkerHeartbeat) -> Route | None:
    """The route to a worker's instance; None when it has none or it is not up yet."""
    instance = report.instance
    if instance is None or report.state not in ROUTABLE:
        return None
    return Route(
        instance_id=instance.instance_id,
        worker_id=report.worker.worker_id,
        state=report.state,
        role=instance.role,
        max_running_requests=instance.max_running_requests,
        max_queued_tokens=instance.max_queued_tokens,
        context_tokens=instance.context_tokens,
        epoch=instance.epoch,
        stopping=report.stopping,
    )
