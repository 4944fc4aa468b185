"""The engine loop and its thread."""

import threading
import time

import pytest

from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.engine.mock.engine import MockEngine
from services.worker.engine.mock.settings import MockTiming
from services.worker.engine.mock.tokens import next_token
from services.worker.engine.thread import EngineThread
from services.worker.scheduling.scheduler import SchedulerConfig
from services.worker.scheduling.sequence import Sequence
from shared.errors import Overloaded, Unavailable
from shared.messages.generation import SamplingParams
from tests.services.worker.pausing import pause

NUM_BLOCKS, BLOCK_SIZE = 16, 4


class CountingEngine(MockEngine):
    """Each step embeds one batch."""

    num_steps = 0

    def embed(self, batch):
        self.num_steps += 1
        return super().embed(batch)


def make_loop(engine=None, clock=lambda: 0.0, **changes):
    engine = engine or CountingEngine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, verify=True)
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


def test_a_continuation_gives_the_tokens_that_were_missing():
    whole = expected((1, 2, 3), 8)
    loop = make_loop()
    loop.add(request("r", (1, 2, 3), 8, output=whole[:5]))
    outputs = [o for _ in range(3) for o in loop.step().outputs]
    assert [(o.offset, *o.token_ids) for o in outputs] == [(5, whole[5]), (6, whole[6]), (7, whole[7])]
    assert outputs[-1].finish_reason == "length"


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


def test_a_scheduler_that_counts_on_more_blocks_than_the_engine_has_is_refused():
    with pytest.raises(ValueError, match="the engine has 2 of 4"):
        make_loop(MockEngine(num_blocks=2, block_size=4))


class Partial:
    """Partial work that runs layers which the test puts there."""

    num_requests = 0
    queued = (0, 0)
    decode_interval_s = 1e9

    def __init__(self, layers=0):
        self.layers, self.num_ran, self.num_own_layers, self.told = layers, 0, 0, []
        self.on_step = lambda: None

    @property
    def ready(self):
        return self.layers > 0

    def step(self):
        if not self.layers:
            return None
        self.layers -= 1
        self.num_ran += 1
        self.on_step()
        return StepOutput(())

    def ran_layer(self):
        self.num_own_layers += 1

    def stepped(self, output):
        self.told.append(output)


def decoding_loop(partial, clock):
    """A loop with one request that decodes."""
    loop = make_loop(clock=clock)
    loop.add(request("a", max_tokens=20))
    loop.step()
    loop.partial = partial
    return loop


def test_partial_work_comes_before_batches_while_it_is_ready():
    partial = Partial(3)
    loop = decoding_loop(partial, lambda: 0.0)
    steps = loop.engine.num_steps
    for left in (2, 1, 0):
        loop.step()
        assert (partial.layers, loop.engine.num_steps) == (left, steps)
    loop.step()
    assert loop.engine.num_steps == steps + 1
    assert len(partial.told) == 4, "told of every step"


@pytest.mark.parametrize("interval_s", [0.0, 1.0, 2.5, 7.0])
def test_decode_steps_come_at_least_every_interval(interval_s):
    now_s = [0.0]
    partial = Partial(30)
    partial.decode_interval_s = interval_s
    partial.on_step = lambda: now_s.__setitem__(0, now_s[0] + 1.0)
    loop = decoding_loop(partial, lambda: now_s[0])
    last_s, longest_s = now_s[0], 0.0
    while partial.layers:
        steps = loop.engine.num_steps
        loop.step()
        if loop.engine.num_steps > steps:
            longest_s, last_s = max(longest_s, now_s[0] - last_s), now_s[0]
            if loop.stats().load.running_requests == 0:
                loop.add(request(f"a{now_s[0]}", max_tokens=20))
                loop.step()
    assert longest_s <= interval_s + 1.0, "an interval, and the layer that was being run"
    assert partial.num_ran == 30
    if interval_s:
        assert longest_s >= interval_s


def test_without_decodes_no_step_is_due():
    partial = Partial(3)
    partial.decode_interval_s = 0.0
    loop = make_loop()
    loop.partial = partial
    loop.add(request("waits"))
    for _ in range(3):
        loop.step()
    assert partial.layers == loop.engine.num_steps == 0
    loop.step()
    assert loop.engine.num_steps == 1


def test_partial_work_that_is_not_ready_is_no_work():
    loop = make_loop()
    loop.partial = partial = Partial(0)
    assert not loop.has_work
    assert loop.step() is None
    assert partial.told == []
    partial.layers = 1
    assert loop.has_work
    loop.partial = None
    assert not loop.has_work


def test_partial_work_that_had_nothing_lets_the_batch_run():
    loop = decoding_loop(partial := Partial(1), lambda: 0.0)
    partial.step = lambda: None
    steps = loop.engine.num_steps
    loop.step()
    assert loop.engine.num_steps == steps + 1


def test_its_requests_count_as_the_loops():
    loop = decoding_loop(partial := Partial(), lambda: 0.0)
    partial.num_requests = 3
    assert loop.num_requests == 4
    assert loop.scheduler.num_requests == 1


def test_layers_of_prompts_are_told_and_those_of_decodes_are_not():
    loop = make_loop(prefill_chunk_tokens=3)
    loop.partial = partial = Partial()
    between = []
    loop.between_layers = lambda: between.append(partial.num_own_layers)
    loop.add(request("a", (1, 2, 3, 4, 5)))
    run_all(loop)
    num_layers = loop.engine.num_layers
    assert partial.num_own_layers == 2 * num_layers, "two chunks"
    assert between == list(range(1, 2 * num_layers + 1))


def test_what_a_partial_step_took_counts_as_busy():
    loop = make_loop()
    loop.busy(1.5)
    assert loop.stats().busy_s_total == 1.5


def test_the_prefills_speed_follows_what_was_measured():
    loop = make_loop()
    assert loop.prefill_token_s == 0
    loop.measured_prefill(10, 1.0)
    assert loop.prefill_token_s == pytest.approx(0.1)
    for _ in range(50):
        loop.measured_prefill(10, 2.0)
    assert loop.prefill_token_s == pytest.approx(0.2)


def test_requests_are_added_lent_and_reserved_between_two_layers():
    loop = make_loop(max_num_sequences=4)
    loop.add(request("a"))
    scheduler, found = loop.scheduler, []

    def between():
        if found:
            return
        loop.add(request("b"))
        scheduler.lending = True
        found.extend(scheduler.lend())
        assert scheduler.reservations.reserve(found)

    loop.between_layers = between
    outputs = list(loop.step().outputs)
    assert [s.request_id for s in found] == ["b"]
    scheduler.reservations.release(found)
    scheduler.lending = False
    scheduler.take_back(found)
    while loop.has_work:
        outputs += loop.step().outputs
    for name in "ab":
        tokens = [token for o in outputs if o.request_id == name for token in o.token_ids]
        assert tokens == expected((1, 2, 3, 4, 5), 6)


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
    pause(thread).result(10)
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
    assert not thread.join(0)


def test_a_broken_loop_ends_its_requests_and_tells_its_owner():
    loop, collector, failures = make_loop(), Collector(), []
    loop.scheduler.schedule = lambda now_s: 1 / 0
    thread = EngineThread(loop, collector, failures.append)
    thread.start()
    thread.submit(request("a"))
    assert thread.join(10)
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
        assert self.go_on.acquire(timeout=10)
        super().run_layers(activation, first, last)

    def let_all_go(self):
        self.go_on.release(10_000)


@pytest.fixture
def held(running):
    """A thread inside the first layer of a prompt."""
    engine = HeldEngine()
    thread, collector = running(make_loop(engine, clock=time.monotonic))
    thread.submit(request("a")).result(10)
    assert engine.layers_begun.acquire(timeout=10)
    yield thread, engine, collector
    engine.let_all_go()


def test_commands_for_between_layers_do_not_wait_for_the_steps_end(held):
    thread, engine, collector = held
    ran = []
    steps = [thread.call(lambda _: ran.append("step"))]
    layers = [thread.call(lambda _, i=i: ran.append(i), between_layers=True) for i in range(3)]
    submitted = thread.submit(request("b"))
    engine.go_on.release()
    assert engine.layers_begun.acquire(timeout=10), "the second layer of the same step"
    for future in [*layers, submitted]:
        assert future.done()
    assert ran == [0, 1, 2]
    assert not steps[0].done()
    engine.let_all_go()
    steps[0].result(10)
    assert ran == [0, 1, 2, "step"]
    collector.wait(2)
    assert collector.tokens == {name: expected((1, 2, 3, 4, 5), 6) for name in "ab"}


def test_a_refusal_between_layers_reaches_the_caller_and_hurts_nobody(held):
    thread, engine, collector = held
    failing = thread.call(lambda _: 1 / 0, between_layers=True)
    engine.let_all_go()
    with pytest.raises(ZeroDivisionError):
        failing.result(10)
    collector.wait(1)
    assert collector.endings["a"].finish_reason == "length"


def test_a_command_that_was_taken_back_is_not_run(held):
    thread, engine, collector = held
    ran = []
    assert thread.call(lambda _: ran.append(1), between_layers=True).cancel()
    engine.let_all_go()
    collector.wait(1)
    assert ran == []


def test_commands_for_between_layers_run_though_nothing_steps(running):
    thread, _ = running()
    assert thread.call(lambda loop: loop.num_requests, between_layers=True).result(10) == 0
    pause(thread).result(10)
    assert thread.call(lambda loop: loop.num_requests, between_layers=True).result(10) == 0


def test_commands_given_while_it_stops_are_all_answered(held):
    thread, engine, _collector = held
    futures = [thread.call(lambda _: None, between_layers=bool(i % 2)) for i in range(4)]
    thread.stop()
    late = [thread.call(lambda _: None, between_layers=bool(i % 2)) for i in range(4)]
    engine.let_all_go()
    assert thread.join(10)
    for future in futures:
        assert future.exception(0) is None
    for future in late:
        assert future.exception(0) is None or isinstance(future.exception(0), Unavailable)
    with pytest.raises(Unavailable):
        thread.call(lambda _: None, between_layers=True).result(0)


def test_a_thread_with_partial_work_that_is_not_ready_sleeps(running):
    loop = make_loop(clock=time.monotonic)
    loop.partial = partial = Partial()
    asked, ready = [], type(partial).ready
    steps = []
    loop.step = lambda step=loop.step: steps.append(1) or step()
    thread, _ = running(loop)
    for _ in range(3):
        thread.call(lambda _: asked.append(ready.fget(partial)), between_layers=True).result(10)
    assert steps == []
    thread.call(lambda _: setattr(partial, "layers", 2)).result(10)
    deadline_s = time.monotonic() + 10
    while partial.layers and time.monotonic() < deadline_s:
        time.sleep(0.001)
    thread.call(lambda _: None).result(10)
    assert len(steps) == 2


def test_requests_from_many_threads_come_in_between_layers(running):
    engine = MockEngine(num_blocks=256, block_size=BLOCK_SIZE, timing=MockTiming(layer_base_s=0.0005))
    loop = EngineLoop(engine, SchedulerConfig(num_blocks=256, block_size=BLOCK_SIZE), time.monotonic)
    thread, collector = running(loop)

    def submit(start):
        for i in range(start, start + 20):
            thread.submit(request(f"r{i}", (i, i + 1))).result(10)
            thread.call(lambda loop: loop.scheduler.load(), between_layers=True).result(10)

    submitters = [threading.Thread(target=submit, args=(n,)) for n in (0, 20, 40)]
    for t in submitters:
        t.start()
    for t in submitters:
        t.join()
    collector.wait(60)
    assert collector.tokens == {f"r{i}": expected((i, i + 1), 6) for i in range(60)}
