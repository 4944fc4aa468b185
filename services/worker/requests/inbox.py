"""Requests in, tokens out: the worker's side of the conversation with the gateways."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from services.worker.core.scheduling.gateways import Gateways, Gone
from services.worker.core.scheduling.request_checks import check_slot
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.loop import StepOutput
from services.worker.instance.instance import Instance
from services.worker.requests.streams import NewOwners, RequestSpans, Streams
from shared import subjects
from shared.aio import OwnedTasks
from shared.bus.base import Bus
from shared.errors import BlitzError, Conflict, NoResponder, NotFound, SentBack
from shared.messages.common import TAKES_PROMPTS, Ack
from shared.messages.generation import (
    GOODBYE_S,
    AckTerminal,
    Cancel,
    GatewayHeartbeat,
    Resend,
    StreamPart,
    Submit,
    TokenBatch,
)
from shared.subjects import Process

log = logging.getLogger(__name__)


RESEND_TOKENS = 50_000
"""Tokens in one message that sends a stream again: well under 1 MB."""
STOOD_STILL_S = 1.0
"""A look for silent gateways that comes so late means that this process heard nothing in the meantime."""
OWNER_TIMEOUT_S = 0.5
"""Well within a gateway's patience with a question."""
REPEATED_TOKENS = 64
"""Of those that another worker has streamed, a new owner can say again so many."""
RESEND_LOGPROBS = 500
"""The same with 20 alternatives each."""
PROMPT_PAGE_BYTES = 32 * 1024
"""Log-probabilities of a prompt in one message: a gateway that makes JSON of them does nothing else meanwhile."""


class Cooperation(Protocol):
    """What a part that shares requests with other instances is told of them."""

    def arrived(self) -> None:
        """A request was accepted. Not every part has to do anything."""
        return

    def cancel(self, request_id: str, attempt: int) -> None:
        """No client waits for a request any more."""

    def cancel_gateway(self, gone: Gone) -> None:
        """Nor for any of those gateways'."""


class Inbox:
    """Event loop only, except ``on_output``, which the engine thread calls."""

    def __init__(
        self, bus: Bus, worker: Process, instance: Callable[[], Instance | None], *, looks_every_s: float
    ) -> None:
        """``looks_every_s``: how often ``expire`` is called."""
        self._bus = bus
        self._worker = worker
        self._instance = instance
        self._loop = asyncio.get_running_loop()
        self.streams = Streams()
        """What gateways may still ask for; changed here alone, like the next."""
        self.spans = RequestSpans(worker.id)
        self._gateways = Gateways()
        self._looks_every_s = looks_every_s
        self._looked_s, self._hears_since_s = time.monotonic(), -math.inf
        self._steps: deque[StepOutput] = deque()
        self._stepped = asyncio.Event()
        self._publishing = False
        self.new_owners = NewOwners()
        self._tasks = OwnedTasks()
        self.admitting = True
        self._cooperations: tuple[Cooperation, ...] = ()

    def cooperate(self, *with_others: Cooperation) -> None:
        """These share requests with other instances, and are told of those that come and go."""
        self._cooperations = with_others

    # --- from the engine ---------------------------------------------------------------------

    def on_output(self, output: StepOutput) -> None:
        """A step's tokens. Called on the engine thread; order is kept."""
        if not output.outputs and not output.prompts:
            return
        self._steps.append(output)
        self._loop.call_soon_threadsafe(self._stepped.set)

    async def publish_forever(self) -> None:
        """Send every step's tokens, one message per gateway, until cancelled."""
        while True:
            await self._stepped.wait()
            self._stepped.clear()
            self._publishing = True
            while self._steps:
                await self._publish(self._steps.popleft())
                # A fast engine must not keep the bus from being flushed, nor requests from being heard.
                await asyncio.sleep(0)
            self._publishing = False

    async def flushed(self) -> None:
        """Wait until everything that the engine produced was sent."""
        while self._steps or self._publishing:
            await asyncio.sleep(0.005)

    async def _publish(self, step: StepOutput) -> None:
        instance = self._instance()
        instance_id = instance.instance_id if instance else ""
        if step.prompts:
            for gateway, part in self.streams.take_prompts(step.prompts):
                await self._send_prompt(gateway, instance_id, part)
        for gateway, parts in self.streams.take(step.outputs, time.monotonic()).items():
            await self._send(gateway, instance_id, parts)
        for output in step.outputs:
            if output.finish_reason is not None:
                self.spans.ended(output)

    async def _send_prompt(self, gateway: Process, instance_id: str, part: StreamPart) -> None:
        for page in prompt_pages(part):
            await self._send(gateway, instance_id, [page])

    async def _send(self, gateway: Process, instance_id: str, parts: list[StreamPart]) -> None:
        batch = TokenBatch(
            worker_id=self._worker.id,
            incarnation=self._worker.incarnation,
            instance_id=instance_id,
            parts=tuple(parts),
        )
        try:
            await self._bus.publish(subjects.tokens(gateway), batch)
        except BlitzError as error:
            # Kept in the streams: the gateway sees the gap and asks again.
            log.warning("tokens for gateway %s not sent: %s", gateway, error)

    # --- from the gateways -------------------------------------------------------------------

    async def on_submit(self, request: Submit) -> Ack:
        """Take a request. Raises ``Conflict`` (not this instance, not serving), ``SentBack`` (it is about to go),
        ``Overloaded``, ``ContextLengthExceeded``, ``BadRequest`` (a token that the model lacks); then nothing was
        taken."""
        instance = self._instance()
        if instance is not None and instance.instance_id == request.instance_id and instance.state == "draining":
            raise SentBack(f"instance {instance.instance_id} drains")  # the gateway had not heard of it yet
        if instance is None or not self.admitting:
            raise Conflict(f"worker {self._worker} has no instance that takes requests")
        instance.check_admits(request.instance_id)
        sequence = instance.sequence_of(request)
        offset, key = len(request.output_token_ids), (request.request_id, request.attempt)
        if self.new_owners.owner_of(key) is not None:
            return Ack()  # the submit was repeated: it runs elsewhere by now
        older = self.streams.attempt_of(request.request_id)
        if older is None and not request.may_wait:
            check_slot(instance.instance_id, self.streams.num_open, instance.scheduler.max_num_sequences)
        if not self.streams.open(*key, request.gateway, offset):
            return Ack()  # the submit was repeated: it runs already
        if older is not None:
            self._give_up(instance, request.request_id, older)
        self._gateways.spoke(*request.gateway, time.monotonic())
        self.spans.open(request, "worker.request")
        try:
            await asyncio.wrap_future(instance.engine.submit(sequence))
        except BlitzError as error:
            self.streams.forget(*key)
            self.spans.refused(key, error)
            raise
        instance.began(TAKES_PROMPTS)
        for cooperation in self._cooperations:
            cooperation.arrived()
        return Ack()

    def _give_up(self, instance: Instance, request_id: str, attempt: int) -> None:
        """A newer attempt is here. The cancel of the older one may be lost, and the gateway reads it no more."""
        instance.engine.cancel(request_id, attempt)
        for cooperation in self._cooperations:
            cooperation.cancel(request_id, attempt)

    def on_cancel(self, request: Cancel) -> None:
        """The gateway wants no more of a request."""
        instance = self._instance()
        self.streams.forget(request.request_id, request.attempt)
        if instance is not None:
            instance.engine.cancel(request.request_id, request.attempt)
        for cooperation in self._cooperations:
            cooperation.cancel(request.request_id, request.attempt)
        owner = self.new_owners.owner_of((request.request_id, request.attempt))
        if owner is not None:
            self._tasks.start(self._tell(owner, request))

    def on_ack(self, message: AckTerminal) -> None:
        """The gateway has these streams' ends."""
        for stream in message.streams:
            self.streams.forget(stream.request_id, stream.attempt)

    async def on_resend(self, request: Resend) -> Ack:
        """Send a stream's tokens again. Raises ``NotFound`` when they are not here, nor where they went."""
        owner = self.new_owners.owner_of((request.request_id, request.attempt))
        if owner is not None:
            return await self._ask_owner(owner, request)
        gateway, part = self.streams.resend(request.request_id, request.attempt, request.offset)
        instance = self._instance()
        instance_id = instance.instance_id if instance else ""
        if request.prompt_offset is not None:
            key = request.request_id, request.attempt
            for prompt_part in self.streams.resend_prompt(*key, request.prompt_offset)[1]:
                await self._send_prompt(gateway, instance_id, prompt_part)
        for page in _pages(part):
            await self._send(gateway, instance_id, [page])
        return Ack()

    async def _ask_owner(self, owner: Process, request: Resend) -> Ack:
        try:
            return await self._bus.request(subjects.worker_resend(owner), request, Ack, timeout_s=OWNER_TIMEOUT_S)
        except NoResponder as error:
            # Of the owner, not of this worker, which the caller must not think dead.
            raise NotFound(f"request {request.request_id} went to {owner}, which does not answer") from error

    async def _tell(self, worker: Process, request: Cancel) -> None:
        try:
            await self._bus.publish(subjects.worker_cancel(worker), request)
        except BlitzError as error:
            log.debug("%s was not told of a cancel: %s", worker, error)

    # --- requests that move between instances ------------------------------------------------

    def host(self, requests: Iterable[Submit]) -> None:
        """Another worker's requests, of which this one computes layers; they may become its own."""
        now_s = time.monotonic()
        for request in requests:
            key, output = (request.request_id, request.attempt), request.output_token_ids
            # The last ones may have been lost with the worker that said them.
            start = max(0, len(output) - REPEATED_TOKENS)
            if self.streams.open(*key, request.gateway, start):
                logprobs = request.sampling.logprobs is not None
                self.streams.follow(*key, output[start:], with_logprobs=logprobs)
            self._gateways.spoke(*request.gateway, now_s)

    def follow(self, sequence: ActiveSequence, token_ids: Sequence[int]) -> None:
        """The other worker has streamed these of a hosted request."""
        self.streams.follow(*sequence.key, token_ids, with_logprobs=sequence.params.logprobs is not None)

    def supersede(self, request: Submit, instance: Instance) -> None:
        """Another worker's request is about to be hosted: earlier attempts at it are given up. Raises ``Conflict`` for
        one that is newer."""
        known = self.streams.attempt_of(request.request_id)
        if known is not None and known > request.attempt:
            raise Conflict(
                f"attempt {known} of request {request.request_id} is here already, {request.attempt} is over"
            )
        if known is not None and known < request.attempt:
            self._give_up(instance, request.request_id, known)

    def unhost(self, sequences: Iterable[ActiveSequence]) -> None:
        """They are the other worker's alone."""
        for sequence in sequences:
            self.streams.forget(*sequence.key)

    def announce(self, sequences: Iterable[ActiveSequence]) -> None:
        """Tell the gateways that these requests are this worker's now, before their first tokens do."""
        self.on_output(StepOutput(tuple(sequence.taken_over() for sequence in sequences)))

    def moved(self, sequences: Iterable[ActiveSequence], worker: Process) -> None:
        """These requests are another worker's now: what gateways still say here about them goes there."""
        gone = [s for s in sequences if not s.finished]
        self.new_owners.add([s.key for s in gone], worker, time.monotonic())
        for sequence in gone:
            self.streams.forget(*sequence.key)
            self.spans.moved(sequence.key, worker.id)

    def on_gateway(self, heartbeat: GatewayHeartbeat) -> None:
        """A gateway lives; the processes that it replaced do not."""
        process = heartbeat.gateway_id, heartbeat.incarnation
        self._free(self._gateways.beat(*process, heartbeat.lease_s, time.monotonic()))

    def expire(self) -> None:
        """Free the requests of gateways that are silent for a lease. Their silence counts only while our own connection
        has been up as long, and this process was not kept from running: what they said then waits in its socket."""
        now_s = time.monotonic()
        if now_s - self._looked_s > self._looks_every_s + STOOD_STILL_S:
            self._hears_since_s = now_s
        self._looked_s = now_s
        self.streams.expire(now_s)
        self.new_owners.expire(now_s)
        connected_since_s = self._bus.connected_since_s
        if connected_since_s is None:
            return
        for gone, lease_s in self._gateways.silent(now_s, now_s - max(connected_since_s, self._hears_since_s)):
            if lease_s > GOODBYE_S:
                log.warning("gateway %s was silent for %.1f s: its requests are freed", gone.gateway_id, lease_s)
            else:
                log.info("gateway %s has ended", gone.gateway_id)
            self._free(gone)

    def _free(self, gone: Gone | None) -> None:
        """End the requests of gateways that are gone."""
        if gone is None:
            return
        if gone.others:
            log.info("gateway %s was started again: what it had asked for before is freed", gone.gateway_id)
        self.streams.forget_gateway(gone)
        instance = self._instance()
        if instance is not None:
            instance.engine.cancel_gateway(gone)
        for cooperation in self._cooperations:
            cooperation.cancel_gateway(gone)


def prompt_pages(part: StreamPart) -> Iterator[StreamPart]:
    """Log-probabilities of a prompt in parts of ``PROMPT_PAGE_BYTES`` at most."""
    logprobs = part.prompt
    assert logprobs is not None
    step = max(1, PROMPT_PAGE_BYTES // (8 * (logprobs.num_top + 1)))
    for start in range(logprobs.start, logprobs.end, step):
        page = logprobs.part(start, min(start + step, logprobs.end))
        yield msgspec.structs.replace(part, prompt=page)


def _pages(part: StreamPart) -> Iterator[StreamPart]:
    """A long stream in parts that the bus takes; only the last one is terminal."""
    step = RESEND_TOKENS if part.logprobs is None else RESEND_LOGPROBS
    starts = range(0, max(1, len(part.token_ids)), step)
    for start in starts:
        is_last = start == starts[-1]
        yield msgspec.structs.replace(
            part,
            offset=part.offset + start,
            token_ids=part.token_ids[start : start + step],
            logprobs=None if part.logprobs is None else part.logprobs[start : start + step],
            finish_reason=part.finish_reason if is_last else None,
            error=part.error if is_last else None,
        )
