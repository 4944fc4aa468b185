"""Routes, streams and a router with one model, for tests of placement."""

from __future__ import annotations

from services.gateway.core.router import Router
from services.gateway.core.stream import StreamState
from shared.messages.common import InstanceState, Role
from shared.messages.generation import SamplingParams
from shared.messages.load import LoadReport, ModelQueue, QueueReport
from shared.messages.registry import Route
from tests.processes import INCARNATION


def route(
    name: str,
    *,
    running: int = 2,
    queued_tokens: int = 100,
    state: InstanceState = "serving",
    context: int = 0,
    role: Role = "colocated",
) -> Route:
    return Route(
        instance_id=name,
        worker_id=f"w-{name}",
        incarnation=INCARNATION,
        state=state,
        role=role,
        max_running_requests=running,
        max_queued_tokens=queued_tokens,
        context_tokens=context,
    )


def stream(
    name: str,
    prompt: int = 10,
    max_tokens: int = 1,
    *,
    key: str = "",
    default: bool = False,
    min_tokens: int = 0,
    priority: int = 0,
) -> StreamState:
    return StreamState(
        request_id=name,
        model="m",
        prompt_token_ids=(1,) * prompt,
        sampling=SamplingParams(max_tokens=max_tokens, seed=0, min_tokens=min_tokens),
        arrived_at_s=0.0,
        key=key,
        priority=priority,
        default_max_tokens=default,
    )


class Harness:
    def __init__(self, *routes: Route, max_queued: int = 100) -> None:
        self.router = Router(max_queued_requests=max_queued)
        self.router.set_routes("m", "", routes)

    def add(self, *streams: StreamState) -> None:
        for one in streams:
            self.router.enqueue(one, deadline_s=10.0, retry_after_s=1.0)

    def placed(self, now_s: float = 0.0) -> list[tuple[str, str | None]]:
        """(prefill, decode) instances of what is dispatched now."""
        sent = self.router.dispatch("m", now_s=now_s).assignments
        return [(a.route.instance_id, a.decode.instance_id if a.decode is not None else None) for a in sent]

    def sent(self, now_s: float = 0.0) -> list[tuple[str, str]]:
        return [(a.request_id, a.route.instance_id) for a in self.router.dispatch("m", now_s=now_s).assignments]


def load_report(name: str, *, running: int = 0, queued: int = 0, queued_tokens: int = 0) -> LoadReport:
    """What instance ``name`` says of everybody's requests there."""
    return LoadReport(
        worker_id=f"w-{name}",
        incarnation=INCARNATION,
        instance_id=name,
        model="m",
        state="serving",
        role="colocated",
        queued_requests=queued,
        queued_tokens=queued_tokens,
        running_requests=running,
        running_tokens=10 * running,
        prefill_tokens_total=0,
        decode_tokens_total=0,
        busy_s_total=0.0,
        kv_blocks_total=1,
        kv_blocks_used=0,
        kv_block_tokens=16,
    )


def queue_report(gateway: str, *, queued: int = 0, inflight: int = 0, head_tokens: int = 0) -> QueueReport:
    """What another gateway says of the model."""
    mine = ModelQueue(
        model="m",
        queued_requests=queued,
        queued_tokens=10 * queued,
        arrived_requests_total=0,
        arrived_prompt_tokens_total=0,
        inflight_requests=inflight,
        head_tokens=head_tokens,
    )
    return QueueReport(gateway_id=gateway, models=(mine,))
