"""A batch that the engine cannot compute is run again in parts: the guilty request ends, the others do not notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from services.worker.core.scheduling.schedule import Sampled, SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.completion import Completion, Landed, combined
from services.worker.engine.base import Activation, Engine
from services.worker.engine.forward_batch import ForwardBatch
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.mock.settings import MockFaults
from services.worker.engine.mock.tokens import next_token
from services.worker.engine.thread import EngineThread
from services.worker.engine.torch_engine import TorchEngine
from shared.errors import BlitzError, EngineBroken, PeerLost
from shared.messages.generation import SamplingParams, StreamPart
from tests.services.worker.engine.harness import loaded_engine

NUM_BLOCKS, BLOCK_SIZE = 256, 4
BAD = 250
"""A token that no mock ever says."""


def has_token(batch: ForwardBatch, token_id: int) -> bool:
    """Whether it computes this token."""
    return any(token_id in piece.token_ids for piece in batch.slices)


class StagedEngine(MockEngine):
    """A mock that fails in one stage on batches with the token ``BAD``, and counts its batches."""

    def __init__(self, stage: str = "run_layers", failure: Exception | None = None) -> None:
        super().__init__(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, verify=True)
        self.stage = stage
        self.failure = failure or RuntimeError("cannot compute this")
        self.left: int | None = None
        """So many failures more; None: always."""
        self.num_batches = 0
        self.largest_failing = 0

    def _strike(self, stage: str, batch: ForwardBatch) -> None:
        if stage != self.stage or self.left == 0:
            return
        if has_token(batch, BAD):
            self.largest_failing = max(self.largest_failing, len(batch.slices))
            if self.left is not None:
                self.left -= 1
            raise self.failure

    def embed(self, batch: ForwardBatch) -> Activation:
        self.num_batches += 1
        self._strike("embed", batch)
        return super().embed(batch)

    def run_layers(self, activation: Activation, first: int, last: int) -> Completion[None]:
        ran = super().run_layers(activation, first, last)
        if last == self.num_layers - 1 or last - first > 1:
            self._strike("run_layers", activation.result().batch)
        return ran

    def head(self, activation: Activation) -> list[int]:
        self._strike("head", activation.result().batch)
        return super().head(activation)

    def sample(self, activation: Activation) -> Completion[list[Sampled]]:
        sampled = super().sample(activation)
        self._strike("sample", activation.result().batch)
        return sampled


STAGES = ["embed", "run_layers", "head", "sample"]


def loop_of(engine: Engine, clock: Callable[[], float] = lambda: 0.0, **changes: int) -> EngineLoop:
    num_blocks, block_size = engine.num_blocks, engine.block_size
    return EngineLoop(engine, SchedulerConfig(num_blocks=num_blocks, block_size=block_size, **changes), clock)


def request(name: str, prompt: Sequence[int], max_tokens: int = 12, **params: float) -> ActiveSequence:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, **params)  # type: ignore[arg-type]
    return ActiveSequence(request_id=name, attempt=1, gateway_id="g", prompt=prompt, params=sampling)


def said(prompt: Sequence[int], count: int = 12) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


def run_all(loop: EngineLoop) -> tuple[dict[str, tuple[int, ...]], dict[str, StreamPart]]:
    """Tokens and ends by request."""
    tokens: dict[str, tuple[int, ...]] = {}
    ends: dict[str, StreamPart] = {}
    while loop.has_work:
        step = loop.step()
        for out in step.outputs if step else ():
            assert out.request_id not in ends
            assert out.offset == len(tokens.get(out.request_id, ()))
            if out.token_ids:
                tokens[out.request_id] = tokens.get(out.request_id, ()) + out.token_ids
            if out.finish_reason is not None:
                ends[out.request_id] = out
        loop.scheduler.check()
    assert loop.scheduler.pool.num_used == loop.num_requests == 0
    return tokens, ends


PROMPTS = {f"r{i}": tuple(range(i, 2 * i + 5)) for i in range(15)}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("place", [0, 7, 15])
@pytest.mark.parametrize("changes", [{}, {"prefill_chunk_tokens": 3}, {"max_batch_tokens": 9}])
def test_one_bad_prompt_ends_alone_and_fifteen_others_get_their_tokens(
    stage: str, place: int, changes: dict[str, int]
) -> None:
    loop = loop_of(StagedEngine(stage), **changes)
    names = list(PROMPTS)
    names.insert(place, "bad")
    for name in names:
        loop.add(request(name, PROMPTS.get(name, (1, 2, 3, 4, BAD))))
    tokens, ends = run_all(loop)
    bad = ends.pop("bad")
    assert (bad.finish_reason, bad.error and bad.error.code) == ("error", "request_failed")
    assert bad.error is not None
    assert "cannot compute this" in bad.error.message
    assert tokens == {name: said(prompt) for name, prompt in PROMPTS.items()}
    assert {end.finish_reason for end in ends.values()} == {"length"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_request_that_fails_as_it_decodes_ends_behind_the_tokens_that_it_has(stage: str) -> None:
    loop = loop_of(StagedEngine(stage))
    others = [request(name, prompt) for name, prompt in PROMPTS.items()]
    for other in others:
        loop.add(other)
    loop.add(bad := request("bad", (1, 2, 3), 50))
    for _ in range(4):
        loop.step()
    bad.tokens[-1] = BAD  # as if it had been sampled
    step = loop.step()
    assert step is not None
    assert step.error is not None
    ended = [out for out in step.outputs if out.finish_reason is not None]
    assert [(out.request_id, out.offset) for out in ended] == [("bad", 4)]
    assert len(step.outputs) == 16
    while loop.has_work:
        loop.step()
    assert [tuple(other.output) for other in others] == [said(other.prompt) for other in others]


def test_several_guilty_ones_are_all_found() -> None:
    loop = loop_of(StagedEngine())
    for name, prompt in PROMPTS.items():
        loop.add(request(name, (*prompt, BAD) if int(name[1:]) % 4 == 1 else prompt))
    tokens, ends = run_all(loop)
    guilty = {name for name, end in ends.items() if end.error is not None}
    assert guilty == {"r1", "r5", "r9", "r13"}
    assert tokens == {name: said(prompt) for name, prompt in PROMPTS.items() if name not in guilty}


def test_one_guilty_one_costs_few_runs() -> None:
    engine = StagedEngine()
    loop = loop_of(engine)
    for name, prompt in PROMPTS.items():
        loop.add(request(name, prompt))
    loop.add(request("bad", (BAD,)))
    loop.step()
    assert engine.largest_failing == 16
    assert engine.num_batches <= 1 + 2 * 4 + 1, "the batch, two halves at each level, and at most a probe"


@pytest.mark.parametrize("count", [1, 2, 16])
def test_a_failure_that_does_not_come_again_costs_no_request(count: int) -> None:
    engine = StagedEngine()
    engine.left = 1
    loop = loop_of(engine)
    prompts = {f"r{i}": (BAD, i) for i in range(count)}
    for name, prompt in prompts.items():
        loop.add(request(name, prompt))
    tokens, _ = run_all(loop)
    assert tokens == {name: said(prompt) for name, prompt in prompts.items()}


def test_a_typed_error_of_the_engine_stays_what_it_is() -> None:
    loop = loop_of(StagedEngine(failure=PeerLost("gone")))
    loop.add(request("a", (1, 2)))
    loop.add(request("bad", (BAD,)))
    tokens, ends = run_all(loop)
    assert ends["bad"].error is not None
    assert (ends["bad"].error.code, ends["bad"].error.message) == ("peer_lost", "gone")
    assert tokens == {"a": said((1, 2))}


def test_time_that_went_into_running_again_is_no_measurement() -> None:
    ticks = iter(range(100))
    loop = loop_of(StagedEngine(), lambda: float(next(ticks)))
    loop.add(request("a", (1, 2, 3, 4)))
    loop.add(request("bad", (BAD, 1)))
    loop.step()
    assert loop.prefill_token_s == 0.0
    loop.add(request("b", (1, 2, 3, 4)))
    loop.step()
    assert loop.prefill_token_s > 0.0


class BrokenEngine(MockEngine):
    """Computes nothing any more once it is told."""

    is_broken = False

    def run_layers(self, activation: Activation, first: int, last: int) -> Completion[None]:
        if self.is_broken:
            raise RuntimeError("the device is gone")
        return super().run_layers(activation, first, last)


@pytest.mark.parametrize("count", [1, 5, 16])
def test_an_engine_that_computes_nothing_any_more_ends_the_thread_and_all_its_requests_once(count: int) -> None:
    engine = BrokenEngine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    loop = loop_of(engine, max_num_sequences=12)
    ends: list[StreamPart] = []
    failures: list[BlitzError] = []

    def on_output(output: StepOutput) -> None:
        ends.extend(out for out in output.outputs if out.finish_reason is not None)

    thread = EngineThread(loop, on_output, failures.append)
    for i in range(count):
        loop.add(request(f"r{i}", (i, 1)))
    loop.step()
    loop.add(cancelled := request("cancelled", (9,)))
    loop.scheduler.cancel(*cancelled.key)
    engine.is_broken = True
    thread.start()
    assert thread.join(10)
    assert [f.code for f in failures] == ["engine_broken"]
    assert "the device is gone" in failures[0].message
    by_request = {out.request_id: out for out in ends}
    assert len(by_request) == len(ends) == count + 1
    assert by_request.pop("cancelled").finish_reason == "cancelled", "what had ended before is not lost"
    assert {out.error.code for out in by_request.values() if out.error is not None} == {"engine_broken"}
    assert loop.num_requests == 0
    assert issubclass(EngineBroken, BlitzError)


class FailsInLayers(MockEngine):
    """Once in each of these, in this order."""

    def __init__(self, *layers: int) -> None:
        super().__init__(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.left = list(layers)

    def run_layers(self, activation: Activation, first: int, last: int) -> Completion[None]:
        if self.left and first == self.left[0]:
            del self.left[0]
            raise RuntimeError("cannot compute this")
        return super().run_layers(activation, first, last)


def test_one_that_is_cancelled_while_it_is_run_again_and_fails_says_nothing_of_the_engine() -> None:
    engine = FailsInLayers(1, 3)
    loop = loop_of(engine)
    loop.add(request("a", (1, 2, 3)))

    def between_layers() -> None:
        if len(engine.left) == 1:
            loop.scheduler.cancel("a", 1)

    loop.between_layers = between_layers
    _, ends = run_all(loop)
    assert ends["a"].finish_reason == "cancelled"
    assert engine.left == []
    loop.add(request("b", (1, 2, 3)))
    assert run_all(loop)[0] == {"b": said((1, 2, 3))}


class TorchThatFails(TorchEngine):
    """Fails in the third layer of batches with one token."""

    bad_token = -1

    def run_layers(self, activation: Activation, first: int, last: int) -> Completion[Any]:
        bad = has_token(activation.result().batch, self.bad_token)
        ran: list[Completion[None]] = []
        for layer in range(first, last):
            if bad and layer == 2:
                return Landed(error=RuntimeError("cannot compute this"))
            ran.append(super().run_layers(activation, layer, layer + 1))
        return combined(*ran)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("changes", [{}, {"prefill_chunk_tokens": 4}])
def test_a_real_model_gives_the_same_tokens_beside_a_request_that_fails(
    temperature: float, changes: dict[str, int]
) -> None:
    bad_token = 200
    prompts = {f"r{i}": [(7 * i + j) % 190 for j in range(3 + 2 * i)] for i in range(7)}

    def texts(bad: bool) -> dict[str, tuple[int, ...]]:
        engine = loaded_engine("llama")
        engine.__class__ = TorchThatFails
        assert isinstance(engine, TorchThatFails)
        engine.bad_token = bad_token if bad else -1
        loop = loop_of(engine, **changes)
        for index, (name, prompt) in enumerate(prompts.items()):
            # What is sampled is not the bad token, or the test says nothing.
            bias = ((bad_token, -100.0),)
            params = SamplingParams(max_tokens=8, seed=index, temperature=temperature, logit_bias=bias)
            loop.add(ActiveSequence(request_id=name, attempt=1, gateway_id="g", prompt=prompt, params=params))
            if bad and index == 3:
                loop.add(request("bad", [5, 6, bad_token, 8, 9, 10]))
        tokens, ends = run_all(loop)
        assert bad == ("bad" in ends and ends["bad"].finish_reason == "error")
        return tokens

    assert texts(bad=True) == texts(bad=False)


def test_the_mocks_faults_strike_batches_with_their_token(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "services.worker.engine.mock.settings.os.kill", lambda pid, number: killed.append((pid, number))
    )
    faults = MockFaults(raise_token=BAD, kill_token=BAD + 1)
    engine = MockEngine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, faults=faults)
    loop = loop_of(engine)
    for name, prompt in {"a": (1, 2), "bad": (BAD,), "worse": (BAD + 1,)}.items():
        loop.add(request(name, prompt))
    tokens, ends = run_all(loop)
    assert ends["bad"].error is not None
    assert f"token {BAD}" in ends["bad"].error.message
    assert tokens["a"] == said((1, 2))
    assert killed
