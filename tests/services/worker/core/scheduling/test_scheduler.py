"""Continuous batching: order, budgets, preemption, endings."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.core.scheduling.gateways import Gone
from services.worker.core.scheduling.schedule import Sampled, SchedulerConfig
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.mock.tokens import next_token
from shared.errors import Conflict, ContextLengthExceeded, Internal, Overloaded
from shared.messages.common import ErrorInfo
from shared.messages.generation import SamplingParams
from tests.services.worker.core.scheduling.harness import fail, step


def config(**changes):
    return SchedulerConfig(**{"num_blocks": 64, "block_size": 4, **changes})


def request(name, prompt_tokens=5, max_tokens=4, *, gateway="g", output=(), attempt=0):
    prompt = [(ord(name[0]) * 7 + i) % 90 for i in range(prompt_tokens)]
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    return ActiveSequence(
        request_id=name, attempt=attempt, gateway_id=gateway, prompt=prompt, params=params, output=output
    )  # fmt: skip


def expected(sequence_prompt, max_tokens):
    tokens = list(sequence_prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(sequence_prompt) :]


def finish(scheduler, batch):
    sampled = [Sampled(next_token(p.sequence.tokens)) for p in batch.slices if p.sample]
    outputs = scheduler.complete(batch, sampled)
    scheduler.check()
    return outputs


def sizes(batch):
    return [(p.sequence.request_id, p.start, p.num_tokens, p.sample) for p in batch.slices]


def test_decode_comes_first_then_running_prefill_then_the_head_of_the_queue():
    scheduler = Scheduler(config(max_batch_tokens=8, prefill_chunk_tokens=4))
    scheduler.add(request("a", 3))
    finish(scheduler, scheduler.schedule())
    scheduler.add(request("b", 7))
    scheduler.add(request("c", 6))
    batch = scheduler.schedule()
    assert sizes(batch) == [("a", 3, 1, True), ("b", 0, 4, False), ("c", 0, 3, False)]
    finish(scheduler, batch)
    assert scheduler.load().prefilling_requests == 2
    assert sizes(scheduler.schedule()) == [("a", 4, 1, True), ("b", 4, 3, True), ("c", 3, 3, True)]


def test_the_latest_arrival_is_preempted_and_its_output_kept():
    scheduler = Scheduler(config(num_blocks=4))
    early, late = request("a", 7, 8), request("b", 7, 8)
    scheduler.add(early)
    scheduler.add(late)
    outputs = []
    preempted = []
    while (batch := scheduler.schedule()) is not None:
        preempted += [s.request_id for s in batch.preempted]
        outputs += finish(scheduler, batch)
    assert preempted == ["b"]
    for sequence in (early, late):
        assert sequence.output == expected(sequence.prompt, 8)
    assert [o.offset for o in outputs if o.request_id == "b"] == list(range(8))
    assert scheduler.pool.num_used == 0


def test_an_attempt_that_is_here_already_is_a_conflict():
    scheduler = Scheduler(config())
    scheduler.add(request("a"))
    with pytest.raises(Conflict):
        scheduler.add(request("a"))
    scheduler.add(request("a", attempt=1))
    scheduler.check()


def test_a_prompt_that_can_never_fit_is_refused():
    with pytest.raises(ContextLengthExceeded, match="8 tokens"):
        Scheduler(config(num_blocks=2)).add(request("a", 8))
    with pytest.raises(ContextLengthExceeded):
        Scheduler(config(context_tokens=6)).add(request("a", 6))


def test_a_request_that_reaches_the_context_limit_ends_with_length():
    scheduler = Scheduler(config(num_blocks=2))
    scheduler.add(request("a", 6, 100))
    outputs = []
    while (batch := scheduler.schedule()) is not None:
        outputs += finish(scheduler, batch)
    assert [o.finish_reason for o in outputs] == [None, "length"]


def test_a_full_queue_refuses_by_requests_and_by_tokens():
    scheduler = Scheduler(config(max_queued_requests=2, max_queued_tokens=12))
    scheduler.add(request("a", 20))
    with pytest.raises(Overloaded, match="20 tokens"):
        scheduler.add(request("b", 1))
    scheduler.cancel("a", 0)
    scheduler.add(request("b", 2))
    scheduler.add(request("c", 2))
    with pytest.raises(Overloaded, match="2 requests"):
        scheduler.add(request("d", 1))
    scheduler.check()


def test_a_continuation_that_is_already_over_ends_at_once():
    scheduler = Scheduler(config())
    scheduler.add(request("a", 3, 2, output=(5, 6)))
    assert scheduler.schedule() is None
    (ended,) = scheduler.take_ended()
    assert (ended.offset, ended.token_ids, ended.finish_reason) == (2, (), "length")
    assert scheduler.num_requests == 0


def test_a_cancel_frees_blocks_at_once_outside_a_batch():
    scheduler = Scheduler(config())
    scheduler.add(request("a"))
    finish(scheduler, scheduler.schedule())
    assert scheduler.pool.num_used > 0
    assert scheduler.cancel("a", 0) is not None
    assert scheduler.pool.num_used == 0
    assert scheduler.cancel("a", 0) is None
    assert [o.finish_reason for o in scheduler.take_ended()] == ["cancelled"]


def test_a_cancel_during_a_batch_frees_blocks_when_it_lands_and_drops_its_token():
    scheduler = Scheduler(config())
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    batch = scheduler.schedule()
    scheduler.cancel("a", 0)
    scheduler.check()
    assert scheduler.pool.num_used == 4
    assert [o.request_id for o in finish(scheduler, batch)] == ["b"]
    assert scheduler.pool.num_used == 2
    assert [(o.request_id, o.finish_reason) for o in scheduler.take_ended()] == [("a", "cancelled")]


def test_a_gateway_that_is_gone_takes_only_its_own_requests_with_it():
    scheduler = Scheduler(config())
    for name, gateway in (("a", "x"), ("b", "y"), ("c", "x")):
        scheduler.add(request(name, gateway=gateway))
    assert [s.request_id for s in scheduler.cancel_gateway(Gone("x", ""))] == ["a", "c"]
    scheduler.check()
    assert sizes(scheduler.schedule()) == [("b", 0, 5, True)]


def test_a_failed_batch_ends_its_requests_with_the_error_and_spares_the_queue():
    scheduler = Scheduler(config(max_num_sequences=1))
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    error = ErrorInfo.of(Internal("boom"))
    outputs = fail(scheduler, scheduler.schedule(), error)
    assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [("a", "error", error)]
    scheduler.check()
    assert sizes(scheduler.schedule()) == [("b", 0, 5, True)]


def test_load_counts_what_is_queued_running_and_held():
    scheduler = Scheduler(config(max_num_sequences=1, prefill_chunk_tokens=4))
    scheduler.add(request("a", 10))
    scheduler.add(request("b", 6))
    finish(scheduler, scheduler.schedule())
    load = scheduler.load()
    assert (load.queued_requests, load.queued_tokens) == (1, 6 + 6)
    assert (load.running_requests, load.running_tokens) == (1, 4)
    assert (load.kv_blocks_used, load.kv_blocks_total, load.prefill_tokens_total) == (3, 64, 4)


def test_how_long_answers_are_is_counted_when_they_end_by_themselves():
    scheduler = Scheduler(config())
    scheduler.add(request("a", max_tokens=3))
    scheduler.add(request("b", max_tokens=9))
    # Another instance computed two of its tokens.
    scheduler.add(request("c", max_tokens=4, output=[1, 2]))
    for _ in range(3):
        finish(scheduler, scheduler.schedule())
    scheduler.cancel("b", 0)
    load = scheduler.load()
    assert (load.ended_requests_total, load.ended_tokens_total) == (2, 3 + 4)


def test_the_first_token_reports_the_time_in_the_queue_once():
    scheduler = Scheduler(config())
    scheduler.add(request("a"), now_s=10.0)
    first = scheduler.complete(scheduler.schedule(now_s=12.5), [Sampled(1)])
    second = scheduler.complete(scheduler.schedule(now_s=13.0), [Sampled(1)])
    assert [o.queued_s for o in first + second] == [2.5, None]


@dataclass
class Case:
    config: SchedulerConfig
    moves: list[tuple[str, int, int]]


KINDS = ["add", "add", "step", "step", "step", "cancel", "fly"]

cases = st.builds(
    Case,
    st.builds(
        SchedulerConfig,
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 5),
        max_num_sequences=st.integers(1, 5),
        max_batch_tokens=st.integers(1, 12),
        prefill_chunk_tokens=st.integers(1, 9),
        max_queued_requests=st.just(6),
    ),
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(0, 40), st.integers(1, 9)),
        max_size=60,
    ),
)  # fmt: skip


@given(cases)
@settings(max_examples=200, deadline=None)
def test_whatever_happens_blocks_budget_order_endings_and_tokens_are_right(case):
    scheduler = Scheduler(case.config)
    accepted: dict[str, ActiveSequence] = {}
    started: list[int] = []
    tokens: dict[str, list[int]] = {}
    endings: dict[str, list[str]] = {}

    def record(outputs):
        for out in outputs:
            got = tokens.setdefault(out.request_id, [])
            assert out.offset == len(got)
            assert out.request_id not in endings, "output after the terminal"
            got.extend(out.token_ids)
            if out.finish_reason:
                endings[out.request_id] = [out.finish_reason]

    def step(cancel=None):
        batch = scheduler.schedule()
        if batch is not None:
            assert batch.slices, "an empty batch makes no progress"
            assert sum(p.num_tokens for p in batch.slices) <= case.config.max_batch_tokens
            started.extend(p.sequence.id for p in batch.slices if p.sequence.id not in started)
            if cancel is not None:
                scheduler.cancel(cancel, 0)
                scheduler.check()
            record(scheduler.take_ended())
            record(finish(scheduler, batch))
        record(scheduler.take_ended())
        return batch is not None

    for number, (kind, a, b) in enumerate(case.moves):
        if kind == "add":
            sequence = request(f"{chr(97 + a % 26)}{number}", a % 12 + 1, b)
            try:
                scheduler.add(sequence)
                accepted[sequence.request_id] = sequence
            except (Overloaded, ContextLengthExceeded):
                pass
        elif kind == "step":
            step()
        elif accepted:
            name = list(accepted)[a % len(accepted)]
            if kind == "fly":
                step(cancel=name)
            else:
                scheduler.cancel(name, 0)
        scheduler.check()
    for _ in range(5000):
        if not step():
            break
    assert not scheduler.has_work
    assert scheduler.pool.num_used == 0
    assert started == sorted(started), "not first come, first served"
    assert set(endings) == set(accepted)
    for name, sequence in accepted.items():
        limit = min(sequence.params.max_tokens, case.config.limit_tokens - len(sequence.prompt))
        want = expected(sequence.prompt, limit)
        if endings[name] == ["cancelled"]:
            assert tokens[name] == want[: len(tokens[name])]
        else:
            assert tokens[name] == want


def test_the_blocks_that_the_first_waiting_request_lacks_are_in_the_load() -> None:
    scheduler = Scheduler(config(num_blocks=10, max_num_sequences=2))
    scheduler.add(request("runs", 23, 9))
    step(scheduler)
    assert (scheduler.load().head_blocks, scheduler.load().lacking_blocks) == (0, 0)
    scheduler.add(request("waits", 20, 1))
    scheduler.add(request("is behind it", 1, 1))
    assert scheduler.load().kv_blocks_used == 6
    assert (scheduler.load().head_blocks, scheduler.load().lacking_blocks) == (5, 1)
    scheduler.cancel("waits", 0)
    assert scheduler.load().head_blocks == 0, "what is next fits"


def test_what_waits_for_a_slot_or_is_lent_lacks_no_blocks() -> None:
    scheduler = Scheduler(config(num_blocks=10, max_num_sequences=2))
    for name in ("a", "b"):
        scheduler.add(request(name, 15, 9))
    step(scheduler)
    scheduler.add(request("waits", 20, 1))
    assert scheduler.load().head_blocks == 0
    scheduler.cancel("b", 0)
    scheduler.add(request("next", 39, 1))
    assert scheduler.load().head_blocks == 0
    scheduler.cancel("waits", 0)
    assert scheduler.load().head_blocks == 10
    scheduler.table.lending = True
    assert scheduler.load().head_blocks == 0
