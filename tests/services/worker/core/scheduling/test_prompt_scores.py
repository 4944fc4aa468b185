"""Requests whose prompts are scored: they are computed from their beginning, in this instance's own steps."""

from __future__ import annotations

import pytest

from services.worker.core.scheduling.request_table import NO_PROMPT_LOGPROBS
from services.worker.core.scheduling.schedule import Sampled, SchedulerConfig
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence, submit_of
from shared.errors import UnsupportedParameter
from shared.messages.generation import PromptLogprobs, SamplingParams

PROMPT = tuple(range(1, 41))


def request(name: str, prompt: tuple[int, ...] = PROMPT, *, num_top: int | None = 0) -> ActiveSequence:
    return ActiveSequence(
        request_id=name,
        attempt=1,
        gateway_id="g",
        prompt=prompt,
        params=SamplingParams(max_tokens=4, seed=0, prompt_logprobs=num_top),
        cache_root=b"scope",
    )


def scheduler_of(*, num_blocks: int = 64, scores: bool = True) -> Scheduler:
    config = SchedulerConfig(num_blocks=num_blocks, block_size=4, prefix_cache=True, prefill_chunk_tokens=16)
    scheduler = Scheduler(config)
    scheduler.table.scores_prompts = scores
    return scheduler


def said(start: int, end: int) -> PromptLogprobs:
    numbers = b"\0" * 4 * (end - start)
    return PromptLogprobs(start=start, num_top=0, logprobs=numbers, ranks=numbers, top_ids=b"", top_logprobs=b"")


def step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """One step; whose tokens it computed."""
    batch = scheduler.schedule()
    assert batch is not None
    scores = {
        id(p.sequence): said(max(p.start, p.sequence.num_scored - 1) + 1, p.start + p.num_tokens + (not p.sample))
        for p in batch.slices
        if p.sequence.is_scoring
    }
    scheduler.scored(batch, scores)
    scheduler.complete(batch, [Sampled(7) for piece in batch.slices if piece.sample])
    scheduler.check()
    return [(p.sequence.request_id, p.start, p.start + p.num_tokens) for p in batch.slices]


def test_all_of_it_is_computed_and_found_by_others_and_once_scored_by_itself() -> None:
    scheduler = scheduler_of()
    scheduler.add(scored := request("scored"))
    assert [step(scheduler) for _ in range(3)] == [
        [("scored", 0, 16)], [("scored", 16, 32)], [("scored", 32, 40)],
    ]  # fmt: skip
    assert not scored.is_scoring
    scheduler.add(other := request("other", num_top=None))
    assert step(scheduler) == [("scored", 40, 41), ("other", 36, 40)]
    assert (scored.num_cached, other.num_cached) == (0, 36)
    scheduler.add(request("again"))
    assert ("again", 0, 16) in step(scheduler)


def test_it_is_not_lent_and_runs_while_others_are() -> None:
    scheduler = scheduler_of()
    scheduler.add(scored := request("scored"))
    scheduler.add(other := request("other", num_top=None))
    scheduler.table.lending = True
    assert scheduler.lend() == [other]
    assert scored.stays
    assert step(scheduler) == [("scored", 0, 16)]


def test_who_decodes_it_elsewhere_is_asked_for_nothing_of_the_prompt() -> None:
    message = submit_of(request("r", num_top=5), "i", "m", "h")
    assert message.sampling.prompt_logprobs is None
    assert message.prompt_token_ids == PROMPT


def test_what_ended_says_nothing_more() -> None:
    scheduler = scheduler_of()
    scheduler.add(scored := request("r"))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.cancel(*scored.key)
    assert scheduler.scored(batch, {id(scored): said(1, 17)}) == []
    scheduler.complete(batch, [])


def test_without_them_it_is_refused_and_nothing_changes() -> None:
    scheduler = scheduler_of(scores=False)
    with pytest.raises(UnsupportedParameter, match="prompt_logprobs") as refused:
        scheduler.add(request("r"))
    assert refused.value is NO_PROMPT_LOGPROBS
    assert (scheduler.num_requests, scheduler.has_work) == (0, False)
