"""One wake: a model without instances is asked, answers, and gives its worker back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from bench.lab.errors import LabFailed
from bench.openai_events import DONE as END_OF_STREAM
from bench.openai_events import CompletionRequest, read_event, write_request
from bench.stream_client import Endpoint, StreamClient
from compose.supervisor import RunningStack
from shared.messages.operations import ScaleRecord

PROMPT = tuple(range(10, 26))
"""Token ids."""
OUTPUT_TOKENS = 2
NUM_WARM = 5
PATIENCE_S = 180.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Wake:
    """Of one request for a model that slept; seconds, but for ``parts_ms``."""

    ttft_s: float
    warm_ttft_s: float
    """Of the requests right after it, while the instance is there: median."""
    load_s: float
    """From the plan to serving, as the monitor counts it."""
    give_back_s: float
    """From the last request's end to a worker that is free."""
    parts_ms: dict[str, float]
    """What the time to the first token consists of."""


class Sleeper:
    """A model of a running stack, with ``min_instances`` 0."""

    def __init__(self, stack: RunningStack, model: str) -> None:
        self._stack = stack
        self._model = model
        self._client = StreamClient(Endpoint.of(stack.url))

    def close(self) -> None:
        self._client.close()

    async def asleep(self) -> None:
        """Wait until the model has no instance. Raises ``LabFailed``."""
        deadline_s = time.monotonic() + PATIENCE_S
        while any(worker.state != "spare" for worker in (await self._stack.admin.status()).workers):
            if time.monotonic() > deadline_s:
                raise LabFailed(f"model {self._model} still has an instance after {PATIENCE_S:g} s without a request")
            await asyncio.sleep(POLL_S)

    async def wake(self) -> Wake:
        """Ask the sleeping model. Raises ``LabFailed``, ``StreamFailed``, ``BlitzError``."""
        asked_at_s = time.time()
        ttft_s, _ = await self._ask()
        answers = [await self._ask() for _ in range(NUM_WARM)]
        warm_s = sorted(seconds for seconds, _ in answers)[NUM_WARM // 2]
        ended_at_s = answers[-1][1]
        out = await self._record("out", asked_at_s)
        back = await self._record("in", ended_at_s)
        parts = parts_of(out, asked_at_s, asked_at_s + ttft_s)
        load_s = _ms(out.trigger_to_serving_ms) - _ms(out.trigger_to_plan_ms)
        give_back_s = back.triggered_at_s + _ms(back.trigger_to_spare_ms) / 1000 - ended_at_s
        return Wake(ttft_s, warm_s, load_s / 1000, give_back_s, parts)

    async def _ask(self) -> tuple[float, float]:
        """Seconds to the first token, and when (unix time) the answer was complete."""
        first_s: float | None = None
        error = ""

        def on_event(data: bytes, now_s: float) -> None:
            nonlocal first_s, error
            event = read_event(data) if data != END_OF_STREAM else None
            if event is not None and event.error is not None:
                error = event.error.message
            elif event is not None and event.choices and first_s is None:
                first_s = now_s

        body = write_request(CompletionRequest.exactly(self._model, PROMPT, OUTPUT_TOKENS))
        sent_s = time.perf_counter()
        reply = await self._client.request("POST", "/v1/completions", body, on_event=on_event, timeout_s=PATIENCE_S)
        if reply.status != 200 or first_s is None:
            raise LabFailed(f"the request failed: {reply.status} {error or reply.body[:200].decode(errors='replace')}")
        return first_s - sent_s, time.time()

    async def _record(self, direction: str, since_s: float) -> ScaleRecord:
        """The first operation in a direction that was triggered since then, once it is done."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            records = await self._stack.admin.scale_records(limit=10)
            found = [r for r in records if r.direction == direction and r.triggered_at_s >= since_s]
            if found and found[-1].status == "done":
                return found[-1]
            if time.monotonic() > deadline_s:
                raise LabFailed(f"no scale operation {direction!r} of {self._model} ended within {PATIENCE_S:g} s")
            await asyncio.sleep(POLL_S)


def _ms(value: float | None) -> float:
    if value is None:
        raise LabFailed("a scale record without all of its times")
    return value


def parts_of(record: ScaleRecord, asked_at_s: float, answered_at_s: float) -> dict[str, float]:
    """What the time between the two consists of (unix times: all processes read one machine's clock). Raises
    ``LabFailed`` if the record lacks one."""
    at_ms = (record.triggered_at_s - asked_at_s) * 1000
    plan_ms, serving_ms = _ms(record.trigger_to_plan_ms), _ms(record.trigger_to_serving_ms)
    first_ms, loaded_ms = _ms(record.trigger_to_first_byte_ms), _ms(record.trigger_to_loaded_ms)
    return {
        "held": at_ms,
        "planned": plan_ms,
        "ordered": first_ms - plan_ms,
        "loaded": loaded_ms - first_ms,
        "served": serving_ms - loaded_ms,
        "answered": (answered_at_s - asked_at_s) * 1000 - at_ms - serving_ms,
    }
