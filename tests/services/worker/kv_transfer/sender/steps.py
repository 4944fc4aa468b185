"""What tests of the prefill side do, and wait for."""

from __future__ import annotations

import asyncio
import threading

from services.worker.device.completion import Completion
from services.worker.engine.base import Activation
from services.worker.engine.mock.mock_engine import MockEngine
from shared.messages.common import Ack
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.kv_transfer.fakes import PROMPT, FakeDecode, clean, outcomes
from tests.services.worker.lone_worker import LoneWorker
from tests.services.workers import RunningWorker
from tests.wait_until import WAIT_S, eventually

SILENCE_S = 1.5
"""After which ``impatient`` ones take a decode worker for lost."""
PATIENT_S = 600.0
"""All others, to whom a decode worker of a busy machine is not lost."""


class Gate:
    """Holds the engine before this layer of any step but the first ``passes`` until it is opened; then it fails there
    ``failures`` times."""

    def __init__(self, worker: RunningWorker, layer: int, *, passes: int = 0) -> None:
        engine = worker.serving.engine.loop.engine
        assert isinstance(engine, MockEngine)
        self.inside = threading.Event()
        self.failures = 0
        self.passes = passes
        self._open = threading.Event()
        real = engine.run_layers

        def run_layers(activation: Activation, first: int, last: int) -> Completion[None]:
            if first <= layer < last and self.passes:
                self.passes -= 1
            elif first <= layer < last and not self._open.is_set():
                self.inside.set()
                assert self._open.wait(WAIT_S)
            if first <= layer < last and self.failures:
                self.failures -= 1
                raise RuntimeError("broken")
            return real(activation, first, last)

        engine.run_layers = run_layers  # type: ignore[method-assign]

    def open(self) -> None:
        self._open.set()


async def submit(
    alone: LoneWorker,
    decode: FakeDecode,
    request_id: str = "r",
    *,
    prompt: tuple[int, ...] = PROMPT,
    **fields: object,
) -> None:
    instance_id = alone.worker.serving.instance_id
    await alone.submit(instance_id, request_id, prompt=prompt, decode_at=decode.place, **fields)


async def kept(alone: LoneWorker, request_id: str = "r", *, prompt: tuple[int, ...] = PROMPT) -> None:
    """It was decoded here to its end."""
    end = await alone.gateway.end_of(request_id)
    assert end.finish_reason == "length", end
    assert alone.gateway.tokens(request_id) == expected_tokens(8, prompt)


async def ended(alone: LoneWorker, **expected: float) -> None:
    """These outcomes, and no others."""
    await eventually(lambda: sum(outcomes(alone).values()) == sum(expected.values()))
    assert outcomes(alone) == expected


async def given_up(alone: LoneWorker, request_id: str = "r", *, prompt: tuple[int, ...] = PROMPT) -> None:
    """Its attempt ended here, for the gateway to make another one, and was not decoded any further."""
    end = await alone.gateway.end_of(request_id)
    assert end.error is not None, end
    assert end.error.code == "unavailable"
    assert alone.gateway.tokens(request_id) == expected_tokens(1, prompt)
    await ended(alone, unknown=1)
    await clean(alone)


async def used_blocks(alone: LoneWorker) -> int:
    return (await alone.stats()).load.kv_blocks_used


async def forever(_: object) -> Ack:
    await asyncio.Event().wait()
    return Ack()
