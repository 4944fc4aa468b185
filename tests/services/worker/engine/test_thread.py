"""The thread that an engine loop runs on."""

import threading
import time

import pytest

from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.device.completion import Landed, Pending
from services.worker.engine.loop import EngineLoop
from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.mock.settings import MockTiming
from services.worker.engine.thread import After, EngineThread
from shared.errors import Overloaded, Unavailable
from tests.services.worker.engine.loops import BLOCK_SIZE, NUM_BLOCKS, Partial, expected, make_loop, request
from tests.services.worker.pausing import pause, resume
from tests.wait_until import eventually_sync


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
            assert self._changed.wait_for(lambda: len(self.endings) >= count, timeout=60)


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
        assert thread.join(60)


SLOW = MockTiming(layer_base_s=0.002)


def slow_loop():
    engine = MockEngine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, timing=SLOW)
    return make_loop(engine, clock=time.monotonic, max_queued_requests=1, max_num_sequences=1)


def test_the_thread_runs_requests_from_several_threads(running):
    thread, collector = running()

    def submit(start):
        for i in range(start, start + 5):
            thread.submit(request(f"r{i}", (i, i + 1))).result(60)

    submitters = [threading.Thread(target=submit, args=(n,)) for n in (0, 5, 10)]
    for t in submitters:
        t.start()
    collector.wait(15)
    for t in submitters:
        t.join()
    assert collector.tokens == {f"r{i}": expected((i, i + 1), 6) for i in range(15)}


class Prepared(MockEngine):
    """Notes which blocks were prepared, and that no step's thread did it."""

    def __init__(self):
        super().__init__(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.ranges, self.threads, self.changed = [], set(), threading.Condition()

    def prepare(self, first, last):
        with self.changed:
            self.ranges.append((first, last))
            self.threads.add(threading.current_thread())
            self.changed.notify_all()

    def wait(self, last):
        with self.changed:
            assert self.changed.wait_for(lambda: self.ranges and self.ranges[-1][1] == last, timeout=60)


def test_blocks_are_prepared_before_the_thread_starts_and_before_they_are_used(running):
    engine = Prepared()
    loop = make_loop(engine, clock=time.monotonic, prepared_blocks=2)
    thread = EngineThread(loop, Collector())
    thread.prepare()
    engine.wait(2)
    assert thread.join(60)
    assert engine.ranges == [(0, 2)]

    thread, collector = running(loop)
    thread.submit(request("r", tuple(range(NUM_BLOCKS * BLOCK_SIZE // 2)))).result(60)
    collector.wait(1)
    engine.wait(NUM_BLOCKS)
    firsts, lasts = zip(*engine.ranges[1:], strict=True)
    assert (firsts[0], lasts[-1]) == (0, NUM_BLOCKS)
    assert firsts[1:] == lasts[:-1]
    assert len(engine.threads) == 2
    assert threading.main_thread() not in engine.threads


class Rehearsing(MockEngine):
    """Has so many things to rehearse, each done when the test says so."""

    rehearses = True

    def __init__(self, num_left, error=None):
        super().__init__(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.num_left, self.error = num_left, error
        self.begun: list[Pending] = []
        self.threads = set()

    def rehearse(self):
        if not self.num_left:
            return None
        self.num_left -= 1
        self.threads.add(threading.current_thread().name)
        self.begun.append(Pending())
        return self.begun[-1]


def test_an_engine_rehearses_before_its_instance_serves_one_thing_at_a_time(running):
    engine = Rehearsing(3)
    loop = make_loop(engine, clock=time.monotonic)
    collector = Collector()
    thread = EngineThread(loop, collector, name="rehearsing")
    thread.prepare()
    for number in range(3):
        eventually_sync(lambda number=number: len(engine.begun) > number)
        time.sleep(0.02)
        assert len(engine.begun) == number + 1
        engine.begun[number].settle(Landed())
    thread.start()
    thread.submit(request("r")).result(60)
    collector.wait(1)
    assert engine.threads == {"rehearsing"}
    assert len(engine.begun) == 3
    thread.stop()
    assert thread.join(60)


def test_requests_do_not_wait_for_what_is_rehearsed_and_what_fails_is_said(running, caplog):
    engine = Rehearsing(2)
    thread, collector = running(make_loop(engine, clock=time.monotonic))
    eventually_sync(lambda: engine.begun)
    thread.submit(request("r")).result(60)
    collector.wait(1)
    assert len(engine.begun) == 1
    engine.begun[0].settle(Landed(error=RuntimeError("no memory for a graph")))
    eventually_sync(lambda: len(engine.begun) == 2)
    assert "no memory for a graph" in caplog.text
    engine.begun[1].settle(Landed())


def test_a_stopped_thread_rehearses_no_more(running):
    engine = Rehearsing(5)
    thread, _ = running(make_loop(engine, clock=time.monotonic))
    eventually_sync(lambda: engine.begun)
    thread.stop()
    assert not thread.join(0.1)  # what it computes for nobody is computed into memory that others have next
    engine.begun[0].settle(Landed())
    assert thread.join(60)
    assert len(engine.begun) == 1


def test_a_refusal_reaches_the_submitter(running):
    thread, _ = running(slow_loop())
    pause(thread).result(60)
    thread.submit(request("a")).result(60)
    with pytest.raises(Overloaded):
        thread.submit(request("b")).result(60)


def test_a_cancel_frees_blocks_before_its_future_is_done(running):
    thread, collector = running(slow_loop())
    pause(thread).result(60)  # it runs until it is cancelled
    thread.submit(request("a", max_tokens=50)).result(60)
    thread.call(EngineLoop.step).result(60)
    assert thread.call(lambda loop: loop.stats().load.kv_blocks_used).result(60) > 0
    assert thread.cancel("a", 0).result(60)
    assert thread.call(lambda loop: loop.stats().load.kv_blocks_used).result(60) == 0
    resume(thread).result(60)
    collector.wait(1)
    assert collector.endings["a"].finish_reason == "cancelled"


def test_stop_ends_what_is_left_with_an_error_and_refuses_what_comes_later(running):
    thread, collector = running(slow_loop())
    pause(thread).result(60)
    thread.submit(request("a", max_tokens=50)).result(60)
    thread.stop()
    assert thread.join(60)
    assert collector.endings["a"].error.code == "unavailable"
    with pytest.raises(Unavailable):
        thread.submit(request("b")).result(60)
    assert thread.stats().load.kv_blocks_used == 0


def test_a_consumer_that_raises_does_not_stop_the_thread(running):
    collector = Collector()

    def consumer(step):
        collector(step)
        raise ValueError("consumer")

    thread, _ = running(on_output=consumer)
    thread.submit(request("a")).result(60)
    collector.wait(1)
    assert not thread.join(0)


def test_a_broken_loop_ends_its_requests_and_tells_its_owner():
    loop, collector, failures = make_loop(), Collector(), []
    loop.scheduler.schedule = lambda now_s: 1 / 0
    thread = EngineThread(loop, collector, failures.append)
    thread.start()
    thread.submit(request("a"))
    assert thread.join(60)
    assert collector.endings["a"].error.code == "engine_broken"
    assert [f.code for f in failures] == ["engine_broken"]


class HeldEngine(MockEngine):
    """A mock whose layers wait for the test."""

    def __init__(self):
        super().__init__(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.layers_begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def run_layers(self, activation, first, last):
        self.layers_begun.release()
        assert self.go_on.acquire(timeout=60)
        return super().run_layers(activation, first, last)

    def let_all_go(self):
        self.go_on.release(10_000)


@pytest.fixture
def held(running):
    """A thread inside the first layer of a prompt."""
    engine = HeldEngine()
    thread, collector = running(make_loop(engine, clock=time.monotonic))
    thread.submit(request("a")).result(60)
    assert engine.layers_begun.acquire(timeout=60)
    yield thread, engine, collector
    engine.let_all_go()


def test_commands_for_between_layers_do_not_wait_for_the_steps_end(held):
    thread, engine, collector = held
    ran = []
    steps = [thread.call(lambda _: ran.append("step"), after=After.ALL)]
    layers = [thread.call(lambda _, i=i: ran.append(i)) for i in range(3)]
    submitted = thread.submit(request("b"))
    engine.go_on.release()
    assert engine.layers_begun.acquire(timeout=60), "the second layer of the same step"
    for future in [*layers, submitted]:
        assert future.done()
    assert ran == [0, 1, 2]
    assert not steps[0].done()
    engine.let_all_go()
    steps[0].result(60)
    assert ran == [0, 1, 2, "step"]
    collector.wait(2)
    assert collector.tokens == {name: expected((1, 2, 3, 4, 5), 6) for name in "ab"}


def test_what_comes_between_layers_is_seen_in_the_load_before_the_step_ends(held):
    thread, engine, _ = held
    before = thread.stats().load
    thread.submit(request("b"))
    engine.go_on.release()
    assert engine.layers_begun.acquire(timeout=60), "the second layer of the same step"
    after = thread.stats().load
    assert (before.queued_tokens, after.queued_tokens) == (5, 10)


def test_the_load_is_not_counted_for_each_landing_between_layers(held):
    thread, engine, _ = held
    before = thread.stats()
    thread.loop.wake()
    engine.go_on.release()
    assert engine.layers_begun.acquire(timeout=60), "the second layer of the same step"
    assert thread.stats() is before


def test_a_refusal_between_layers_reaches_the_caller_and_hurts_nobody(held):
    thread, engine, collector = held
    failing = thread.call(lambda _: 1 / 0)
    engine.let_all_go()
    with pytest.raises(ZeroDivisionError):
        failing.result(60)
    collector.wait(1)
    assert collector.endings["a"].finish_reason == "length"


def test_a_command_that_was_taken_back_is_not_run(held):
    thread, engine, collector = held
    ran = []
    assert thread.call(lambda _: ran.append(1)).cancel()
    engine.let_all_go()
    collector.wait(1)
    assert ran == []


def test_commands_for_between_layers_run_though_nothing_steps(running):
    thread, _ = running()
    assert thread.call(lambda loop: loop.num_requests).result(60) == 0
    pause(thread).result(60)
    assert thread.call(lambda loop: loop.num_requests).result(60) == 0


def test_commands_given_while_it_stops_are_all_answered(held):
    thread, engine, _collector = held
    futures = [thread.call(lambda _: None, after=After.ALL if i % 2 else After.NOTHING) for i in range(4)]
    thread.stop()
    late = [thread.call(lambda _: None, after=After.ALL if i % 2 else After.NOTHING) for i in range(4)]
    engine.let_all_go()
    assert thread.join(60)
    for future in futures:
        assert future.exception(0) is None
    for future in late:
        assert future.exception(0) is None or isinstance(future.exception(0), Unavailable)
    with pytest.raises(Unavailable):
        thread.call(lambda _: None).result(0)


def test_a_thread_with_partial_work_that_is_not_ready_sleeps(running):
    loop = make_loop(clock=time.monotonic)
    partial = Partial().attach(loop)
    asked, ready = [], type(partial).ready
    steps = []
    loop.step = lambda step=loop.step: steps.append(1) or step()
    thread, _ = running(loop)
    for _ in range(3):
        thread.call(lambda _: asked.append(ready.fget(partial))).result(60)
    assert steps == []
    thread.call(lambda _: setattr(partial, "layers", 2)).result(60)
    eventually_sync(lambda: not partial.layers)
    thread.call(lambda _: None).result(60)
    assert len(steps) == 2


def test_requests_from_many_threads_come_in_between_layers(running):
    engine = MockEngine(num_blocks=256, block_size=BLOCK_SIZE, timing=MockTiming(layer_base_s=0.0005))
    loop = EngineLoop(engine, SchedulerConfig(num_blocks=256, block_size=BLOCK_SIZE), time.monotonic)
    thread, collector = running(loop)

    def submit(start):
        for i in range(start, start + 20):
            thread.submit(request(f"r{i}", (i, i + 1))).result(60)
            thread.call(lambda loop: loop.scheduler.load()).result(60)

    submitters = [threading.Thread(target=submit, args=(n,)) for n in (0, 20, 40)]
    for t in submitters:
        t.start()
    for t in submitters:
        t.join()
    collector.wait(60)
    assert collector.tokens == {f"r{i}": expected((i, i + 1), 6) for i in range(60)}
