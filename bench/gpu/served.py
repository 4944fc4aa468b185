"""Requests of one engine loop, stepped by the calling thread."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.base import Engine
from services.worker.engine.loop import EngineLoop, StepOutput
from shared.errors import Internal
from shared.messages.generation import SamplingParams

LANDING_S = 30.0
"""No operation takes so long: after it the device is taken to hang."""
GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True)
_DRAWN = msgspec.structs.replace(GREEDY, temperature=1.0)
WAYS: Mapping[str, SamplingParams] = MappingProxyType(
    {
        "greedy": GREEDY,
        "temperature 1": _DRAWN,
        "top-p 0.95": msgspec.structs.replace(_DRAWN, top_p=0.95),
        "penalties": msgspec.structs.replace(_DRAWN, frequency_penalty=0.3, repetition_penalty=1.1),
        "log-probabilities": msgspec.structs.replace(GREEDY, logprobs=5),
    }
)
"""To choose tokens."""


def prompt_of(num_tokens: int, vocab_size: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids, the same for a seed."""
    return tuple(random.Random(seed * 100_003 + num_tokens).choices(range(vocab_size), k=num_tokens))


class ServedRequests:
    """What each has written, and what failed."""

    def __init__(self, engine: Engine, *, chunk_tokens: int = 8192, max_sequences: int = 256) -> None:
        config = SchedulerConfig(
            num_blocks=engine.num_blocks,
            block_size=engine.block_size,
            max_num_sequences=max_sequences,
            max_batch_tokens=chunk_tokens + max_sequences,
            prefill_chunk_tokens=chunk_tokens,
        )
        self.loop = EngineLoop(engine, config, time.perf_counter)
        self._landing = threading.Event()
        self.loop.wake = self._landing.set
        self.written: dict[str, list[int]] = {}
        self.errors: list[str] = []

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self.written[request_id] = []
        self.loop.add(
            ActiveSequence(request_id=request_id, attempt=1, gateway_id="bench", prompt=tuple(prompt), params=params)
        )

    def step(self) -> StepOutput | None:
        """The next output, once it is there; None where nothing is left to do. Raises ``TimeoutError`` for a device
        that does not come to it."""
        while True:
            self._landing.clear()
            output = self.loop.step()
            if output is not None:
                self._take(output)
                return output
            if not self.loop.num_in_flight:
                return None
            if not self._landing.wait(LANDING_S):
                raise TimeoutError(f"what the device was given had not ended after {LANDING_S:g} s")

    def _take(self, output: StepOutput) -> None:
        for one in output.outputs:
            self.written[one.request_id] += one.token_ids
            if one.error is not None:
                self.errors.append(one.error.message)

    def steps_of_all(self) -> Iterable[StepOutput]:
        """Until every request has ended. Raises ``Internal`` once one has failed."""
        while (output := self.step()) is not None:
            if self.errors:
                raise Internal(self.errors[0])
            yield output

    def run(self) -> dict[str, list[int]]:
        """To the end of every request. Raises as ``steps_of_all``."""
        for _ in self.steps_of_all():
            pass
        return self.written

    def decode(self, num_requests: int, num_steps: int) -> None:
        """So many steps in which all requests decode, and nothing else is computed. Raises ``Internal`` if they end
        before, or one fails."""
        for output in self.steps_of_all():
            if not output.num_prefill_tokens and output.num_decode_tokens == num_requests:
                num_steps -= 1
            if num_steps <= 0:
                return
        raise Internal(f"the requests ended {num_steps} steps too early")

    def be_quiet(self) -> None:
        """What is begun ends, and nothing is begun before ``go_on``."""
        self.loop.halts = True
        while not self.loop.is_quiet:
            if self.step() is None and not self.loop.is_quiet:
                raise Internal("a step is begun and nothing of it is in flight")

    def go_on(self) -> None:
        self.loop.halts = False
