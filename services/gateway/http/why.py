"""Why a model has as many instances as it has: what the monitor, the planner and the gateways know of it, together."""

from __future__ import annotations

import asyncio
from typing import Literal, TypeVar

from services.gateway.service import Gateway
from shared import subjects
from shared.errors import BlitzError
from shared.messages.admin import WhyStatus
from shared.messages.codec import Message
from shared.messages.decisions import Decisions, GetVerdicts, ListDecisions, Verdicts
from shared.messages.operations import ListScaleRecords, ScaleRecords

M = TypeVar("M", bound=Message)
TIMEOUT_S = 2.0
"""A service that leads no more, or does not yet, is not waited for: the answer says what is missing."""


async def why(gateway: Gateway, model: str, until_s: float | None, limit: int) -> WhyStatus:
    """``until_s``: the decisions that were made by then (Unix time), and nothing of now. Raises ``ModelNotFound`` for a
    model that was never heard of."""
    silent: list[Literal["monitor", "planner"]] = []

    async def ask(service: Literal["monitor", "planner"], subject: str, message: Message, reply: type[M]) -> M | None:
        try:
            return await gateway.bus.request(subject, message, reply, timeout_s=TIMEOUT_S)
        except BlitzError:
            if service not in silent:
                silent.append(service)
            return None

    listing = ListDecisions(model=model, until_s=until_s, limit=limit)
    decided = ask("planner", subjects.planner("decisions"), listing, Decisions)
    known = model in gateway.routes.models
    if until_s is not None or not known:
        decisions = await decided
        if not known and decisions is not None and not decisions.decisions:
            gateway.find_model(model)
        return WhyStatus(
            model=model, decisions=decisions.decisions if decisions is not None else (), silent=tuple(silent)
        )
    decisions, verdicts, planned = await asyncio.gather(
        decided,
        ask("monitor", subjects.verdicts(), GetVerdicts(model=model), Verdicts),
        ask("planner", subjects.planner("records"), ListScaleRecords(limit=0, models=(model,)), ScaleRecords),
    )
    return WhyStatus(
        model=model,
        roles=verdicts.roles if verdicts is not None else (),
        queued_requests=gateway.dispatcher.router.queued_anywhere(model),
        unplanned=planned.unplanned if planned is not None else (),
        decisions=decisions.decisions if decisions is not None else (),
        silent=tuple(silent),
    )
