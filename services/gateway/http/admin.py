"""``/admin``: what the cluster is doing, adding and removing models, scaling by hand."""

from __future__ import annotations

import math
import time
from typing import get_args

import msgspec
from fastapi import APIRouter, Request, Response

from services.gateway.http.asgi import JSON, header, read_body
from services.gateway.http.errors import UnsupportedMediaType
from services.gateway.http.fields import Fields, parse_object
from services.gateway.http.pool import pool_json
from services.gateway.http.status import status_json
from services.gateway.service import Gateway
from shared import subjects
from shared.errors import BadRequest
from shared.messages.common import Ack, LiveChoice, Role
from shared.messages.registry import AddModel, ModelRecord, RemoveModel
from shared.messages.scaling import GetScaleRecord, ListScaleRecords, ScaleRecord, ScaleRecords, StartScale

MAX_WAIT_S = 600.0
MAX_INSTANCES = 1_000_000
MIN_SLO_S = 0.001
MAX_SLO_S = 3600.0
DEFAULT_HOLD_S = 300.0
ADD_TIMEOUT_S = 600.0
"""Registering reads every byte of a checkpoint, to hash it."""
RPC_TIMEOUT_S = 10.0


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type=JSON.decode())


async def _fields(request: Request, gateway: Gateway) -> Fields:
    # The types that a page of another site may send without asking first are all others.
    content_type = header(request.scope, b"content-type").partition(";")[0].strip().lower()
    if content_type != JSON.decode():
        raise UnsupportedMediaType(f"the body needs Content-Type: application/json, not {content_type[:80]!r}")
    body = await read_body(request.scope, request.receive, max_bytes=gateway.config.max_body_bytes)
    return Fields(parse_object(body))


def admin_router(gateway: Gateway) -> APIRouter:
    """The routes, bound to one gateway."""
    router = APIRouter(prefix="/admin", tags=["admin"])
    bus = gateway.bus

    @router.get("/status")
    async def status() -> Response:
        """Models, instances, workers and manual floors."""
        return _json(status_json(await gateway.snapshot(), gateway.load_board.latest(time.monotonic())))

    @router.get("/pool")
    async def pool() -> Response:
        """Which memory holds which model, and whether every model has a copy."""
        return _json(pool_json(await gateway.snapshot()))

    @router.get("/models")
    async def list_models() -> Response:
        """The models part of the status."""
        return _json({"models": status_json(await gateway.snapshot())["models"]})

    @router.post("/models")
    async def add_model(request: Request) -> Response:
        """Register a checkpoint.

        ``{"path", "name"?, "min_instances"?, "max_instances"?, "slo_ttft_s"?, "slo_tbt_s"?}``
        """
        fields = await _fields(request, gateway)
        message = AddModel(
            path=fields.text("path"),
            name=fields.text("name") if fields.raw("name") is not None else "",
            min_instances=fields.integer("min_instances", 1, low=0, high=MAX_INSTANCES),
            max_instances=fields.integer("max_instances", MAX_INSTANCES, low=1, high=MAX_INSTANCES),
            slo_ttft_s=fields.number("slo_ttft_s", 0.0, low=MIN_SLO_S, high=MAX_SLO_S),
            slo_tbt_s=fields.number("slo_tbt_s", 0.0, low=MIN_SLO_S, high=MAX_SLO_S),
        )
        record = await bus.request(subjects.pool("add_model"), message, ModelRecord, timeout_s=ADD_TIMEOUT_S)
        # So that a request right behind this one finds the model.
        await gateway.refresh()
        return _json(record, 201)

    @router.delete("/models/{name:path}")
    async def remove_model(name: str) -> Response:
        """Unregister a model; its instances drain."""
        await bus.request(subjects.pool("remove_model"), RemoveModel(name=name), Ack, timeout_s=RPC_TIMEOUT_S)
        await gateway.refresh()
        return _json({"name": name, "removed": True})

    @router.post("/models/{name:path}/scale")
    async def scale(name: str, request: Request) -> Response:
        """Ask for ``{"instances": N, "hold_s": 300, "live": "auto", "role": "colocated"}`` instances now."""
        gateway.find_model(name)
        fields = await _fields(request, gateway)
        if fields.raw("instances") is None:
            raise BadRequest("instances is required", param="instances")
        message = StartScale(
            model=name,
            instances=fields.integer("instances", 0, low=0, high=MAX_INSTANCES),
            hold_s=fields.number("hold_s", DEFAULT_HOLD_S, low=0, high=1e9),
            live=fields.choice("live", "auto", get_args(LiveChoice)),
            role=fields.choice("role", "colocated", get_args(Role)),
        )
        record = await bus.request(subjects.planner("scale"), message, ScaleRecord, timeout_s=RPC_TIMEOUT_S)
        return _json(record)

    @router.get("/scale")
    async def list_scale_records(limit: str = "20") -> Response:
        """The newest scale operations."""
        if not limit.isdecimal() or not 1 <= int(limit) <= 1000:
            raise BadRequest(f"limit must be an integer from 1 to 1000, not {limit!r}", param="limit")
        message = ListScaleRecords(limit=int(limit))
        return _json(await bus.request(subjects.planner("records"), message, ScaleRecords, timeout_s=RPC_TIMEOUT_S))

    @router.get("/scale/{plan_id}")
    async def get_scale_record(plan_id: str, wait_s: str = "0") -> Response:
        """One scale operation; with ``wait_s`` when it has ended, or after that long."""
        wait = _wait_s(wait_s)
        message = GetScaleRecord(plan_id=plan_id, wait_s=wait)
        return _json(
            await bus.request(subjects.planner("record"), message, ScaleRecord, timeout_s=wait + RPC_TIMEOUT_S)
        )

    return router


def _wait_s(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_WAIT_S:
        raise BadRequest(f"wait_s must be a number from 0 to {MAX_WAIT_S:g}, not {text!r}", param="wait_s")
    return value
