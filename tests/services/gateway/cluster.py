"""A pool and workers made of nothing: they answer on a memory bus what the tests tell them to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from services.worker.engine.forward_batch import PromptRows
from services.worker.engine.mock.tokens import prompt_logprobs
from shared import subjects
from shared.bus.base import Subscription
from shared.errors import BlitzError, ModelNotFound, NoResponder, NotFound, Overloaded
from shared.messages.common import Ack, ErrorInfo, InstanceState, Role
from shared.messages.generation import (
    AckTerminal,
    Cancel,
    FinishReason,
    Resend,
    StreamPart,
    StreamRef,
    Submit,
    TokenBatch,
    TokenLogprobs,
)
from shared.messages.registry import (
    AddModel,
    CordonWorker,
    GetSnapshot,
    GoneRoute,
    InstanceInfo,
    ModelRecord,
    ModelRoute,
    RemoveModel,
    Route,
    RouteChanges,
    SetModel,
    Snapshot,
    WorkerInfo,
    WorkerRecord,
)
from shared.subjects import Process
from tests.processes import INCARNATION, process
from tests.services.gateway.checkpoint import CONTEXT_TOKENS
from tests.shared.bus.memory import MemoryBroker, MemoryBus
from tests.wait_until import WAIT_S

Script = Callable[[Submit], list[int]]
"""The whole output of a request, as token ids; its terminal part follows."""


def say(text: str) -> Script:
    """Answer every request with a text, byte by byte."""
    return lambda submit: list(text.encode())


@dataclass
class FakeWorker:
    """Serves one instance: streams a script, one token per step, from the offset that the request has."""

    broker: MemoryBroker
    name: str
    script: Script = field(default_factory=lambda: say("hello"))
    step_s: float = 0.0
    max_running: int = 64
    max_queued_tokens: int = 100_000
    context_tokens: int = CONTEXT_TOKENS
    arena_bytes: int = 1
    kv_bytes: int = 1
    state: InstanceState = "serving"
    role: Role = "colocated"
    refuse_with: BlitzError | None = None
    pause_after: int | None = None
    """Send this many tokens of each request, then wait until ``resume`` is set."""
    end_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    prompt_page: int = 3
    """Tokens of a prompt whose log-probabilities it says at a time, where they are asked for."""
    prompt_pages: int | None = None
    """After so many of those it waits until ``resume`` is set."""
    loses: set[int] = field(default_factory=set)
    """Positions from which pages are lost once."""

    def __post_init__(self) -> None:
        self.bus: MemoryBus = self.broker.bus(self.name)
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.resends: list[Resend] = []
        self.acks: list[StreamRef] = []
        self.resume = asyncio.Event()
        self.hangs = False
        self._stopped = asyncio.Event()
        self.tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.sent: dict[tuple[str, int], list[StreamPart]] = {}
        self._gateway: dict[str, Process] = {}
        self._owners: dict[tuple[str, int], str] = {}
        """Workers that took requests over from this one: they are told what a gateway says about them."""
        self.subscriptions: list[Subscription] = []

    @property
    def instance_id(self) -> str:
        return f"{self.name}-i"

    @property
    def num_running(self) -> int:
        return sum(not task.done() for task in self.tasks.values())

    async def start(self) -> None:
        bus = self.bus
        self.subscriptions = [
            await bus.respond(subjects.worker_submit(process(self.name)), Submit, self.on_submit),
            await bus.respond(subjects.worker_resend(process(self.name)), Resend, self.on_resend),
            await bus.subscribe(subjects.worker_cancel(process(self.name)), Cancel, self._on_cancel),
            await bus.subscribe(subjects.worker_ack(process(self.name)), AckTerminal, self._on_ack),
        ]

    async def stop(self) -> None:
        """Die: nothing more is sent or answered."""
        self._stopped.set()
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        for subscription in self.subscriptions:
            await subscription.close()
        self.subscriptions = []

    def hang(self) -> None:
        """Answer no question any more, as a process that is stopped."""
        self.hangs = True

    def forget(self) -> None:
        """Drop what ended, and what was noted of it."""
        for noted in (self.submits, self.cancels, self.resends, self.acks):
            noted.clear()
        for key in [key for key, task in self.tasks.items() if task.done()]:
            del self.tasks[key]
            self.sent.pop(key, None)
            self._gateway.pop(key[0], None)

    async def take_over(self, submit: Submit, source: FakeWorker, *, silently: bool = False) -> None:
        """Own a request of ``source`` under the same attempt, say so unless ``silently``, and go on with it."""
        submit = self._taken(submit, source, repeated=0)
        if not silently:
            await self.send(submit.gateway, self.part(submit, len(submit.output_token_ids), []))
        self.begin(submit)

    def decode(self, submit: Submit, prefill: FakeWorker) -> None:
        """Own a request of a prefill worker under the same attempt: send its last token again, and go on behind it."""
        self.begin(self._taken(submit, prefill, repeated=1))

    def _taken(self, submit: Submit, source: FakeWorker, *, repeated: int) -> Submit:
        key = (submit.request_id, submit.attempt)
        sent = [token for part in source.sent.get(key, ()) for token in part.token_ids]
        source.tasks.pop(key).cancel()
        source._owners[key] = self.name
        output = (*submit.output_token_ids, *sent)
        return msgspec.structs.replace(submit, output_token_ids=output[: len(output) - repeated])

    def begin(self, submit: Submit) -> None:
        self._gateway[submit.request_id] = submit.gateway
        self.tasks[submit.request_id, submit.attempt] = asyncio.create_task(self._generate(submit))

    async def send(self, gateway: Process, *parts: StreamPart) -> None:
        batch = TokenBatch(worker_id=self.name, incarnation=INCARNATION, instance_id=self.instance_id, parts=parts)
        await self.bus.publish(subjects.tokens(gateway), batch)

    async def on_submit(self, submit: Submit) -> Ack:
        self.submits.append(submit)
        if self.refuse_with is not None:
            raise self.refuse_with
        if not submit.may_wait and self.num_running >= self.max_running:
            raise Overloaded("all slots are taken")
        self.begin(submit)
        return Ack()

    async def on_resend(self, resend: Resend) -> Ack:
        self.resends.append(resend)
        if self.hangs:
            await self._stopped.wait()
        key = (resend.request_id, resend.attempt)
        if key in self._owners:
            try:
                return await self.bus.request(
                    subjects.worker_resend(process(self._owners[key])), resend, Ack, timeout_s=WAIT_S
                )
            except NoResponder as error:
                raise NotFound("its new owner does not answer") from error
        if key not in self.tasks:
            raise NotFound("no such stream")
        sent = self.sent.get(key, [])
        again = [part for part in sent if part.prompt is None and part.offset >= resend.offset]
        if resend.prompt_offset is not None:
            again = [part for part in sent if part.prompt and part.prompt.end > resend.prompt_offset] + again
        nothing_new = StreamPart(request_id=resend.request_id, attempt=resend.attempt, offset=resend.offset)
        await self.send(self._gateway[resend.request_id], *(again or [nothing_new]))
        return Ack()

    def _on_cancel(self, cancel: Cancel) -> None:
        self.cancels.append(cancel)
        key = (cancel.request_id, cancel.attempt)
        task = self.tasks.get(key)
        if key in self._owners:
            told = self.bus.publish(subjects.worker_cancel(process(self._owners[key])), cancel)
            self.tasks[key] = asyncio.ensure_future(told)
        elif task is not None:
            task.cancel()

    def _on_ack(self, ack: AckTerminal) -> None:
        self.acks.extend(ack.streams)

    def part(self, submit: Submit, offset: int, token_ids: list[int], reason: FinishReason | None = None) -> StreamPart:
        return StreamPart(
            request_id=submit.request_id,
            attempt=submit.attempt,
            offset=offset,
            token_ids=tuple(token_ids),
            logprobs=(self.logprobs,) * len(token_ids) if self.logprobs is not None else None,
            finish_reason=reason,
            error=ErrorInfo(code="unavailable", message="broken") if reason == "error" else None,
        )

    async def _generate(self, submit: Submit) -> None:
        key = (submit.request_id, submit.attempt)
        ids = self.script(submit)[: submit.sampling.max_tokens]
        start = len(submit.output_token_ids)
        parts = self.sent[key] = []
        await self._say_prompt(submit, parts)
        for offset in range(start, len(ids)):
            if self.pause_after is not None and offset - start >= self.pause_after:
                await self.resume.wait()
            last = offset == len(ids) - 1
            default: FinishReason = "length" if len(ids) == submit.sampling.max_tokens else "stop"
            reason = (self.end_reason or default) if last else None
            parts.append(self.part(submit, offset, [ids[offset]], reason))
            await self.send(submit.gateway, parts[-1])
            await asyncio.sleep(self.step_s)

    async def _say_prompt(self, submit: Submit, parts: list[StreamPart]) -> None:
        num_top, prompt = submit.sampling.prompt_logprobs, submit.prompt_token_ids
        for page, start in enumerate(range(1, len(prompt) if num_top is not None else 1, self.prompt_page)):
            assert num_top is not None
            if page == self.prompt_pages:
                await self.resume.wait()
            rows = PromptRows(0, prompt[start : start + self.prompt_page], num_top)
            part = self.part(submit, len(submit.output_token_ids), [])
            parts.append(msgspec.structs.replace(part, prompt=prompt_logprobs(start, rows, vocab_size=258)))
            if start in self.loses:
                self.loses.remove(start)
            else:
                await self.send(submit.gateway, parts[-1])

    def route(self) -> Route:
        return Route(
            instance_id=self.instance_id,
            worker_id=self.name,
            incarnation=INCARNATION,
            state=self.state,
            role=self.role,
            max_running_requests=self.max_running,
            max_queued_tokens=self.max_queued_tokens,
            context_tokens=self.context_tokens,
        )

    def record(self, model: ModelRecord) -> WorkerRecord:
        worker = WorkerInfo(
            worker_id=self.name,
            incarnation=INCARNATION,
            host="h",
            device="cpu",
            engine="mock",
            transport_address=b"",
            arena_bytes=self.arena_bytes,
            kv_bytes=self.kv_bytes,
        )
        instance = InstanceInfo(
            instance_id=self.instance_id,
            model=model.name,
            model_hash=model.model_hash,
            layout_hash=model.layout_hash,
            state=self.state,
            role=self.role,
            epoch=1,
            weights_digest="d",
            layers_ready=1,
            max_running_requests=self.max_running,
            max_queued_tokens=self.max_queued_tokens,
            context_tokens=self.context_tokens,
        )
        return WorkerRecord(worker=worker, state=self.state, instance=instance)


class FakePool:
    """Answers snapshots (two workers per page) and publishes changes of routes."""

    def __init__(self, broker: MemoryBroker, models: list[ModelRecord], workers: list[FakeWorker]) -> None:
        self.bus = broker.bus("pool")
        self.models = models
        self.workers = workers
        self.sequence = 0
        self._shown: frozenset[GoneRoute] = frozenset()
        self.added: list[AddModel] = []
        self.changed: list[SetModel] = []
        self.cordons: list[CordonWorker] = []

    async def start(self) -> None:
        await self.bus.respond(subjects.pool("snapshot"), GetSnapshot, self._on_snapshot)
        await self.bus.respond(subjects.pool("add_model"), AddModel, self._on_add)
        await self.bus.respond(subjects.pool("set_model"), SetModel, self._on_set)
        await self.bus.respond(subjects.pool("remove_model"), RemoveModel, self._on_remove)
        await self.bus.respond(subjects.pool("cordon_worker"), CordonWorker, self._on_cordon)

    async def _on_snapshot(self, request: GetSnapshot) -> Snapshot:
        rows = [w.record(self.models[0]) for w in sorted(self.workers, key=lambda w: w.name)] if self.models else []
        rows = [row for row in rows if row.worker.worker_id > request.cursor]
        return Snapshot(
            publisher="pool",
            version=f"pool/{self.sequence}",
            routes_sequence=self.sequence,
            models=tuple(self.models),
            workers=tuple(rows[:2]),
            next_cursor=rows[1].worker.worker_id if len(rows) > 2 else "",
        )

    async def _on_add(self, request: AddModel) -> ModelRecord:
        self.added.append(request)
        return self.models[0]

    async def _on_set(self, request: SetModel) -> ModelRecord:
        self.changed.append(request)
        if request.name not in [m.name for m in self.models]:
            raise ModelNotFound(f"model {request.name!r} is not registered", param="name")
        changes = {name: value for name, value in msgspec.structs.asdict(request).items() if value is not None}
        if request.no_room_timeout_s == "default":
            changes["no_room_timeout_s"] = None
        self.models[0] = msgspec.structs.replace(self.models[0], **changes)
        return self.models[0]

    async def _on_cordon(self, request: CordonWorker) -> Ack:
        self.cordons.append(request)
        if request.worker_id not in [w.name for w in self.workers]:
            raise NotFound(f"no worker {request.worker_id!r} is registered", param="worker_id")
        return Ack()

    async def _on_remove(self, request: RemoveModel) -> Ack:
        if request.name not in [m.name for m in self.models]:
            raise NotFound(f"model {request.name!r} is not registered")
        self.models = [m for m in self.models if m.name != request.name]
        return Ack()

    async def publish(self) -> None:
        """Tell gateways what there is now."""
        self.sequence += 1
        found = [(model.name, worker.route()) for model in self.models for worker in self.workers]
        before, self._shown = self._shown, frozenset(GoneRoute(model=m, instance_id=r.instance_id) for m, r in found)
        await self.bus.publish(
            subjects.route_changes(),
            RouteChanges(
                publisher="pool",
                sequence=self.sequence,
                models=tuple(self.models),
                gone=tuple(sorted(before - self._shown, key=lambda gone: gone.instance_id)),
                routes=tuple(ModelRoute(model=m, route=route) for m, route in found),
            ),
        )
