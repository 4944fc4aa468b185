"""The client process of the gateway benchmark: ``python -m bench.gateway.client < spec > result``.

A process of its own, because client and servers share few cores and one event loop would hide
the one's time in the other's.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections import Counter

import msgspec
import uvloop

from bench.gateway.load import LoadResult, LoadSpec
from bench.openai_events import DONE, CompletionRequest, read_event, write_request
from bench.replay.runner import choose_model
from bench.stream_client import Endpoint, StreamClient, StreamFailed


class _Load:
    """Runs one ``LoadSpec``."""

    def __init__(self, spec: LoadSpec, client: StreamClient, model: str) -> None:
        self._spec = spec
        self._client = client
        prompt = tuple(10 + index % 200 for index in range(spec.prompt_tokens))
        self._body = write_request(CompletionRequest.exactly(model, prompt, spec.output_tokens))
        self._from_s = time.perf_counter() + spec.warmup_s
        self._until_s = self._from_s + spec.measure_s
        self.ttft_ms: list[float] = []
        self.tokens = 0
        self.requests = 0
        self.faults: Counter[str] = Counter()
        self.fault_example: str | None = None

    def _fault(self, kind: str, detail: str) -> None:
        self.faults[kind] += 1
        self.fault_example = self.fault_example or f"{kind}: {detail}"

    async def _one(self) -> None:
        events = 0
        has_text = False
        done = False
        first_s = 0.0
        error: str | None = None

        def on_event(data: bytes, now_s: float) -> None:
            nonlocal events, has_text, done, first_s, error
            if data == DONE:
                done = True
                return
            event = read_event(data)
            if event.error is not None:
                error = event.error.message
                return
            if not event.choices:
                return
            choice = event.choices[0]
            if not events:
                first_s = now_s
            if choice.text:
                has_text = True
            events += 1
            if self._from_s <= now_s < self._until_s:
                self.tokens += 1

        sent_s = time.perf_counter()
        try:
            reply = await self._client.request(
                "POST", "/v1/completions", self._body, on_event=on_event, timeout_s=self._spec.timeout_s
            )
        except StreamFailed as failure:
            self._fault(failure.kind, failure.detail)
            return
        if reply.status != 200:
            self._fault(f"http_{reply.status}", reply.body[:200].decode(errors="replace"))
            return
        if error is not None:
            self._fault("error_event", error)
            return
        if not done:
            self._fault("no_done", "the stream ended without [DONE]")
        if events != self._spec.output_tokens:
            self._fault("event_count", f"{events} events for {self._spec.output_tokens} tokens")
        if not has_text:
            self._fault("no_text", "no event carried text")
        if self._from_s <= sent_s < self._until_s:
            self.requests += 1
            self.ttft_ms.append((first_s - sent_s) * 1000)

    async def _paced(self, index: int) -> None:
        interval_s = self._spec.interval_s
        due_s = time.perf_counter() + interval_s * index / self._spec.streams
        while due_s < self._until_s:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            await self._one()
            due_s = max(due_s + interval_s, time.perf_counter())

    async def _back_to_back(self) -> None:
        while time.perf_counter() < self._until_s:
            await self._one()
            if self.faults.total() > 100:
                return

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for index in range(self._spec.streams):
                paced = self._spec.mode == "first_token"
                tasks.create_task(self._paced(index) if paced else self._back_to_back())


async def measure(spec: LoadSpec) -> LoadResult:
    """Run ``spec`` against its endpoint. Raises ``BlitzError`` where that is none."""
    client = StreamClient(Endpoint.of(spec.url), api_key=spec.api_key)
    try:
        card = await choose_model(client, None, timeout_s=spec.timeout_s)
        load = _Load(spec, client, card.id)
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        await load.run()
        elapsed_s = time.perf_counter() - started_s
        return LoadResult(
            ttft_ms=tuple(load.ttft_ms),
            tokens=load.tokens,
            measure_s=spec.measure_s,
            requests=load.requests,
            faults=dict(load.faults),
            fault_example=load.fault_example,
            cpu_share=(time.process_time() - started_cpu_s) / elapsed_s,
        )
    finally:
        client.close()


def main() -> None:
    """Read a spec, measure, write the result."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadSpec)
    gc.disable()  # a collection would show up as somebody else's latency
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(measure(spec))
    sys.stdout.buffer.write(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
