"""What is asked for by hand, as a request that a round can decide on."""

from __future__ import annotations

from services.planner.core.multicast.explain import instances_of
from services.planner.core.operations.decision import ScaleRequest
from shared.engines import traits_of
from shared.errors import BadRequest, Conflict, ModelNotFound
from shared.messages.common import SERVED_BY
from shared.messages.operations import StartScale
from shared.registry_view import RegistryView, bounded


def asked_by_hand(asked: StartScale, view: RegistryView, now_s: float) -> ScaleRequest:
    """``now_s``: when it was asked (monotonic). The registry is to keep the number as the role's floor before a
    round decides: the old floor may be above it, and load is not to undo it. Raises ``ModelNotFound``, ``BadRequest``
    for a role that the model's engine has none of, ``Conflict`` if it is too many."""
    role, wanted, model = asked.role, instances_of(asked.instances, asked.role), view.models.get(asked.model)
    if model is None:
        raise ModelNotFound(f"model {asked.model!r} is not registered", param="model")
    if role not in SERVED_BY["colocated"] and not traits_of(model.engine).moves_kv:
        raise BadRequest(f"role {role}: instances of the engine {model.engine} take no KV from others", param="role")
    if asked.instances > model.max_instances:
        raise Conflict(f"{wanted} are more than the model's max_instances {model.max_instances}")
    why, least = f"asked for {wanted}", bounded(0, model, None, role)
    if asked.instances < least:
        why += f", and min_instances keeps {least}"
    return ScaleRequest(asked.model, asked.instances, now_s, why, asked.live, role, by_hand=True)
