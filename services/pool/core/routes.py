"""From worker records to routes: which instances of a model may hold requests."""

from __future__ import annotations

from collections.abc import Iterable

from shared.messages.registry import ModelRecord, Route, WorkerHeartbeat

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
    )


def routes_by_model(reports: Iterable[WorkerHeartbeat], models: Iterable[ModelRecord]) -> dict[str, tuple[Route, ...]]:
    """Routes of every registered model that has any, in the order of instance ids.

    Instances of other weights that had the same name before are left out: they only finish what they have.
    """
    hashes = {model.name: model.model_hash for model in models}
    found: dict[str, list[Route]] = {}
    for report in reports:
        route = route_of(report)
        if route is None or report.instance is None:
            continue
        if hashes.get(report.instance.model) == report.instance.model_hash:
            found.setdefault(report.instance.model, []).append(route)
    return {model: tuple(sorted(routes, key=lambda r: r.instance_id)) for model, routes in sorted(found.items())}
