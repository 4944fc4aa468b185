"""The engine loop."""

import pytest

from services.worker.engine.mock.mock_engine import MockEngine
from tests.services.worker.engine.loops import Partial, expected, make_loop, request, run_all


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
    assert loop.stats().load.kv_blocks_used == 0


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
    assert loop.scheduler.cancel("a", 0)
    assert loop.stats().load.kv_blocks_used == 0
    step = loop.step()
    assert [(o.offset, o.token_ids, o.finish_reason) for o in step.outputs] == [(1, (), "cancelled")]
    assert loop.step() is None
    assert not loop.scheduler.cancel("a", 0)


def test_busy_time_counts_steps_only():
    now = iter(range(100))
    loop = make_loop(clock=lambda: float(next(now)))
    loop.add(request("a", max_tokens=2))
    run_all(loop)
    assert loop.stats().busy_s_total == 2.0


def test_a_scheduler_that_counts_on_more_blocks_than_the_engine_has_is_refused():
    with pytest.raises(ValueError, match="the engine has 2 of 4"):
        make_loop(MockEngine(num_blocks=2, block_size=4))


def decoding_loop(partial, clock):
    """A loop with one request that decodes."""
    loop = make_loop(clock=clock)
    loop.add(request("a", max_tokens=20))
    loop.step()
    partial.attach(loop)
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
    partial.attach(loop)
    loop.add(request("waits"))
    for _ in range(3):
        loop.step()
    assert partial.layers == loop.engine.num_steps == 0
    loop.step()
    assert loop.engine.num_steps == 1


def test_partial_work_that_is_not_ready_is_no_work():
    loop = make_loop()
    partial = Partial(0).attach(loop)
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
    partial = Partial().attach(loop)
    between = []
    loop.between_layers = lambda: between.append(partial.num_own_layers)
    loop.add(request("a", (1, 2, 3, 4, 5)))
    run_all(loop)
    num_layers = loop.engine.num_layers
    assert partial.num_own_layers == 2 * num_layers, "two chunks"
    assert between == list(range(1, 2 * num_layers + 1))


def test_what_a_partial_step_took_counts_as_busy():
    now_s = 1.0
    loop = make_loop(clock=lambda: now_s)
    partial = Partial(2).attach(loop)
    partial.begun_s, now_s = 1.0, 2.5
    loop.step()
    assert loop.stats().busy_s_total == 1.5
    partial.begun_s, now_s = 2.0, 3.0
    loop.step()
    assert loop.stats().busy_s_total == 2.0, "it waited for the one before until 2.5"


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
        scheduler.table.lending = True
        found.extend(scheduler.lend())
        assert scheduler.reservations.reserve(found)

    loop.between_layers = between
    outputs = list(loop.step().outputs)
    assert [s.request_id for s in found] == ["b"]
    scheduler.reservations.release(found)
    scheduler.table.lending = False
    scheduler.take_back(found)
    while loop.has_work:
        outputs += loop.step().outputs
    for name in "ab":
        tokens = [token for o in outputs if o.request_id == name for token in o.token_ids]
        assert tokens == expected((1, 2, 3, 4, 5), 6)
