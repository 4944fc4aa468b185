"""The engine loop and its thread."""

import threading
import time

import pytest

from services.worker.core.scheduler import SchedulerConfig
from services.worker.core.sequence import Sequence
from services.worker.engine.loop import EngineLoop
from services.worker.engine.mock import MockEngine, MockTiming, next_token
from services.worker.engine.thread import EngineThread
from shared.errors import Overloaded, PeerLost, Unavailable
from shared.messages.generation import SamplingParams

NUM_BLOCKS, BLOCK_SIZE = 16, 4


class FailingEngine(MockEngine):
    """A mock that raises ``failure`` once it is set."""

    failure: Exception | None = None

    def run_layers(self, activation, first, last):
        if self.failure is not None:
            raise self.failure
        super().run_layers(activation, first, last)


def make_loop(engine=None, clock=lambda: 0.0, **changes):
    engine = engine or FailingEngine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, verify=True)
    return EngineLoop(engine, SchedulerConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **changes), clock)


def request(name, prompt=(1, 2, 3, 4, 5), max_tokens=6, output=(), **params):
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, **params)
    return Sequence(request_id=name, attempt=0, gateway_id="g", prompt=prompt, params=sampling, output=output)


def expected(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def run_all(loop):
    tokens, endings = {}, {}
    while loop.has_work:
        for out in loop.step().outputs:
            assert out.request_id not in endings
            assert out.offset == len(tokens.setdefault(out.request_id, []))
            tokens[out.request_id] += out.token_ids
            if out.finish_reason:
                endings[out.request_id] = out
    return tokens, endings


@pytest.mark.parametrize(
    "changes", [{}, {"prefill_chunk_tokens": 2}, {"max_batch_tokens": 3}, {"max_num_sequences": 1}]
)
def test_tokens_are_the_same_however_the_pool_and_the_budget_force_the_batches(changes):
    loop = make_loop(**changes)
    prompts = {f"r{i}": tuple(range(i, i + 9 + i)) for i in range(5)}
    for name, prompt in prompts.items():
        loop.add(request(name, prompt, 14))
    tokens, endings = run_all(loop)
    assert tokens == {name: expected(prompt, 14) for name, prompt in prompts.items()}
    assert {e.finish_reason for e in endings.values()} == {"length"}
    assert loop.stats().load.blocks_used == 0
    assert loop.stats().failed_steps_total == 0


def test_a_continuation_gives_the_tokens_that_were_missing():
    whole = expected((1, 2, 3), 8)
    loop = make_loop()
    loop.add(request("r", (1, 2, 3), 8, output=whole[:5]))
    outputs = [o for _ in range(3) for o in loop.step().outputs]
    assert [(o.offset, *o.token_ids) for o in outputs] == [(5, whole[5]), (6, whole[6]), (7, whole[7])]
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize(("failure", "code"), [(RuntimeError("cuda"), "internal"), (PeerLost("gone"), "peer_lost")])
def test_an_engine_failure_ends_its_batch_with_a_typed_error_and_the_loop_lives(failure, code):
    engine = FailingEngine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    loop = make_loop(engine, max_num_sequences=1)
    loop.add(request("a"))
    loop.add(request("b"))
    engine.failure = failure
    step = loop.step()
    assert [(o.request_id, o.finish_reason, o.error.code) for o in step.outputs] == [("a", "error", code)]
    assert step.error.code == code
    assert loop.stats().load.blocks_used == 0
    engine.failure = None
    tokens, _ = run_all(loop)
    assert tokens == {"b": expected((1, 2, 3, 4, 5), 6)}


def test_a_cancel_is_reported_once_and_frees_the_blocks():
    loop = make_loop()
    loop.add(request("a"))
    loop.step()
    assert loop.cancel("a", 0)
    assert loop.stats().load.blocks_used == 0
    step = loop.step()
    assert [(o.offset, o.token_ids, o.finish_reason) for o in step.outputs] == [(1, (), "cancelled")]
    assert loop.step() is None
    assert not loop.cancel("a", 0)


def test_busy_time_counts_steps_only():
    now = iter(range(100))
    loop = make_loop(clock=lambda: float(next(now)))
    loop.add(request("a", max_tokens=2))
    run_all(loop)
    assert loop.stats().busy_s_total == 2.0
    assert loop.stats().steps_total == 2


def test_a_scheduler_that_counts_on_more_blocks_than_the_engine_has_is_refused():
    with pytest.raises(ValueError, match="the engine has 2 of 4"):
        make_loop(MockEngine(num_blocks=2, block_size=4))


class Collector:
    """Takes a thread's outputs; ``wait`` blocks until so many requests have ended."""

    def __init__(self):
        self.tokens, self.endings = {}, {}
        self._changed = threading.Condition()

    def __call__(self, step):
        with self._changed:
            for out in step.outputs:
                assert out.request_id not in self.endings
                self.tokens.setdefault(out.request_id, []).extend(out.token_ids)
                if out.finish_reason:
                    self.endings[out.request_id] = out
            self._changed.notify_all()

    def wait(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.endings) >= count, timeout=10)


@pytest.fixture
def running():
    threads = []

    def start(loop=None, on_output=None):
        collector = Collector()
        thread = EngineThread(loop or make_loop(clock=time.monotonic), on_output or collector)
        thread.start()
        threads.append(thread)
        return thread, collector

    yield start
    for thread in threads:
        thread.stop()
        assert thread.join(10)


SLOW = MockTiming(layer_base_s=0.002)


def slow_loop():
    engine = MockEngine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, timing=SLOW)
    return make_loop(engine, clock=time.monotonic, max_queued_requests=1, max_num_sequences=1)


def test_the_thread_runs_requests_from_several_threads(running):
    thread, collector = running()

    def submit(start):
        for i in range(start, start + 5):
            thread.submit(request(f"r{i}", (i, i + 1))).result(10)

    submitters = [threading.Thread(target=submit, args=(n,)) for n in (0, 5, 10)]
    for t in submitters:
        t.start()
    collector.wait(15)
    for t in submitters:
        t.join()
    assert collector.tokens == {f"r{i}": expected((i, i + 1), 6) for i in range(15)}


def test_a_refusal_reaches_the_submitter(running):
    thread, _ = running(slow_loop())
    thread.pause().result(10)
    thread.submit(request("a")).result(10)
    with pytest.raises(Overloaded):
        thread.submit(request("b")).result(10)


def test_a_cancel_frees_blocks_before_its_future_is_done(running):
    thread, collector = running(slow_loop())
    thread.submit(request("a", max_tokens=50)).result(10)
    while thread.stats().load.blocks_used == 0:
        time.sleep(0.001)
    assert thread.cancel("a", 0).result(10)
    assert thread.call(lambda loop: loop.stats().load.blocks_used).result(10) == 0
    collector.wait(1)
    assert collector.endings["a"].finish_reason == "cancelled"


def test_a_paused_thread_takes_requests_and_runs_no_step(running):
    thread, collector = running()
    thread.pause().result(10)
    thread.submit(request("a")).result(10)
    steps = thread.call(lambda loop: loop.stats().steps_total)
    assert steps.result(10) == 0
    thread.resume().result(10)
    collector.wait(1)


def test_stop_ends_what_is_left_with_an_error_and_refuses_what_comes_later(running):
    thread, collector = running(slow_loop())
    thread.submit(request("a", max_tokens=50)).result(10)
    thread.stop()
    assert thread.join(10)
    assert collector.endings["a"].error.code == "unavailable"
    with pytest.raises(Unavailable):
        thread.submit(request("b")).result(10)
    assert thread.stats().load.blocks_used == 0


def test_a_consumer_that_raises_does_not_stop_the_thread(running):
    collector = Collector()

    def consumer(step):
        collector(step)
        raise ValueError("consumer")

    thread, _ = running(on_output=consumer)
    thread.submit(request("a")).result(10)
    collector.wait(1)
    assert thread.alive


def test_a_broken_loop_ends_its_requests_and_tells_its_owner():
    loop, collector, failures = make_loop(), Collector(), []
    loop.scheduler.schedule = lambda now_s: 1 / 0
    thread = EngineThread(loop, collector, failures.append)
    thread.start()
    thread.submit(request("a"))
    assert thread.join(10)
    assert collector.endings["a"].error.code == "internal"
    assert [f.code for f in failures] == ["internal"]
