"""A gateway made of nothing: submits, collects what workers stream, and acknowledges the ends."""

from __future__ import annotations

import asyncio
import functools

from services.worker.engine.mock.tokens import next_token
from shared import subjects
from shared.messages.common import Ack
from shared.messages.generation import (
    AckTerminal,
    Cancel,
    DecodePlace,
    GatewayHeartbeat,
    Resend,
    SamplingParams,
    StreamPart,
    StreamRef,
    Submit,
    TokenBatch,
)
from shared.subjects import Process
from tests.processes import process
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import WAIT_S

PROMPT = tuple(b"a prompt of some length")


@functools.lru_cache(4096)
def expected_tokens(count: int, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """What an undisturbed mock engine says after a prompt. Kept: who waits asks often, in that very loop."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


_PATIENT_S = 3600.0


class FakeGateway:
    """Keeps every part that arrived, in order, by (request, attempt)."""

    def __init__(
        self,
        broker: MemoryBroker,
        gateway_id: str = "gw",
        incarnation: str = "1",
        model_hash: str = "",
        *,
        patient: bool = True,
    ) -> None:
        """``patient``: until the first ``beat``, workers are told with each request not to take it for dead, however
        slow the machine is."""
        self.bus = broker.bus(f"gateway-{gateway_id}-{incarnation}")
        self.gateway_id = gateway_id
        self.incarnation = incarnation
        self.model_hash = model_hash
        """Of what its requests are for."""
        self.parts: dict[tuple[str, int], list[StreamPart]] = {}
        self.batches: list[TokenBatch] = []
        self._arrived = asyncio.Event()
        self._patient = patient

    async def start(self) -> None:
        await self.bus.subscribe(
            subjects.tokens(Process(self.gateway_id, self.incarnation)), TokenBatch, self._on_tokens
        )

    def _on_tokens(self, batch: TokenBatch) -> None:
        self.batches.append(batch)
        for part in batch.parts:
            self.parts.setdefault((part.request_id, part.attempt), []).append(part)
        self._arrived.set()

    async def submit(
        self,
        worker: str | Process,
        instance_id: str,
        request_id: str,
        *,
        attempt: int = 1,
        prompt: tuple[int, ...] = PROMPT,
        output: tuple[int, ...] = (),
        max_tokens: int = 8,
        decode_at: DecodePlace | None = None,
        alone_tokens: int = 0,
        may_wait: bool = True,
        temperature: float = 0.0,
        cache_scope: str = "",
        prompt_logprobs: int | None = None,
    ) -> Ack:
        """One Submit RPC. A worker of which only the id is given is the first of it. Raises its typed refusal."""
        request = Submit(
            request_id=request_id,
            attempt=attempt,
            gateway_id=self.gateway_id,
            instance_id=instance_id,
            model="m",
            model_hash=self.model_hash,
            cache_scope=cache_scope,
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                max_tokens=max_tokens, seed=1, temperature=temperature, prompt_logprobs=prompt_logprobs
            ),
            output_token_ids=output,
            decode_at=decode_at,
            alone_tokens=alone_tokens,
            gateway_incarnation=self.incarnation,
            may_wait=may_wait,
        )
        named = worker if isinstance(worker, Process) else process(worker)
        if self._patient:
            await self._beat(_PATIENT_S)
        return await self.bus.request(subjects.worker_submit(named), request, Ack, timeout_s=WAIT_S)

    async def resend(
        self,
        worker_id: str,
        request_id: str,
        *,
        attempt: int = 1,
        offset: int = 0,
        prompt_offset: int | None = None,
    ) -> Ack:
        request = Resend(request_id=request_id, attempt=attempt, offset=offset, prompt_offset=prompt_offset)
        return await self.bus.request(subjects.worker_resend(process(worker_id)), request, Ack, timeout_s=WAIT_S)

    async def cancel(self, worker_id: str, request_id: str, *, attempt: int = 1) -> None:
        await self.bus.publish(
            subjects.worker_cancel(process(worker_id)), Cancel(request_id=request_id, attempt=attempt)
        )

    async def ack(self, worker_id: str, *request_ids: str, attempt: int = 1) -> None:
        streams = tuple(StreamRef(request_id=r, attempt=attempt) for r in request_ids)
        await self.bus.publish(subjects.worker_ack(process(worker_id)), AckTerminal(streams=streams))

    async def beat(self, lease_s: float) -> None:
        """From now on only this counts."""
        self._patient = False
        await self._beat(lease_s)

    async def _beat(self, lease_s: float) -> None:
        message = GatewayHeartbeat(gateway_id=self.gateway_id, lease_s=lease_s, incarnation=self.incarnation)
        await self.bus.publish(subjects.gateway_heartbeat(), message)

    async def tokens_arrived(self, request_id: str, count: int, *, attempt: int = 1) -> None:
        """Wait until ``count`` tokens of a stream are here."""
        async with asyncio.timeout(WAIT_S):
            while sum(len(p.token_ids) for p in self.parts.get((request_id, attempt), [])) < count:
                await self._next_batch()

    async def end_of(self, request_id: str, *, attempt: int = 1) -> StreamPart:
        """Wait for a stream's terminal part."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for part in self.parts.get((request_id, attempt), []):
                    if part.finish_reason is not None:
                        return part
                await self._next_batch()

    async def _next_batch(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    def tokens(self, request_id: str, *, attempt: int = 1, start: int = 0, repeats: bool = False) -> tuple[int, ...]:
        """A stream's tokens so far. Asserts consecutive offsets from ``start`` and nothing behind a terminal part.

        ``repeats``: tokens that are here already may be said again, if they are the same.
        """
        tokens: list[int] = []
        ended = False
        for part in self.parts.get((request_id, attempt), []):
            assert not ended, f"{part} follows the terminal part"
            if repeats and part.token_ids and part.offset < start + len(tokens) and part.finish_reason is None:
                at = part.offset - start
                assert tokens[at : at + len(part.token_ids)] == list(part.token_ids), f"{part} after {tokens}"
                continue
            assert part.offset == start + len(tokens), f"offset {part.offset} behind {start + len(tokens)} tokens"
            tokens.extend(part.token_ids)
            ended = part.finish_reason is not None
        return tuple(tokens)
