"""An instance of a simulated worker: takes requests, and answers with tokens that nobody computed."""

from __future__ import annotations

import asyncio
import time

from shared import subjects
from shared.aio import OwnedTasks
from shared.bus.nats import NatsBus
from shared.errors import Conflict, NotFound
from shared.messages.common import InstanceState
from shared.messages.generation import Resend, StreamPart, Submit, TokenBatch
from shared.messages.load import LoadReport
from shared.messages.plans import ChainMember, ScalePlan
from shared.messages.registry import InstanceInfo
from shared.subjects import Process

FIRST_TOKEN_S = 0.005
OTHER_TOKENS_S = 0.01
MAX_RUNNING = 64
MAX_QUEUED_TOKENS = 16384
CONTEXT_TOKENS = 2048
_BLOCKS = 1024
_BLOCK_TOKENS = 16
_TOKEN_ID = 70
"""A letter, of the demo model's tokenizer."""

Key = tuple[str, int]


class SimInstance:
    """Streams stay until the gateway has acknowledged their end."""

    def __init__(self, bus: NatsBus, plan: ScalePlan, target: ChainMember) -> None:
        self._bus = bus
        self.record = plan.model
        self.role = plan.role
        self._plan = plan
        self.instance_id = target.instance_id
        self._epoch = target.epoch
        self.state: InstanceState = "loading"
        self.layers_ready = 0
        self._streams: dict[Key, Submit] = {}
        self._running: set[Key] = set()
        self._tasks = OwnedTasks()
        self._prompt_tokens = self._output_tokens = 0
        self._busy_s = 0.0
        self.first_submit_s: dict[str, float] = {}
        """By gateway."""

    def info(self) -> InstanceInfo:
        """What the registry should know."""
        return InstanceInfo(
            instance_id=self.instance_id,
            model=self.record.name,
            model_hash=self.record.model_hash,
            layout_hash=self.record.layout_hash,
            state=self.state,
            role=self.role,
            epoch=self._epoch,
            layers_ready=self.layers_ready,
            weights_digest="0" * 32 if self.state != "loading" else "",
            max_running_requests=MAX_RUNNING,
            max_queued_tokens=MAX_QUEUED_TOKENS,
            context_tokens=CONTEXT_TOKENS,
            plan_id=self._plan.plan_id,
        )

    def report(self, worker: Process) -> LoadReport | None:
        """Its load now; None while it loads."""
        if self.state == "loading":
            return None
        return LoadReport(
            worker_id=worker.id,
            incarnation=worker.incarnation,
            instance_id=self.instance_id,
            model=self.record.name,
            state=self.state,
            role=self.role,
            queued_requests=0,
            queued_tokens=0,
            running_requests=len(self._running),
            running_tokens=_BLOCK_TOKENS * len(self._running),
            prefill_tokens_total=self._prompt_tokens,
            decode_tokens_total=self._output_tokens,
            busy_s_total=self._busy_s,
            kv_blocks_total=_BLOCKS,
            kv_blocks_used=2 * len(self._running),
            prefill_tokens_per_s=20000.0,
            decode_tokens_per_s=2000.0,
            decode_base_s=0.002,
            decode_request_s=0.0001,
            kv_block_tokens=_BLOCK_TOKENS,
        )

    def revived(self) -> bool:
        """Whether it drains no more."""
        return self.state != "draining"

    async def idle(self) -> None:
        """Wait until nothing runs."""
        while self._running:
            await asyncio.sleep(OTHER_TOKENS_S)

    def take(self, request: Submit, worker: Process) -> None:
        """Begin to answer. Raises ``Conflict`` unless this very instance takes requests now."""
        if request.instance_id != self.instance_id or self.state != "serving":
            raise Conflict(f"instance {request.instance_id} takes no requests here")
        self.first_submit_s.setdefault(request.gateway_id, time.time())
        key = (request.request_id, request.attempt)
        if key in self._streams:
            return
        self._streams[key] = request
        self._running.add(key)
        self._tasks.start(self._answer(key, request, worker))

    async def _answer(self, key: Key, request: Submit, worker: Process) -> None:
        begun_s = time.monotonic()
        try:
            self._prompt_tokens += len(request.prompt_token_ids)
            done, wanted = len(request.output_token_ids), request.sampling.max_tokens
            await asyncio.sleep(FIRST_TOKEN_S)
            first = min(1, wanted)
            await self._send(request, worker, done, first, last=wanted <= 1)
            if wanted > 1:
                await asyncio.sleep(OTHER_TOKENS_S)
                await self._send(request, worker, done + first, wanted - first, last=True)
            self._output_tokens += wanted
        finally:
            self._busy_s += time.monotonic() - begun_s
            self._running.discard(key)

    async def send_again(self, resend: Resend, worker: Process) -> None:
        """Everything from an offset, once it was sent. Raises ``NotFound``."""
        key = (resend.request_id, resend.attempt)
        request = self._streams.get(key)
        if request is None:
            raise NotFound(f"request {resend.request_id} is not here")
        if key not in self._running:
            end = len(request.output_token_ids) + request.sampling.max_tokens
            await self._send(request, worker, resend.offset, max(0, end - resend.offset), last=True)

    async def _send(self, request: Submit, worker: Process, offset: int, count: int, *, last: bool) -> None:
        if (request.request_id, request.attempt) not in self._streams:
            return  # cancelled
        part = StreamPart(
            request_id=request.request_id,
            attempt=request.attempt,
            offset=offset,
            token_ids=(_TOKEN_ID,) * count,
            finish_reason="length" if last else None,
            queued_s=0.0 if offset == len(request.output_token_ids) else None,
        )
        batch = TokenBatch(
            worker_id=worker.id, incarnation=worker.incarnation, instance_id=self.instance_id, parts=(part,)
        )
        await self._bus.publish(subjects.tokens(request.gateway), batch)

    def forget(self, request_id: str, attempt: int) -> None:
        """The gateway has its end, or wants no more of it."""
        self._streams.pop((request_id, attempt), None)
