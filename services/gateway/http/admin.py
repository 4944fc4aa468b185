"""``/admin``: what the cluster is doing, adding, changing and removing models, scaling by hand."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from services.gateway.errors import UnsupportedMediaType
from services.gateway.http import asgi
from services.gateway.http.asgi import JSON, client_of, header
from services.gateway.http.status import pool_of, status_of
from services.gateway.http.why import why
from services.gateway.request_bodies.body import read_body, required, shown
from services.gateway.request_bodies.engine_args import read_engine_args
from services.gateway.service import Gateway
from shared import subjects
from shared.engines import check_engine
from shared.errors import BadRequest, BlitzError, InProgress, NoResponder, Unavailable
from shared.messages.admin import (
    MAX_INSTANCES,
    AddModelBody,
    ModelList,
    ModelRemoved,
    ScaleBody,
    SetModelBody,
    TrafficStatus,
    WorkerList,
    WorkerStatus,
)
from shared.messages.codec import Message
from shared.messages.common import Ack
from shared.messages.decisions import MAX_DECISIONS
from shared.messages.operations import GetScaleRecord, ListScaleRecords, ScaleRecord, ScaleRecords, StartScale
from shared.messages.registry import (
    AddModel,
    CordonWorker,
    GetGpuTime,
    GpuTimeReport,
    ModelRecord,
    RemoveModel,
    SetModel,
)
from shared.messages.traffic import GetTraffic, WorkerTraffic
from shared.registry import RegistryView
from shared.subjects import Process

T = TypeVar("T")
M = TypeVar("M", bound=Message)

MAX_BODY_BYTES = 64 * 1024
MAX_WAIT_S = 600.0
MAX_UNIX_S = 1e12
MAX_RECORDS = 1000
"""In one answer."""
DEFAULT_HOLD_S = 300.0
ADD_TIMEOUT_S = 600.0
"""Registering reads every byte of a checkpoint, to hash it."""
RPC_TIMEOUT_S = 10.0
LEADER_WAIT_S = 6.0
"""How long to wait for a planner that leads: the one before may just have died, or the pool that says who does."""
LEADER_RETRY_S = 0.2
REFUSED_TIMEOUT_S = 0.5
"""The status is shown without the planner's part where that does not answer."""
TRAFFIC_TIMEOUT_S = 0.5
MAX_ASKED = 64
"""Workers that are asked at a time what they have carried."""


WITHOUT_POOL = "the registry cannot be read or changed until one leads"
WITHOUT_PLANNER = "nothing is scaled until one leads"


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type=JSON.decode())


async def _body(request: Request, gateway: Gateway, type_: type[T]) -> T:
    # The types that a page of another site may send without asking first are all others.
    content_type = header(request.scope, b"content-type").partition(";")[0].strip().lower()
    if content_type != JSON.decode():
        raise UnsupportedMediaType(f"the body needs Content-Type: application/json, not {content_type[:80]!r}")
    config = gateway.config
    with gateway.request_memory.claim(client_of(request.scope)) as claim:
        raw = await asgi.read_body(
            request.scope,
            request.receive,
            max_bytes=min(config.max_body_bytes, MAX_BODY_BYTES),
            timeout_s=config.read_timeout_s,
            claim=claim,
            offload=gateway.offload,
        )
        return read_body(raw, type_)


@contextlib.contextmanager
def _asking(service: str, without: str) -> Iterator[None]:
    """Says in an operator's words that no process of a kind answers, and what that means."""
    try:
        yield
    except NoResponder as error:
        raise NoResponder(f"no {service} answers: {without}; requests are still served", retry_after_s=1.0) from error


def admin_router(gateway: Gateway) -> APIRouter:
    """The routes, bound to one gateway."""
    router, admin = APIRouter(prefix="/admin", tags=["admin"]), _Admin(gateway)
    router.get("/status")(admin.status)
    router.get("/pool")(admin.pool)
    router.get("/gpu_time")(admin.gpu_time)
    router.get("/traffic")(admin.traffic)
    router.get("/workers")(admin.list_workers)
    router.post("/workers/{worker_id}/drain")(admin.drain_worker)
    router.post("/workers/{worker_id}/undrain")(admin.undrain_worker)
    router.get("/models")(admin.list_models)
    router.post("/models")(admin.add_model)
    router.patch("/models/{name:path}")(admin.set_model)
    router.delete("/models/{name:path}")(admin.remove_model)
    router.post("/models/{name:path}/scale")(admin.scale)
    router.get("/why/{name:path}")(admin.explain)
    router.get("/scale")(admin.list_scale_records)
    router.get("/scale/{plan_id}")(admin.get_scale_record)
    return router


class _Admin:
    """What each route does."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._bus = gateway, gateway.bus

    async def _added(self, message: AddModel) -> ModelRecord:
        """Ask until the pool has read the checkpoint, which it says piece by piece."""
        deadline_s = time.monotonic() + ADD_TIMEOUT_S
        while True:
            try:
                with _asking("pool", WITHOUT_POOL):
                    return await self._bus.request(
                        subjects.pool("add_model"), message, ModelRecord, timeout_s=ADD_TIMEOUT_S
                    )
            except InProgress:
                if time.monotonic() >= deadline_s:
                    raise

    async def _planner(self, verb: str, message: Message, kind: type[M], timeout_s: float = RPC_TIMEOUT_S) -> M:
        """Ask the planner that leads, once there is one; one that does not lead has changed nothing."""
        deadline_s = time.monotonic() + LEADER_WAIT_S
        while True:
            try:
                with _asking("planner", WITHOUT_PLANNER):
                    return await self._bus.request(subjects.planner(verb), message, kind, timeout_s=timeout_s)
            except Unavailable as error:
                # Not what derives from them, as a lack of capacity.
                if type(error) not in (Unavailable, NoResponder) or time.monotonic() >= deadline_s:
                    raise
                await asyncio.sleep(LEADER_RETRY_S)

    async def _registry(self) -> RegistryView:
        with _asking("pool", WITHOUT_POOL):
            return await self._gateway.registry()

    def _queued(self, view: RegistryView) -> dict[str, int]:
        return {name: self._gateway.dispatcher.router.queued_anywhere(name) for name in view.models}

    async def _planners_part(self) -> ScaleRecords:
        """What the planner knows beside the registry; nothing while none leads."""
        message = ListScaleRecords(limit=0)
        try:
            return await self._bus.request(
                subjects.planner("records"), message, ScaleRecords, timeout_s=REFUSED_TIMEOUT_S
            )
        except BlitzError:
            return ScaleRecords(records=())

    async def status(self) -> Response:
        """Models, instances, workers, manual floors, and workers that are left alone because they failed."""
        loads = self._gateway.load_gauges.latest(time.monotonic())
        view, planned = await self._registry(), await self._planners_part()
        return _json(status_of(view, loads, planned, self._queued(view)))

    async def pool(self) -> Response:
        """Which memory holds which model, and whether every model has a copy."""
        return _json(pool_of(await self._registry()))

    async def gpu_time(self, model: str = "") -> Response:
        """What the workers' GPUs were for since the pool leads, and what an hour of one costs; with ``model`` of that
        one, and of what is idle."""
        message = GetGpuTime(model=model)
        with _asking("pool", WITHOUT_POOL):
            return _json(
                await self._bus.request(subjects.pool("gpu_time"), message, GpuTimeReport, timeout_s=RPC_TIMEOUT_S)
            )

    async def traffic(self) -> Response:
        """Bytes of weights, KV and activations that each worker has sent and received."""
        limit = asyncio.Semaphore(MAX_ASKED)

        async def ask(worker: Process) -> WorkerTraffic | None:
            subject = subjects.worker_traffic(worker)
            try:
                async with limit:
                    return await self._bus.request(subject, GetTraffic(), WorkerTraffic, timeout_s=TRAFFIC_TIMEOUT_S)
            except BlitzError:  # it is gone, or stands still
                return None

        asked = [record.worker.process for record in (await self._registry()).workers]
        answers = await asyncio.gather(*map(ask, asked))
        return _json(
            TrafficStatus(
                workers=tuple(answer for answer in answers if answer is not None),
                silent=tuple(worker.id for worker, answer in zip(asked, answers, strict=True) if answer is None),
            )
        )

    async def list_workers(self) -> Response:
        """The workers part of the status."""
        return _json(WorkerList(workers=await self._workers()))

    async def drain_worker(self, worker_id: str) -> Response:
        """Free a worker of everything; its process stays. Repeated, it changes nothing."""
        return await self._cordon(worker_id, lift=False)

    async def undrain_worker(self, worker_id: str) -> Response:
        """Use a worker again. Of one that was not drained it changes nothing."""
        return await self._cordon(worker_id, lift=True)

    async def _cordon(self, worker_id: str, *, lift: bool) -> Response:
        message = CordonWorker(worker_id=worker_id, lift=lift)
        with _asking("pool", WITHOUT_POOL):
            await self._bus.request(subjects.pool("cordon_worker"), message, Ack, timeout_s=RPC_TIMEOUT_S)
        # One that is away is remembered all the same.
        return _json(next((w for w in await self._workers() if w.id == worker_id), WorkerStatus(id=worker_id)))

    async def _workers(self) -> tuple[WorkerStatus, ...]:
        return status_of(await self._registry(), planned=await self._planners_part()).workers

    async def list_models(self) -> Response:
        """The models part of the status."""
        view = await self._registry()
        return _json(ModelList(models=status_of(view, queued=self._queued(view)).models))

    async def add_model(self, request: Request) -> Response:
        """Register a checkpoint.

        ``{"path", "name"?, "engine"?, "engine_args"?}``, and settings as ``set_model`` takes.
        """
        body = await _body(request, self._gateway, AddModelBody)
        engine = body.engine or ""
        check_engine(engine)
        message = AddModel(
            path=required(body.path, "path"),
            name=body.name or "",
            min_instances=body.least,
            max_instances=MAX_INSTANCES if body.max_instances is None else body.max_instances,
            slo_ttft_s=body.slo_ttft_s or 0.0,
            slo_tbt_s=body.slo_tbt_s or 0.0,
            keep_alive_s=body.keep_alive_s or 0.0,
            serving=body.served_as or "",
            weight=1.0 if body.weight is None else body.weight,
            advise=bool(body.advise),
            prefix_cache=body.prefix_cache is not False,
            tool_parser=body.tool_parser or "auto",
            reasoning_parser=body.reasoning_parser or "auto",
            no_room_timeout_s=body.no_room_timeout_s,
            engine=engine,
            engine_args=read_engine_args(engine, body.engine_args),
            warm=bool(body.warm),
        )
        known = {name: model.record.added_at_s for name, model in self._gateway.routes.models.items()}
        record = await self._added(message)
        # So that a request right behind this one finds the model.
        await self._gateway.refresh()
        return _json(record, 200 if known.get(record.name) == record.added_at_s else 201)

    async def set_model(self, name: str, request: Request) -> Response:
        """Change a model's settings; those that are not given stay, and 0 lifts an objective or the keep-alive.

        ``{"min_instances"?, "max_instances"?, "slo_ttft_s"?, "slo_tbt_s"?, "keep_alive_s"?, "served_as"?, "weight"?,
        "advise"?, "prefix_cache"?, "tool_parser"?, "reasoning_parser"?, "no_room_timeout_s"?, "warm"?}``
        """
        body = await _body(request, self._gateway, SetModelBody)
        settings = msgspec.structs.asdict(body)
        message = SetModel(name=name, serving=settings.pop("served_as"), **settings)
        with _asking("pool", WITHOUT_POOL):
            record = await self._bus.request(subjects.pool("set_model"), message, ModelRecord, timeout_s=RPC_TIMEOUT_S)
        await self._gateway.refresh()
        return _json(record)

    async def remove_model(self, name: str) -> Response:
        """Unregister a model; its instances drain."""
        with _asking("pool", WITHOUT_POOL):
            await self._bus.request(subjects.pool("remove_model"), RemoveModel(name=name), Ack, timeout_s=RPC_TIMEOUT_S)
        await self._gateway.refresh()
        return _json(ModelRemoved(name=name))

    async def scale(self, name: str, request: Request) -> Response:
        """Ask for ``{"instances": N, "hold_s": 300, "live": "auto", "role": "colocated"}`` instances now."""
        self._gateway.find_model(name)
        body = await _body(request, self._gateway, ScaleBody)
        message = StartScale(
            model=name,
            instances=required(body.instances, "instances"),
            hold_s=DEFAULT_HOLD_S if body.hold_s is None else body.hold_s,
            live=body.live or "auto",
            role=body.role or "colocated",
        )
        return _json(await self._planner("scale", message, ScaleRecord))

    async def explain(self, name: str, at: str = "", limit: str = "10") -> Response:
        """What a model needs now and cannot get, and the newest decisions; with ``at`` (Unix seconds) those that were
        made by then."""
        return _json(await why(self._gateway, name, _at_s(at), _limit(limit, MAX_DECISIONS)))

    async def list_scale_records(self, limit: str = "20") -> Response:
        """The newest scale operations."""
        return _json(await self._planner("records", ListScaleRecords(limit=_limit(limit, MAX_RECORDS)), ScaleRecords))

    async def get_scale_record(self, plan_id: str, wait_s: str = "0") -> Response:
        """One scale operation; with ``wait_s`` when it has ended, or after that long."""
        wait = _wait_s(wait_s)
        message = GetScaleRecord(plan_id=plan_id, wait_s=wait)
        return _json(await self._planner("record", message, ScaleRecord, wait + RPC_TIMEOUT_S))


def _limit(text: str, most: int) -> int:
    if not text.isdecimal() or len(text) > asgi.MAX_DIGITS or not 1 <= int(text) <= most:
        raise BadRequest(f"limit must be an integer from 1 to {most}, not {shown(text)}", param="limit")
    return int(text)


def _at_s(text: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_UNIX_S:
        raise BadRequest(f"at must be a Unix time in seconds, not {shown(text)}", param="at")
    return value


def _wait_s(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_WAIT_S:
        raise BadRequest(f"wait_s must be a number from 0 to {MAX_WAIT_S:g}, not {text!r}", param="wait_s")
    return value
