"""Why a model's requests wait for their first token, as far as this gateway knows."""

from __future__ import annotations

from typing import Literal, get_args

from services.gateway.core.router import Router
from services.gateway.core.routes import RouteView

WaitReason = Literal["starting", "no_instance", "full", "too_long", "at_instance"]
"""``starting``: no instance takes requests, and one is on its way, as the registry was read last. ``full``: those that
there are take none now. ``too_long``: no instance that there is can hold the request. ``at_instance``: it was handed to
one, and has no token yet."""


def waiting_by_reason(model: str, router: Router, routes: RouteView, num_without_token: int) -> dict[WaitReason, int]:
    """All reasons, with the numbers of requests. ``num_without_token``: those at instances that have none yet."""
    queued, aside = router.queued(model)[0], router.num_aside(model)
    found: dict[WaitReason, int] = dict.fromkeys(get_args(WaitReason), 0)
    found["at_instance"] = num_without_token
    found["too_long"] = aside
    why: WaitReason = "full"
    if router.sleeps(model):
        why = "starting" if model in routes.starting else "no_instance"
    found[why] = queued - aside
    return found
