"""Engine loops of the two members of a pair, without threads, bus or transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.completion import Completion
from services.worker.engine.base import Activation
from services.worker.engine.loop import EngineLoop
from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.mock.tokens import next_token
from services.worker.live.batches import PromptBatch
from shared.messages.generation import SamplingParams, StreamPart
from shared.messages.live import ZigzagAssignment
from shared.messages.plans import ChainMember
from tests.processes import INCARNATION

NUM_LAYERS = 4
NUM_BLOCKS, BLOCK_SIZE = 64, 4


class WatchedEngine(MockEngine):
    """A mock that writes down its layers, and raises in layer ``fails_at``: ``failure`` once it is set, and for batches
    with the token ``fails_on``."""

    def __init__(self) -> None:
        super().__init__(num_layers=NUM_LAYERS, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, verify=True)
        self.ran: list[tuple[int, int]] = []
        """(tokens of the first slice's prefix, layer)."""
        self.parts: list[tuple[int, int, int]] = []
        """(layer, begin, end)."""
        self.failure: Exception | None = None
        self.fails_at = 0
        self.fails_on: int | None = None
        self.inside: Callable[[int], None] = lambda layer: None

    def run_layers(self, activation: Activation, first: int, last: int) -> Completion[None]:
        self._watch(activation, first, last)
        ran = super().run_layers(activation, first, last)
        if ran.error is None:
            self._ran(activation, first, last)
        return ran

    def run_part(self, activation: Activation, layer: int, begin: int, end: int) -> Completion[None]:
        self._watch(activation, layer, layer + 1)
        ran = super().run_part(activation, layer, begin, end)
        if ran.error is None:
            self.parts.append((layer, begin, end))
            if end == activation.result().num_tokens:
                self._ran(activation, layer, layer + 1)
        return ran

    def _watch(self, activation: Activation, first: int, last: int) -> None:
        self.inside(first)
        if self.failure is not None and first <= self.fails_at < last:
            raise self.failure
        tokens = [token for piece in activation.result().batch.slices for token in piece.token_ids]
        if self.fails_on in tokens and first <= self.fails_at < last:
            raise RuntimeError(f"cannot compute token {self.fails_on}")

    def _ran(self, activation: Activation, first: int, last: int) -> None:
        piece = activation.result().batch.slices[0]
        self.ran += [(piece.start + len(piece.token_ids), layer) for layer in range(first, last)]


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def made_later(_: EngineLoop) -> None:
    """It computes at once, unless ``tests.services.worker.late_workers`` has changed this."""


def make_loop(clock: Callable[[], float] = lambda: 0.0, **changes: int) -> EngineLoop:
    """A loop over a ``WatchedEngine``."""
    config = SchedulerConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **changes)
    loop = EngineLoop(WatchedEngine(), config, clock)
    made_later(loop)
    return loop


def engine_of(loop: EngineLoop) -> WatchedEngine:
    """The loop's engine, as what it is."""
    engine = getattr(loop.engine, "watched", loop.engine)
    assert isinstance(engine, WatchedEngine)
    return engine


def request(name: str, prompt_tokens: int = 6, max_tokens: int = 3, output: Sequence[int] = ()) -> ActiveSequence:
    """A request; each name has a prompt of its own."""
    prompt = [(sum(map(ord, name)) * 11 + i) % 200 for i in range(prompt_tokens)]
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    return ActiveSequence(request_id=name, attempt=1, gateway_id="g", prompt=prompt, params=params, output=output)


def expected(sequence: ActiveSequence) -> tuple[int, ...]:
    """All its output, as one undisturbed engine gives it."""
    tokens = list(sequence.prompt)
    for _ in range(sequence.params.max_tokens):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(sequence.prompt) :])


def batch_of(batch_id: str, *sequences: ActiveSequence) -> PromptBatch:
    """A batch of them."""
    return PromptBatch(batch_id, sequences)


def tokens_of(outputs: Iterable[StreamPart]) -> dict[str, tuple[int, ...]]:
    """Tokens by request. Asserts consecutive offsets."""
    found: dict[str, tuple[int, ...]] = {}
    for out in outputs:
        before = found.setdefault(out.request_id, ())
        assert out.offset == len(before)
        found[out.request_id] = before + out.token_ids
    return found


def run_all(loop: EngineLoop, limit: int = 500) -> list[StreamPart]:
    """Steps until there is nothing to do."""
    outputs: list[StreamPart] = []
    for _ in range(limit):
        if not loop.has_work:
            return outputs
        step = loop.step()
        outputs += step.outputs if step is not None else ()
    raise AssertionError(f"work after {limit} steps")


def assignment(**changes: object) -> ZigzagAssignment:
    """A pair of w0 (source) and w1 (target)."""

    def member(worker_id: str, epoch: int) -> ChainMember:
        return ChainMember(
            worker_id=worker_id,
            incarnation=INCARNATION,
            instance_id=f"instance-of-{worker_id}",
            host=f"host-of-{worker_id}",
            transport_address=worker_id.encode(),
            epoch=epoch,
        )

    fields: dict[str, object] = {
        "pair_id": "pair",
        "plan_id": "plan",
        "model": "m",
        "source": member("w0", 1),
        "target": member("w1", 2),
        "valid_s": 2e9,
        "term": 1,
    }
    return ZigzagAssignment(**(fields | changes))  # type: ignore[arg-type]
