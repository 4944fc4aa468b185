"""The engine loop and requests that another instance is to decode."""

from __future__ import annotations

from services.worker.core.scheduling.schedule import Sampled, SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.completion import Completion
from services.worker.engine.base import Activation
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.mock.tokens import next_token
from shared.messages.generation import DecodePlace, SamplingParams
from tests.processes import INCARNATION

NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS = 32, 4, 3
PLACE = DecodePlace(worker_id="w1", incarnation=INCARNATION, instance_id="i1")


class FailingEngine(MockEngine):
    """Fails in this layer, so many times."""

    fails_in: int | None = None
    times = 1

    def run_layers(self, activation: Activation, first: int, last: int) -> Completion[None]:
        if self.fails_in is not None and first <= self.fails_in < last:
            self.times -= 1
            if not self.times:
                self.fails_in = None
            raise RuntimeError("broken")
        return super().run_layers(activation, first, last)


class Told:
    """What a loop says of departing requests: (request, layers), and of chunks (start, end)."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self.said: list[tuple[str, int]] = []
        self.chunks: list[tuple[int, int]] = []
        self.sequences: dict[str, ActiveSequence] = {}
        self.computed_at: list[int] = []

    def ran_layers(self, sequence: ActiveSequence, start: int, end: int, num_layers: int) -> None:
        self.said.append((sequence.request_id, num_layers))
        self.chunks.append((start, end))
        assert not sequence.output, "its first token comes after its layers"
        export = self._loop.engine.export_kv  # raises unless it is all there
        export([sequence.block_table], [end], num_layers, first_tokens=[start]).result()
        export([sequence.block_table], [start], NUM_LAYERS).result()

    def computed(self, sequence: ActiveSequence, token: Sampled) -> None:
        assert token.error is not None or sequence.output == [token.token_id]
        assert sequence.reserved != sequence.finished, "held, or over"
        self.computed_at.append(len(self.said))
        self.sequences[sequence.request_id] = sequence


def loop_of(**changes: int) -> tuple[EngineLoop, Told, FailingEngine]:
    engine = FailingEngine(num_layers=NUM_LAYERS, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, verify=True)
    loop = EngineLoop(engine, SchedulerConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **changes), lambda: 0.0)
    loop.prefill_listener = told = Told(loop)
    return loop, told, engine


def request(name: str, num_tokens: int = 5, *, leaves: bool = True, max_tokens: int = 6) -> ActiveSequence:
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    place = PLACE if leaves else None
    prompt = tuple(range(len(name), len(name) + num_tokens))
    return ActiveSequence(request_id=name, attempt=0, gateway_id="g", prompt=prompt, params=params, decode_at=place)


def tokens_after(sequence: ActiveSequence, count: int) -> list[int]:
    tokens = list(sequence.prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(sequence.prompt) :]


def run(loop: EngineLoop) -> list[StepOutput]:
    steps = []
    while loop.has_work:
        output = loop.step()
        assert output is not None
        steps.append(output)
        loop.scheduler.check()
    return steps


def test_every_layer_is_told_as_soon_as_it_was_run_and_the_token_after_them() -> None:
    loop, told, _ = loop_of()
    loop.add(request("a"))
    (only,) = run(loop)
    assert told.said == [("a", 1), ("a", 2), ("a", 3)]
    assert told.computed_at == [3]
    assert [(o.request_id, len(o.token_ids), o.finish_reason) for o in only.outputs] == [("a", 1, None)]
    assert loop.num_requests == 1, "it is held"


def test_every_layer_of_every_chunk_is_told() -> None:
    loop, told, _ = loop_of(prefill_chunk_tokens=3)
    loop.add(request("a", 8))
    run(loop)
    assert told.said == [("a", 1), ("a", 2), ("a", 3)] * 3
    assert told.chunks == [(0, 3)] * 3 + [(3, 6)] * 3 + [(6, 8)] * 3
    assert told.computed_at == [len(told.said)]


def test_a_last_chunk_of_one_token_is_told_at_the_latest_with_the_first_token() -> None:
    loop, told, _ = loop_of(prefill_chunk_tokens=4)
    loop.add(request("a", 5))
    run(loop)
    assert set(told.chunks) == {(0, 4)}
    sequence = told.sequences["a"]
    kv = loop.engine.export_kv([sequence.block_table], [5], NUM_LAYERS).result()
    assert len(kv) == NUM_LAYERS * 5 * loop.engine.kv_bytes_per_token_layer


def test_nothing_is_told_of_requests_that_stay_in_the_same_steps() -> None:
    loop, told, _ = loop_of()
    stays, decodes = request("stays", leaves=False), request("decodes", leaves=False)
    loop.add(decodes)
    loop.step()
    assert told.said == []
    loop.add(stays)
    loop.add(request("leaves", 9))
    run(loop)
    assert {name for name, _ in told.said} == {"leaves"}
    assert list(told.sequences) == ["leaves"]
    for sequence in (stays, decodes):
        assert sequence.output == tokens_after(sequence, 6)


def test_two_that_leave_in_one_step_are_both_told() -> None:
    loop, told, _ = loop_of()
    loop.add(request("a"))
    loop.add(request("bb"))
    run(loop)
    assert told.said == [(name, layers) for layers in (1, 2, 3) for name in ("a", "bb")]
    assert list(told.sequences) == ["a", "bb"]


def test_a_request_of_one_token_is_told_and_over() -> None:
    loop, told, _ = loop_of()
    loop.add(request("a", max_tokens=1))
    run(loop)
    assert told.sequences["a"].finished
    assert loop.num_requests == loop.scheduler.pool.num_used == 0


def test_a_step_that_fails_in_the_last_layer_is_not_a_computed_prompt() -> None:
    loop, told, engine = loop_of()
    engine.fails_in, engine.times = NUM_LAYERS - 1, 2
    loop.add(request("a"))
    (step,) = run(loop)
    assert [(o.request_id, o.finish_reason) for o in step.outputs] == [("a", "error")]
    assert told.said == [("a", 1), ("a", 2)] * 2
    assert told.sequences == {}
    assert loop.num_requests == loop.scheduler.pool.num_used == 0


def test_a_step_that_is_run_again_is_told_again_and_its_prompts_are_computed() -> None:
    loop, told, engine = loop_of()
    engine.fails_in = NUM_LAYERS - 1
    loop.add(request("a"))
    loop.add(request("bb"))
    run(loop)
    assert told.said[:4] == [(name, layers) for layers in (1, 2) for name in ("a", "bb")]
    assert told.said[4:] == [(name, layers) for name in ("a", "bb") for layers in (1, 2, 3)]
    assert list(told.sequences) == ["a", "bb"]
    for sequence in told.sequences.values():
        assert sequence.output == tokens_after(sequence, 1)
        loop.scheduler.reservations.decode_here(sequence)
    run(loop)
    for sequence in told.sequences.values():
        assert sequence.output == tokens_after(sequence, 6)


def test_nobody_to_tell_means_it_is_decoded_here() -> None:
    loop, _, _ = loop_of()
    loop.prefill_listener = None
    a = request("a")
    loop.add(a)
    run(loop)
    assert a.output == tokens_after(a, 6)
    assert loop.num_requests == loop.scheduler.pool.num_used == 0


def test_what_is_decoded_here_goes_on_and_what_its_decoder_has_does_not() -> None:
    loop, told, _ = loop_of()
    for name in ("a", "bb"):
        loop.add(request(name))
    run(loop)
    kept, moved = told.sequences.values()
    loop.scheduler.reservations.decode_here(kept)
    loop.scheduler.reservations.release_to_decoder(moved)
    steps = run(loop)
    assert {o.request_id for step in steps for o in step.outputs} == {"a"}
    assert kept.output == tokens_after(kept, 6)
    assert len(moved.output) == 1
    assert told.computed_at == [6, 6], "a request that is decoded here does not leave again"
    assert loop.num_requests == loop.scheduler.pool.num_used == 0


def test_a_cancelled_held_request_is_reported_though_nothing_else_is_to_do() -> None:
    loop, told, _ = loop_of()
    loop.add(request("a"))
    run(loop)
    assert loop.scheduler.cancel("a", 0)
    (step,) = run(loop)
    assert [(o.request_id, o.token_ids, o.finish_reason) for o in step.outputs] == [("a", (), "cancelled")]
    loop.scheduler.reservations.release(told.sequences.values())
    assert loop.scheduler.pool.num_used == 0
