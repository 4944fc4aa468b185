"""Well-formed messages that a user may send and that rightly take away what the test then asks for: left out.

Everything else that is well-formed may have its effect for a while; what serves must go on, and heal.
"""

from __future__ import annotations

from shared.messages.codec import MalformedMessage, Message, decode
from shared.messages.common import TAKES_PROMPTS
from shared.messages.live import WorkerOrder
from shared.messages.operations import StartScale
from shared.messages.plans import DrainPlan, MutatePlan
from shared.messages.registry import RemoveModel, RouteChanges
from tests.stack.hostile.drawn import Facts, Shot


def takes_away(shot: Shot, facts: Facts) -> bool:
    """Whether the message is an order, by whom it is for to give it, to end what the test's clients use."""
    try:
        message: Message = decode(shot.payload, shot.target.takes)
    except MalformedMessage:
        return False
    model, instance = facts.model.name, facts.instance.instance_id
    match message:
        case RemoveModel():
            return message.name == model
        case StartScale():
            return message.model == model and message.instances == 0
        case DrainPlan():
            return _drains(message, instance)
        case WorkerOrder():
            mutates = message.mutate is not None and _mutates(message.mutate, instance)
            return mutates or (message.drain is not None and _drains(message.drain, instance))
        case MutatePlan():
            return _mutates(message, instance)
        case RouteChanges():
            others = any(record.name == model and record != facts.model for record in message.models)
            changed = any(found.model == model for found in message.routes)
            gone = any(g.instance_id == instance for g in message.gone)
            return others or changed or gone or model in message.removed_models
    return False


def _drains(plan: DrainPlan, instance: str) -> bool:
    return not plan.revive and any(target.instance_id == instance for target in plan.targets)


def _mutates(plan: MutatePlan, instance: str) -> bool:
    return plan.role not in TAKES_PROMPTS and any(target.instance_id == instance for target in plan.targets)
