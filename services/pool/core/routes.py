"""From worker records to routes: which instances of a model take requests."""

from __future__ import annotations

from collections.abc import Iterable

from shared.messages.registry import Route, WorkerHeartbeat

ROUTABLE = ("serving", "draining")
"""States that a gateway must know of: ``draining`` finishes what it has and takes nothing new."""


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
    )


def routes_by_model(reports: Iterable[WorkerHeartbeat]) -> dict[str, tuple[Route, ...]]:
    """Routes of every model that has any, in the order of instance ids."""
    found: dict[str, list[Route]] = {}
    for report in reports:
        route = route_of(report)
        if route is not None and report.instance is not None:
            found.setdefault(report.instance.model, []).append(route)
    return {model: tuple(sorted(routes, key=lambda r: r.instance_id)) for model, routes in sorted(found.items())}
