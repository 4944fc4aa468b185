"""Checks of a model's name, its path and its settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from shared.engines import check_engine, traits_of
from shared.errors import BadRequest
from shared.messages.admin import MAX_KEEP_ALIVE_S, MAX_NO_ROOM_TIMEOUT_S, MAX_SLO_S, MAX_WEIGHT, MIN_SLO_S
from shared.messages.common import SERVED_BY
from shared.messages.registry import AddModel, ModelRecord

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,199}")


def name_of(request: AddModel) -> str:
    """The name that the model will have: its directory's if none was asked for. Raises ``BadRequest``."""
    name = request.name or request.path.rstrip("/").rpartition("/")[2]
    if not MODEL_NAME.fullmatch(name):
        raise BadRequest(
            f"model name {name!r}: use letters, digits and '._/:-', starting with a letter or digit", param="name"
        )
    return name


def path_of(path: str, roots: Sequence[Path]) -> Path:
    """The directory, without links and dots. Raises ``BadRequest`` unless it is below one of ``roots``, or there are
    none."""
    try:
        found = Path(path).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise BadRequest(f"{path!r} is no path: {error}", param="path") from error
    if roots and not any(found.is_relative_to(root) for root in roots):
        allowed = ", ".join(str(root) for root in roots)
        raise BadRequest(f"{path!r} is not below a directory for checkpoints: {allowed}", param="path")
    return found


def check_limits(request: AddModel | ModelRecord) -> None:
    """Raises ``BadRequest`` naming the parameter if instances, objectives, times or the weight are out of range, or
    contradict each other, how the model is served, or its engine."""
    check_engine(request.engine)
    if request.engine_args is not None and not request.engine:
        raise BadRequest("engine_args is only for a model of another engine than the system's own", param="engine_args")
    if request.warm and not request.engine:
        raise BadRequest("warm is only for a model of another engine than the system's own", param="warm")
    if request.serving == "disaggregated" and not traits_of(request.engine).moves_kv:
        raise BadRequest(
            f"served_as disaggregated: instances of the engine {request.engine} take no KV from others",
            param="served_as",
        )
    if not 0 <= request.min_instances <= request.max_instances:
        raise BadRequest(
            f"min_instances {request.min_instances} and max_instances {request.max_instances} "
            "must satisfy 0 <= min <= max",
            param="min_instances",
        )
    if request.serving == "disaggregated":
        # Also where it goes to zero in between: what one role's instance begins, the other's is to continue.
        least = len(SERVED_BY["disaggregated"]) * max(1, request.min_instances)
        if request.max_instances < least:
            raise BadRequest(
                f"max_instances {request.max_instances} is of all roles together, and a model that is served "
                f"disaggregated has {max(1, request.min_instances)} of each at least: it must be {least} or more",
                param="max_instances",
            )
    if not 0 < request.weight <= MAX_WEIGHT:
        raise BadRequest(
            f"weight must be greater than 0 and at most {MAX_WEIGHT:.0f}, not {request.weight:g}", param="weight"
        )
    for param, slo_s in (("slo_ttft_s", request.slo_ttft_s), ("slo_tbt_s", request.slo_tbt_s)):
        # NaN is in no range.
        if slo_s != 0 and not MIN_SLO_S <= slo_s <= MAX_SLO_S:
            raise BadRequest(
                f"{param} must be from {MIN_SLO_S:g} to {MAX_SLO_S:g} seconds, or 0 for none, not {slo_s:g}",
                param=param,
            )
    no_room_timeout_s = request.no_room_timeout_s
    if no_room_timeout_s is not None and not 0 <= no_room_timeout_s <= MAX_NO_ROOM_TIMEOUT_S:
        raise BadRequest(
            f"no_room_timeout_s must be from 0 to {MAX_NO_ROOM_TIMEOUT_S:.0f} seconds, not {no_room_timeout_s:g}",
            param="no_room_timeout_s",
        )
    keep_alive_s = request.keep_alive_s
    if not 0 <= keep_alive_s <= MAX_KEEP_ALIVE_S:
        raise BadRequest(
            f"keep_alive_s must be from 0 to {MAX_KEEP_ALIVE_S:.0f} seconds, not {keep_alive_s:g}",
            param="keep_alive_s",
        )
    if keep_alive_s and request.min_instances:
        raise BadRequest(
            f"with keep_alive_s {keep_alive_s:g} the model goes to zero instances, and with min_instances "
            f"{request.min_instances} it does not: one of the two must be 0",
            param="keep_alive_s",
        )
