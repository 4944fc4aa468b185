"""The engine loop writes what ``transformers.generate`` writes greedily, however requests are served."""

from __future__ import annotations

import itertools

import pytest

from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.loop import EngineLoop
from shared.messages.generation import SamplingParams
from tests.checkpoints import KINDS
from tests.services.worker.engine.harness import loaded_engine, prompt_of, reference_greedy

NUM_TOKENS = 64
LENGTHS = (1, 9, 33, 64, 129, 180)


def _serve(loop: EngineLoop, prompts: dict[str, list[int]], *, steps_between: int = 0) -> dict[str, list[int]]:
    """Run requests to their ends; a new one arrives every ``steps_between`` steps, or all at once."""
    arrivals = iter(prompts.items())
    written: dict[str, list[int]] = {name: [] for name in prompts}
    ended: set[str] = set()
    for step in itertools.count():
        assert step < 5000, "the loop does not end"
        while not steps_between or step % steps_between == 0:
            name, prompt = next(arrivals, (None, None))
            if name is None or prompt is None:
                break
            params = SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
            loop.add(ActiveSequence(request_id=name, attempt=1, gateway_id="g", prompt=prompt, params=params))
            if steps_between:
                break
        result = loop.step()
        for output in result.outputs if result else ():
            assert output.error is None
            assert output.offset == len(written[output.request_id])
            written[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                ended.add(output.request_id)
        if len(ended) == len(prompts):
            break
    loop.scheduler.check()
    return written


def _loop(kind: str, *, num_blocks: int = 256, chunk: int = 512, max_sequences: int = 16) -> EngineLoop:
    engine = loaded_engine(kind, num_blocks=num_blocks)
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=engine.block_size,
        max_batch_tokens=512,
        prefill_chunk_tokens=chunk,
        max_num_sequences=max_sequences,
        context_tokens=1024,
    )
    return EngineLoop(engine, config, iter(range(10**9)).__next__)


def _prompts() -> dict[str, list[int]]:
    return {f"r{i}": prompt_of(length, i) for i, length in enumerate(LENGTHS)}


def _expected(kind: str, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: reference_greedy(kind, prompt, NUM_TOKENS) for name, prompt in prompts.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_requests_served_alone(kind: str) -> None:
    loop, prompts = _loop(kind, max_sequences=1), _prompts()
    assert _serve(loop, prompts) == _expected(kind, prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_join_a_running_batch(kind: str) -> None:
    loop, prompts = _loop(kind), _prompts()
    assert _serve(loop, prompts, steps_between=7) == _expected(kind, prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_in_chunks_of_16(kind: str) -> None:
    loop, prompts = _loop(kind, chunk=16), _prompts()
    assert _serve(loop, prompts, steps_between=3) == _expected(kind, prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_preempted_for_lack_of_blocks(kind: str) -> None:
    loop, prompts = _loop(kind, num_blocks=24, chunk=32), _prompts()
    assert _serve(loop, prompts) == _expected(kind, prompts)
    assert loop.stats().load.preemptions_total > 0


def test_the_reference_is_no_single_repeated_token() -> None:
    # Otherwise every test here would pass for an engine that ignores its input.
    for kind in KINDS:
        written = [tuple(tokens) for tokens in _expected(kind, _prompts()).values()]
        assert len(set(written)) == len(written)
        assert all(len(set(tokens)) > 10 for tokens in written)
