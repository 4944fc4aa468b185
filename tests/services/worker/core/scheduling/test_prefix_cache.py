"""What a context that begins as an earlier one did costs, and how long KV is kept."""

from __future__ import annotations

from services.worker.core.scheduling.schedule import Sampled, SchedulerConfig
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.errors import Internal
from shared.messages.common import ErrorInfo
from shared.messages.generation import StreamPart
from shared.prefixes import prefix_root
from tests.services.worker.core.scheduling.pipeline import SHARED_TOKENS, Pipeline, placed_request

BLOCK = 4
ROOT = prefix_root("model", "scope")


def pipeline_of(num_blocks: int = 64, **limits: int) -> Pipeline:
    return Pipeline(
        Scheduler(SchedulerConfig(num_blocks=num_blocks, block_size=BLOCK, prefix_cache=True, **limits))  # type: ignore[arg-type]
    )


def add(pipeline: Pipeline, name: str, prompt_tokens: int, max_tokens: int = 1) -> ActiveSequence:
    sequence = placed_request(f"{name}@scope", prompt_tokens, max_tokens, cache_root=ROOT)
    pipeline.scheduler.add(sequence)
    return sequence


def run(pipeline: Pipeline) -> list[StreamPart]:
    parts = []
    while pipeline.scheduler.has_work or pipeline.batches:
        if not pipeline.batches:
            assert pipeline.schedule() is not None
        parts += pipeline.land()
        pipeline.scheduler.check()
    return parts


def test_only_the_rest_is_computed_and_the_last_token_always_is() -> None:
    pipeline = pipeline_of()
    add(pipeline, "a:0", 40)
    assert run(pipeline)[0].cached_tokens == 0
    computed = pipeline.scheduler.table.prefill_tokens_total
    for name, tokens, cached in (
        ("a:1", 40, 36),
        ("a:2", 41, 40),
        ("a:3", 43, 40),
        ("ac:4", 40, SHARED_TOKENS // 4 * 4),
    ):
        add(pipeline, name, tokens)
        assert run(pipeline)[0].cached_tokens == cached
        before, computed = computed, pipeline.scheduler.table.prefill_tokens_total
        assert computed - before == tokens - cached
    assert pipeline.scheduler.pool.num_used == 0


def test_an_answer_is_found_but_for_its_last_token() -> None:
    pipeline = pipeline_of()
    add(pipeline, "a:0", 10, max_tokens=15)
    run(pipeline)
    add(pipeline, "a:1", 30)
    assert run(pipeline)[0].cached_tokens == 24


def test_blocks_that_requests_share_are_counted_once_and_cost_nothing_to_admit() -> None:
    pipeline = pipeline_of(num_blocks=12)
    add(pipeline, "a:0", 40, max_tokens=8)
    pipeline.schedule()
    pipeline.land()
    assert pipeline.scheduler.pool.num_used == 10
    # Ten blocks for itself, where two are free: nine are the other one's, which takes another one to grow into.
    add(pipeline, "a:1", 38, max_tokens=1)
    pipeline.schedule()
    starts = {piece.sequence.request_id: piece.start for piece in pipeline.batches[0].slices}
    assert starts == {"a:0@scope": 40, "a:1@scope": 36}
    pool = pipeline.scheduler.pool
    assert pool.num_used == 12
    assert [pool.num_alone(s.block_table) for s in pipeline.scheduler.table.running] == [2, 1]
    run(pipeline)


def test_the_longest_unused_is_given_up_first_and_its_end_before_its_beginning() -> None:
    pipeline = pipeline_of(num_blocks=12)
    for name in ("b:0", "c:1", "b:2"):
        add(pipeline, name, 20)
        run(pipeline)
    add(pipeline, "d:3", 16)  # four of the twelve are free: two are wanted beside, and the ends of c's go
    run(pipeline)
    add(pipeline, "b:4", 20)
    assert run(pipeline)[0].cached_tokens == 16
    add(pipeline, "c:5", 20)
    assert 0 < run(pipeline)[0].cached_tokens < 16


def test_a_prompt_behind_a_long_prefix_waits_where_decodes_leave_no_time_for_it() -> None:
    pipeline = pipeline_of(num_blocks=400, max_batch_tokens=64, prefill_chunk_tokens=64)
    budgets = pipeline.scheduler.budgets
    add(pipeline, "a:0", 1000)
    run(pipeline)
    budgets.keep_tbt(0.01)
    budgets.cost.expect(1e-5, 1e-5)
    add(pipeline, "e:1", 4, max_tokens=30)
    pipeline.schedule()
    pipeline.land()
    add(pipeline, "f:2", 60)
    add(pipeline, "a:3", 1000)
    parts = run(pipeline)  # every slice has something to compute: the pipeline looks
    assert {part.request_id for part in parts if part.finish_reason} == {"e:1@scope", "f:2@scope", "a:3@scope"}


def test_requests_without_a_scope_find_nothing_and_are_found_by_nobody() -> None:
    pipeline = pipeline_of()
    for name in ("a:0", "a:1"):
        pipeline.scheduler.add(placed_request(name, 40, 1))
        assert run(pipeline)[0].cached_tokens == 0
    assert pipeline.scheduler.pool.num_taken == 0


def test_kv_of_which_no_token_came_is_found_by_nobody() -> None:
    pipeline = pipeline_of()
    scheduler = pipeline.scheduler
    error = ErrorInfo.of(Internal("not finite"))
    add(pipeline, "a:0", 20, max_tokens=9)
    pipeline.schedule()
    pipeline.land()
    add(pipeline, "a:1", 40)  # shares five blocks with one that goes on
    batch = scheduler.schedule()
    assert batch is not None
    tokens = [Sampled(1), Sampled(-1, error=error)]
    assert [piece.start for piece in batch.slices] == [20, 20]
    scheduler.complete(batch, tokens)
    scheduler.check()
    add(pipeline, "a:2", 40)
    batch = scheduler.schedule()
    assert batch is not None
    assert [piece.start for piece in batch.slices] == [21, 0]
    scheduler.complete(batch, [Sampled(1)], {1: error})
    scheduler.check()
    add(pipeline, "a:3", 40)
    batch = scheduler.schedule()
    assert batch is not None
    assert [piece.start for piece in batch.slices] == [22, 0]
    scheduler.complete(batch, [Sampled(1), Sampled(1)])
    scheduler.cancel("a:0@scope", 0)
    scheduler.check()
    assert scheduler.pool.num_used == 0


def test_few_tokens_behind_a_prefix_that_was_there_are_said_to_be_that() -> None:
    pipeline = pipeline_of(num_blocks=200, max_batch_tokens=512, prefill_chunk_tokens=512)
    add(pipeline, "a:0", 200)
    batches = []
    for name, tokens in (("a:1", 200), ("a:2", 300), ("d:3", 20)):
        batch = pipeline.schedule()
        assert batch is not None
        batches.append(batch)
        pipeline.land()
        add(pipeline, name, tokens)
    batches.append(pipeline.schedule())  # type: ignore[arg-type]
    assert [(batch.num_prefill_tokens, batch.is_rest) for batch in batches] == [
        (200, False), (4, True), (100, False), (20, False)
    ]  # fmt: skip
