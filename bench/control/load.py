"""Requests at a steady rate over all gateways, for all models in turn, whatever becomes of those before."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from bench.control.setting import MAX_TOKENS
from bench.openai_events import DONE, read_event
from bench.stream_client import Endpoint, StreamClient, StreamFailed

MAX_OPEN = 512
"""More are not sent: the machine does not keep up, and what is short of the rate shows."""
SILENCE_S = 30.0


class Clients:
    """One client per gateway. ``faults``: requests that failed, by what went wrong."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._clients = [StreamClient(Endpoint.of(url)) for url in urls]
        self.faults: Counter[str] = Counter()
        self.fault_example = ""
        self.sent = 0
        self.answered = 0
        self.unsent = 0
        """Due while too many were open."""
        self.ttft_s: list[float] = []

    def close(self) -> None:
        for client in self._clients:
            client.close()

    async def ask(self, gateway: int, model: str) -> bool:
        """One request to one gateway; whether it was answered whole."""
        self.sent += 1
        body = msgspec.json.encode(
            {
                "model": model,
                "prompt": f"Request {self.sent} for {model}.",
                "max_tokens": MAX_TOKENS,
                "min_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
        )
        begun_s = time.perf_counter()
        first_s = 0.0
        finish = ""
        done = False

        def on_event(data: bytes, now_s: float) -> None:
            nonlocal first_s, finish, done
            if data == DONE:
                done = True
                return
            event = read_event(data)
            if event.error is not None:
                finish = f"error {event.error.code}"
            for choice in event.choices:
                first_s = first_s or now_s
                finish = finish or choice.finish_reason or ""

        try:
            reply = await self._clients[gateway].request(
                "POST", "/v1/completions", body, on_event=on_event, timeout_s=SILENCE_S
            )
        except StreamFailed as error:
            return self._fault(error.kind, error.detail)
        if reply.status != 200:
            return self._fault(f"http_{reply.status}", reply.body[:200].decode(errors="replace"))
        if finish != "length" or not done:
            return self._fault("answer", f"finish {finish!r}, done {done}")
        self.answered += 1
        self.ttft_s.append(first_s - begun_s)
        return True

    def _fault(self, kind: str, detail: str) -> bool:
        self.faults[kind] += 1
        self.fault_example = self.fault_example or f"{kind}: {detail}"
        return False

    async def ask_everywhere(self, models: Sequence[str], at_once: int = 8) -> None:
        """Each model once at each gateway, so that tokenizers are loaded and connections stand."""
        gate = asyncio.Semaphore(at_once)

        async def one(gateway: int, model: str) -> None:
            async with gate:
                await self.ask(gateway, model)

        pairs = [(gateway, model) for model in models for gateway in range(len(self._clients))]
        await asyncio.gather(*(one(gateway, model) for gateway, model in pairs))

    async def run(self, models: Sequence[str], rate: float, seconds: float) -> None:
        """Open loop. Returns when all have ended."""
        start_s = time.perf_counter()
        is_open: set[asyncio.Task[bool]] = set()
        for index in range(round(rate * seconds)):
            wait_s = start_s + index / rate - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if len(is_open) >= MAX_OPEN:
                self.unsent += 1
                await asyncio.sleep(0)
                continue
            gateway = index % len(self._clients)
            # A step that shares no factor with the number of gateways: each gateway asks for each model.
            task = asyncio.create_task(self.ask(gateway, models[(index // len(self._clients)) % len(models)]))
            is_open.add(task)
            task.add_done_callback(is_open.discard)
        await asyncio.gather(*is_open)
