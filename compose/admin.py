"""A client of the gateway's administration routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from shared.errors import BadRequest, BlitzError, Internal, Unauthorized, Unavailable, error_from_code
from shared.messages.admin import (
    AddModelBody,
    ModelList,
    ModelStatus,
    PoolStatus,
    ScaleBody,
    SetModelBody,
    Status,
    TrafficStatus,
    WhyStatus,
    WorkerList,
    WorkerStatus,
)
from shared.messages.common import LiveChoice, ReasoningParserName, Role, Serving, ToolParserName
from shared.messages.operations import ScaleRecord, ScaleRecords
from shared.messages.registry import GpuTimeReport

T = TypeVar("T")
_TIMEOUT_S = 20.0
"""More than the gateway's own: it waits for a planner that leads."""
ADD_TIMEOUT_S = 660.0
"""Adding a model hashes its weights. Longer than the gateway waits for it, whose error says more."""

STALE_S = 12.0
"""Without a sign of life from the feed, which has one every five seconds."""


class GatewayUnreachable(Unavailable):
    """Nothing answers at the URL."""

    code = "gateway_unreachable"


def _checked(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise BadRequest(f"{url!r} is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or not 0 < (parsed.port or 80) < 65536:
        raise BadRequest(f"{url!r} is not the URL of a gateway, such as http://127.0.0.1:8000")
    return url


class AdminClient:
    """Talks to ``/admin``. Every failure is a ``BlitzError`` with the server's code and message."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """Raises ``BadRequest`` if ``url`` is none."""
        # Clients of OpenAI's API are given the URL with its version.
        self.url = _checked(url).rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # The environment's proxies are for the internet; this is this machine or its cluster.
        # Without TLS there is no need to read the system's certificates, which takes longer than most commands.
        verify = self.url.startswith("https:")
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=_TIMEOUT_S, trust_env=False, verify=verify
        )

    async def __aenter__(self) -> AdminClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def status(self) -> Status:
        """Models, instances, workers and floors."""
        return await self._call("GET", "/admin/status", Status)

    async def pool(self) -> PoolStatus:
        """Which memory holds which model."""
        return await self._call("GET", "/admin/pool", PoolStatus)

    async def traffic(self) -> TrafficStatus:
        """What each worker has carried."""
        return await self._call("GET", "/admin/traffic", TrafficStatus)

    async def workers(self) -> tuple[WorkerStatus, ...]:
        """The live workers."""
        return (await self._call("GET", "/admin/workers", WorkerList)).workers

    async def drain_worker(self, worker_id: str) -> WorkerStatus:
        """Free a worker of everything; its process stays. Raises ``NotFound``."""
        return await self._call("POST", f"/admin/workers/{quote(worker_id, safe='')}/drain", WorkerStatus)

    async def undrain_worker(self, worker_id: str) -> WorkerStatus:
        """Use a worker again. Raises ``NotFound``."""
        return await self._call("POST", f"/admin/workers/{quote(worker_id, safe='')}/undrain", WorkerStatus)

    async def models(self) -> tuple[ModelStatus, ...]:
        """The registered models."""
        return (await self._call("GET", "/admin/models", ModelList)).models

    async def add_model(
        self,
        path: str,
        *,
        name: str = "",
        min_instances: int | None = None,
        max_instances: int | None = None,
        slo_ttft_s: float | None = None,
        slo_tbt_s: float | None = None,
        keep_alive_s: float | None = None,
        served_as: Serving | None = None,
        weight: float | None = None,
        advise: bool | None = None,
        prefix_cache: bool | None = None,
        tool_parser: ToolParserName | None = None,
        reasoning_parser: ReasoningParserName | None = None,
        no_room_timeout_s: float | None = None,
        engine: str | None = None,
        engine_args: dict[str, Any] | None = None,
        warm: bool | None = None,
    ) -> ModelStatus:
        """Register a checkpoint directory, as the services see it. Raises ``BadCheckpoint``, ``Conflict``.

        ``min_instances``: None for one, or for none with a keep-alive. ``slo_ttft_s``, ``slo_tbt_s``: objectives for
        the time to the first token and between two; None: the services' own. ``no_room_timeout_s``: None for the
        gateway's. ``engine``: None for the system's own.
        """
        body = AddModelBody(
            path=path,
            name=name or None,
            min_instances=min_instances,
            max_instances=max_instances,
            slo_ttft_s=slo_ttft_s,
            slo_tbt_s=slo_tbt_s,
            keep_alive_s=keep_alive_s,
            served_as=served_as,
            weight=weight,
            advise=advise,
            prefix_cache=prefix_cache,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            no_room_timeout_s=no_room_timeout_s,
            engine=engine,
            engine_args=engine_args,
            warm=warm,
        )
        return await self._call("POST", "/admin/models", ModelStatus, body=body, timeout_s=ADD_TIMEOUT_S)

    async def set_model(self, name: str, changes: SetModelBody) -> ModelStatus:
        """Change a model's settings; those that are None stay. Raises ``ModelNotFound``, ``BadRequest``."""
        return await self._call("PATCH", f"/admin/models/{quote(name, safe='')}", ModelStatus, body=changes)

    async def remove_model(self, name: str) -> None:
        """Unregister a model. Raises ``ModelNotFound``."""
        await self._call("DELETE", f"/admin/models/{quote(name, safe='')}", msgspec.Raw)

    async def scale(
        self, model: str, instances: int, *, hold_s: float, live: LiveChoice = "auto", role: Role = "colocated"
    ) -> ScaleRecord:
        """Ask for so many instances in a role now; the record of the operation as it starts. Raises
        ``ModelNotFound``."""
        body = ScaleBody(instances=instances, hold_s=hold_s, live=live, role=role)
        path = f"/admin/models/{quote(model, safe='')}/scale"
        return await self._call("POST", path, ScaleRecord, body=body)

    async def why(self, model: str, *, until_s: float | None = None, limit: int = 10) -> WhyStatus:
        """What a model needs now, and the newest decisions on it; those made by then (Unix time). Raises
        ``ModelNotFound``."""
        at = f"&at={until_s!r}" if until_s is not None else ""
        return await self._call("GET", f"/admin/why/{quote(model, safe='')}?limit={limit}{at}", WhyStatus)

    async def gpu_time(self, model: str = "") -> GpuTimeReport:
        """What the workers' GPUs were for since the pool leads; of one model, if it is named. Raises
        ``ModelNotFound``."""
        asked = f"?model={quote(model, safe='')}" if model else ""
        return await self._call("GET", f"/admin/gpu_time{asked}", GpuTimeReport)

    async def scale_record(self, plan_id: str, *, wait_s: float = 0.0) -> ScaleRecord:
        """An operation's record; waits up to ``wait_s`` for it to end. Raises ``PlanNotFound``."""
        path = f"/admin/scale/{quote(plan_id, safe='')}?wait_s={wait_s:g}"
        return await self._call("GET", path, ScaleRecord, timeout_s=wait_s + _TIMEOUT_S)

    async def scale_records(self, *, limit: int) -> tuple[ScaleRecord, ...]:
        """The newest operations, the newest first: a hundred at most, without their batches."""
        return (await self._call("GET", f"/admin/scale?limit={limit}", ScaleRecords)).records

    @asynccontextmanager
    async def events(self, last_id: str = "") -> AsyncIterator[AsyncIterator[bytes]]:
        """The feed, from the event after ``last_id`` on, as bytes come. Raises ``GatewayUnreachable``, also while it is
        read and nothing comes for ``STALE_S``."""
        path = "/admin/events"
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last_id} if last_id else {})}
        with self._errors_of(path, STALE_S):
            async with self._http.stream("GET", path, headers=headers, timeout=STALE_S) as response:
                if not response.is_success:
                    await response.aread()
                    raise self._error(response, path)
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    raise Internal(f"{self.url} is not a BlitzScale gateway, or one without a feed")
                yield response.aiter_bytes()

    async def _call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: msgspec.Struct | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> T:
        json = msgspec.to_builtins(body) if body is not None else None
        with self._errors_of(path, timeout_s):
            response = await self._http.request(method, path, json=json, timeout=timeout_s)
        if not response.is_success:
            raise self._error(response, path)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.ValidationError as error:
            raise Internal(f"{self.url} answered with something other than a {kind.__name__}: {error}") from error
        except msgspec.DecodeError as error:
            raise Internal(f"{self.url} is not a BlitzScale gateway: its answer is not JSON") from error

    @contextmanager
    def _errors_of(self, path: str, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise GatewayUnreachable(
                f"no gateway answers at {self.url}; start one with `blitzscale up`, or say where it is with --url"
            ) from error
        except httpx.TimeoutException as error:
            raise GatewayUnreachable(f"{self.url}{path} did not answer within {timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise GatewayUnreachable(f"{self.url}{path} broke off: {str(error) or type(error).__name__}") from error

    def _error(self, response: httpx.Response, path: str) -> BlitzError:
        try:
            body: Any = msgspec.json.decode(response.content)
        except msgspec.DecodeError:
            body = None
        detail = body.get("error", {}) if isinstance(body, dict) else {}
        message = detail.get("message") if isinstance(detail, dict) else None
        code = detail.get("code") if isinstance(detail, dict) else None
        if response.status_code in (401, 403):
            return Unauthorized(f"{message or 'unauthorized'} (set BLITZ_ADMIN_KEY to an administrator's API key)")
        if isinstance(message, str) and isinstance(code, str):
            return error_from_code(code, message)
        return Internal(f"{self.url}{path} answered {response.status_code}: {message or response.reason_phrase}")
