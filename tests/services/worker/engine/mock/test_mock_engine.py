"""The mock engine: honest KV, deterministic tokens, a timing model."""

import msgspec
import pytest

from services.worker.engine.forward_batch import SamplingRow
from services.worker.engine.mock import mock_engine as engine_module
from services.worker.engine.mock import sleep as sleeping
from services.worker.engine.mock.kv import hash_tokens
from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.mock.settings import MockTiming
from services.worker.engine.mock.sleep import PreciseSleep
from services.worker.engine.mock.tokens import next_token
from shared.errors import BadRequest
from shared.messages.generation import SamplingParams
from tests.records import profile
from tests.services.worker.engine.batches import forward, slice_of


def sampling(output=(), eos=(256,), **params):
    sampling_params = SamplingParams(**{"max_tokens": 9, "seed": 1, **params})
    ends = () if sampling_params.ignore_eos else eos
    return SamplingRow(sampling_params, len(output), ends, len(output) < sampling_params.min_tokens)


def run(engine, *slices, rows=None):
    rows = iter(rows or [sampling() for s in slices if s.row is not None])
    slices = [msgspec.structs.replace(s, row=s.row and next(rows)) for s in slices]
    activation = engine.embed(forward(*slices))
    engine.run_layers(activation, 0, engine.num_layers).result()
    return engine.sample(activation).result()


def test_the_token_is_that_of_the_whole_prefix_however_it_is_chunked():
    engine = MockEngine(num_blocks=8, block_size=2, verify=True)
    prompt, table = [5, 6, 7, 8, 9], [6, 1, 4]
    run(engine, slice_of(0, prompt[:3], 0, table, False))
    (token,) = run(engine, slice_of(0, prompt[3:], 3, table, True))
    assert token.token_id == next_token(prompt)
    (again,) = run(engine, slice_of(0, [token.token_id], 5, table, True))
    assert again.token_id == next_token([*prompt, token.token_id])
    assert 32 <= again.token_id <= 126


def test_a_wrong_block_table_is_caught():
    engine = MockEngine(num_blocks=8, block_size=2)
    run(engine, slice_of(0, [1, 2, 3], 0, [0, 1], False))
    with pytest.raises(RuntimeError, match="no KV at position 2"):
        run(engine, slice_of(0, [4], 3, [0, 5], True))
    with pytest.raises(RuntimeError, match="do not hold"):
        run(engine, slice_of(0, [4, 5], 3, [0, 1], True))


def test_kv_overwritten_by_another_sequence_is_caught_when_verifying():
    engine = MockEngine(num_blocks=8, block_size=2, verify=True)
    run(engine, slice_of(0, [1, 2, 3], 0, [0, 1], False))
    run(engine, slice_of(1, [8, 9], 0, [0], False))
    with pytest.raises(RuntimeError, match="overwritten"):
        run(engine, slice_of(0, [4], 3, [0, 1], True))


def test_layers_must_run_in_order_and_to_the_end():
    engine = MockEngine(num_layers=4)
    activation = engine.embed(forward(slice_of(0, [1], 0, [0], True)))
    engine.run_layers(activation, 0, 2).result()
    with pytest.raises(BadRequest, match="next layer is 2"):
        engine.run_layers(activation, 3, 4).result()
    with pytest.raises(ValueError, match="head after 2"):
        engine.head(activation)
    engine.run_layers(activation, 2, 4).result()
    assert engine.head(activation) == [hash_tokens([1])]


def test_time_is_proportional_to_layers_and_tokens():
    slept = []
    timing = MockTiming(step_overhead_s=1.0, layer_base_s=0.1, layer_per_token_s=0.01, head_s=2.0)
    engine = MockEngine(num_layers=4, timing=timing, sleep=slept.append)
    run(engine, slice_of(0, [1, 2, 3], 0, [0], True))
    assert slept == pytest.approx([1.0, 4 * 0.13, 2.0])


def test_eos_comes_only_when_asked_and_allowed():
    engine = MockEngine(eos_every=1)
    piece = slice_of(0, [1], 0, [0], True)
    assert run(engine, piece)[0].token_id == 256
    assert run(engine, piece, rows=[sampling(min_tokens=1)])[0].token_id == next_token([1])
    assert run(engine, piece, rows=[sampling(ignore_eos=True)])[0].token_id == next_token([1])
    assert run(MockEngine(), piece)[0].token_id == next_token([1])


def test_stop_tokens_are_not_drawn_before_min_tokens():
    stop = next_token([1])
    piece = slice_of(0, [1], 0, [0], True)
    early = sampling(stop_token_ids=(stop,), min_tokens=1)
    assert run(MockEngine(), piece, rows=[early])[0].token_id != stop
    assert run(MockEngine(), piece, rows=[sampling(stop_token_ids=(stop,))])[0].token_id == stop


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_well_formed(count):
    (token,) = run(MockEngine(), slice_of(0, [1], 0, [0], True), rows=[sampling(logprobs=count)])
    top = token.logprobs.top
    assert len(top) == count == len({t for t, _ in top})
    assert [v for _, v in top] == sorted((v for _, v in top), reverse=True)
    assert all(v < 0 for _, v in top)
    assert count == 0 or top[0] == (token.token_id, token.logprobs.logprob)


class LateClock:
    """Stands in for ``time`` and ``select``: every wait ends ``late_s`` late, reading the time takes a microsecond."""

    def __init__(self, late_s):
        self.late_s = late_s
        self.now = 0.0

    def perf_counter(self):
        self.now += 1e-6
        return self.now

    def select(self, _reading, _writing, _failing, seconds):
        self.now += seconds + self.late_s


@pytest.mark.parametrize("late_s", [0.0, 60e-6, 300e-6])
def test_many_short_sleeps_take_as_long_as_one_of_their_sum(late_s, monkeypatch):
    clock = LateClock(late_s)
    monkeypatch.setattr(sleeping, "time", clock)
    monkeypatch.setattr(sleeping, "select", clock)
    sleep = PreciseSleep()
    for _ in range(50):
        sleep(1e-3)
    assert 0.05 - 1e-5 <= clock.now <= 0.05 + late_s + 5e-4


def test_a_stall_of_the_machine_is_not_made_up_for(monkeypatch):
    clock = LateClock(2.0)
    monkeypatch.setattr(sleeping, "time", clock)
    monkeypatch.setattr(sleeping, "select", clock)
    sleep = PreciseSleep()
    sleep(1.0)
    clock.late_s = 0.0
    sleep(1.0)
    assert clock.now == pytest.approx(4.0, abs=2e-3)


@pytest.mark.parametrize(("lag_s", "makes_up"), [(2e-3, True), (20e-3, False)])
def test_layers_of_a_batch_wait_for_no_host_that_is_a_little_late(lag_s, makes_up, monkeypatch):
    clock = LateClock(0.0)
    monkeypatch.setattr(sleeping, "time", clock)
    monkeypatch.setattr(sleeping, "select", clock)
    monkeypatch.setattr(engine_module, "time", clock)
    engine = MockEngine(num_layers=4, timing=MockTiming(layer_base_s=10e-3))
    activation = engine.embed(forward(slice_of(0, [1, 2, 3], 0, [0, 1], True)))
    for layer in range(4):
        engine.run_layers(activation, layer, layer + 1).result()
        clock.now += lag_s
    late_s = 0.0 if makes_up else 3 * lag_s
    assert clock.now - lag_s == pytest.approx(0.04 + late_s, abs=1e-4)


def test_parts_of_two_batches_in_turns_take_as_long_as_both(monkeypatch):
    clock = LateClock(0.0)
    monkeypatch.setattr(sleeping, "time", clock)
    monkeypatch.setattr(sleeping, "select", clock)
    monkeypatch.setattr(engine_module, "time", clock)
    engine = MockEngine(num_layers=4, timing=MockTiming(layer_base_s=3e-3))
    slices = [slice_of(n, [1, 2, 3], 0, [2 * n, 2 * n + 1], True) for n in range(2)]
    activations = [engine.embed(forward(piece)) for piece in slices]
    for layer in range(4):
        for activation in activations:
            engine.run_part(activation, layer, 0, 3).result()
    assert clock.now == pytest.approx(8 * 3e-3, abs=1e-4)


def test_a_part_that_waited_for_its_weights_takes_its_whole_time(monkeypatch):
    clock = LateClock(0.0)
    monkeypatch.setattr(sleeping, "time", clock)
    monkeypatch.setattr(sleeping, "select", clock)
    monkeypatch.setattr(engine_module, "time", clock)
    engine = MockEngine(num_layers=4, timing=MockTiming(layer_base_s=3e-3))
    activation = engine.embed(forward(slice_of(0, [1, 2, 3], 0, [0, 1], True)))
    for layer in range(4):
        clock.now += 4e-3
        engine.run_part(activation, layer, 0, 3).result()
    assert clock.now == pytest.approx(4 * (4e-3 + 3e-3), abs=1e-4)


def test_a_profiled_instances_steps_take_as_long_as_they_did():
    slept = []
    played = profile()
    engine = MockEngine(num_layers=4, profile=played, sleep=slept.append)
    run(engine, slice_of(0, list(range(20)), 0, [0, 1], True))
    assert sum(slept) == pytest.approx(played.step_s(20, 20 * 21 // 2, 0, 0))
    slept.clear()
    # A decode beside the next prompt: the weights are read once.
    prompt, decode = slice_of(1, list(range(16)), 0, [2], True), slice_of(0, [1], 20, [0, 1], True)
    run(engine, decode, prompt)
    assert sum(slept) == pytest.approx(played.step_s(16, 16 * 17 // 2, 1, 21))


def test_times_that_the_mock_was_told_go_before_a_profile():
    slept = []
    engine = MockEngine(num_layers=4, profile=profile(), timing=MockTiming(layer_base_s=0.1), sleep=slept.append)
    run(engine, slice_of(0, [1, 2, 3], 0, [0], True))
    assert sum(slept) == pytest.approx(0.4)
