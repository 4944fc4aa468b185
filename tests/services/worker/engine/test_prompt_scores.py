"""Log-probabilities of prompts are those that ``transformers`` gives, wherever chunks and pieces of logits are cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine import prompt_scores
from services.worker.engine.loop import EngineLoop
from services.worker.engine.models.llama import LlamaForward
from services.worker.engine.torch_engine import TorchEngine
from shared.errors import UnsupportedParameter
from shared.messages.generation import PromptLogprobs, SamplingParams, StreamPart
from tests.checkpoints import KINDS, VOCAB_SIZE
from tests.services.worker.engine.harness import loaded_engine, prompt_of, reference_greedy, reference_logits
from tests.services.worker.engine.loops import make_loop

NUM_TOP = 5


def asked(
    name: str, prompt: Sequence[int], *, num_top: int | None = NUM_TOP, max_tokens: int = 3, output: Sequence[int] = ()
) -> ActiveSequence:
    params = SamplingParams(
        max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True, prompt_logprobs=num_top, logprobs=NUM_TOP
    )
    return ActiveSequence(
        request_id=name,
        attempt=1,
        gateway_id="g",
        prompt=tuple(prompt),
        params=params,
        output=list(output),
        cache_root=b"scope",
    )


def loop_of(engine: TorchEngine, *, chunk: int = 512, prefix_cache: bool = False) -> EngineLoop:
    config = SchedulerConfig(
        num_blocks=engine.num_blocks,
        block_size=engine.block_size,
        max_batch_tokens=512,
        prefill_chunk_tokens=chunk,
        prefix_cache=prefix_cache,
    )
    loop = EngineLoop(engine, config, iter(range(10**9)).__next__)
    loop.scheduler.table.scores_prompts = True
    return loop


def serve(loop: EngineLoop, *sequences: ActiveSequence) -> tuple[dict[str, list[PromptLogprobs]], dict[str, list[int]]]:
    """Of each request: what was said of its prompt, and its tokens. All of the one comes before the other."""
    said: dict[str, list[PromptLogprobs]] = {s.request_id: [] for s in sequences}
    written: dict[str, list[int]] = {s.request_id: [] for s in sequences}
    for sequence in sequences:
        loop.add(sequence)
    while loop.has_work:
        step = loop.step()
        assert step is not None
        for part in step.prompts:
            assert part.prompt is not None
            assert part.prompt.is_whole
            assert (part.token_ids, written[part.request_id]) == ((), [])
            said[part.request_id].append(part.prompt)
        for output in step.outputs:
            assert output.error is None, output.error
            written[output.request_id] += output.token_ids
    loop.scheduler.check()
    return said, written


def check(kind: str, prompt: Sequence[int], said: Sequence[PromptLogprobs], num_top: int = NUM_TOP) -> None:
    """Each position once, in order, with what ``transformers`` says of it."""
    starts = [logprobs.start for logprobs in said]
    assert starts == [1, *(logprobs.end for logprobs in said)][: len(said)]
    assert (said[-1].end if said else 1) == len(prompt)
    if not said:
        return
    table = torch.log_softmax(reference_logits(kind, prompt)[:-1], dim=-1)
    own = np.concatenate([np.frombuffer(one.logprobs, "<f4") for one in said])
    ranks = np.concatenate([np.frombuffer(one.ranks, "<i4") for one in said])
    top_ids = np.concatenate([np.frombuffer(one.top_ids, "<i4").reshape(-1, num_top) for one in said])
    top = np.concatenate([np.frombuffer(one.top_logprobs, "<f4").reshape(-1, num_top) for one in said])
    next_ids = torch.tensor(list(prompt[1:]))[:, None]
    expected_own = table.gather(1, next_ids)
    np.testing.assert_allclose(own, expected_own[:, 0].numpy(), atol=1e-4)
    assert ranks.tolist() == (table >= expected_own).sum(-1).tolist()
    values, ids = table.topk(num_top)
    np.testing.assert_allclose(top, values.numpy(), atol=1e-4)
    assert top_ids.tolist() == ids.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_prompts_in_chunks(kind: str, chunk: int) -> None:
    prompts = {f"r{n}": prompt_of(length, n) for n, length in enumerate((1, 2, 33, 64))}
    loop = loop_of(loaded_engine(kind), chunk=chunk)
    said, written = serve(loop, *(asked(name, prompt) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        check(kind, prompt, said[name])
        assert written[name] == reference_greedy(kind, prompt, 3)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_logits_are_made_in_pieces(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scores, "LOGITS_BYTES", rows * VOCAB_SIZE * prompt_scores.BYTES_PER_LOGIT)
    engine, prompts = loaded_engine("llama"), [prompt_of(50, 1), prompt_of(33, 2)]
    at_once = heads_of(monkeypatch)
    loop = loop_of(engine, chunk=40)
    said, _ = serve(loop, *(asked(str(n), prompt, max_tokens=1) for n, prompt in enumerate(prompts)))
    for n, prompt in enumerate(prompts):
        check("llama", prompt, said[str(n)])
    assert max(at_once) <= max(rows, len(prompts))
    assert sum(at_once) == sum(map(len, prompts))


def test_a_whole_vocabulary_of_alternatives_is_bounded_by_it() -> None:
    prompt = prompt_of(9, 1)
    said, _ = serve(loop_of(loaded_engine("llama")), asked("r", prompt, num_top=VOCAB_SIZE + 100))
    assert [one.num_top for one in said["r"]] == [VOCAB_SIZE]
    check("llama", prompt, said["r"], VOCAB_SIZE)


def test_requests_that_want_different_numbers_beside_one_that_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded_engine("llama")
    at_once, num_scored = heads_of(monkeypatch), []
    score = engine.score
    monkeypatch.setattr(engine, "score", lambda activation: num_scored.append(1) or score(activation))
    prompts = {"none": prompt_of(20, 1), "own": prompt_of(21, 2), "two": prompt_of(22, 3)}
    loop = loop_of(engine)
    said, written = serve(
        loop,
        asked("none", prompts["none"], num_top=None),
        asked("own", prompts["own"], num_top=0),
        asked("two", prompts["two"], num_top=2),
    )
    assert said["none"] == []
    check("llama", prompts["two"], said["two"], 2)
    check_own("llama", prompts["own"], said["own"])
    assert all(written[name] == reference_greedy("llama", prompt, 3) for name, prompt in prompts.items())
    assert sum(at_once) == 20 + 21 + 9, "of prompts that are scored, and of each token"
    assert num_scored == [1]


def check_own(kind: str, prompt: Sequence[int], said: Sequence[PromptLogprobs]) -> None:
    table = torch.log_softmax(reference_logits(kind, prompt)[:-1], dim=-1)
    own = np.concatenate([np.frombuffer(one.logprobs, "<f4") for one in said])
    np.testing.assert_allclose(own, table.gather(1, torch.tensor(list(prompt[1:]))[:, None])[:, 0].numpy(), atol=1e-4)
    assert {one.top_ids for one in said} == {b""}


def test_who_does_not_ask_has_no_logits_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded_engine("llama")
    at_once = heads_of(monkeypatch)
    monkeypatch.setattr(engine, "score", lambda _: pytest.fail("nobody asked"))
    said, written = serve(loop_of(engine, chunk=16), asked("r", prompt_of(50), num_top=None))
    assert (said["r"], at_once) == ([], [1, 1, 1])
    assert written["r"] == reference_greedy("llama", prompt_of(50), 3)


def heads_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of logits are made at once, each time."""
    at_once: list[int] = []
    head = LlamaForward.head

    def counted(forward: LlamaForward, hidden: torch.Tensor) -> torch.Tensor:
        at_once.append(len(hidden))
        return head(forward, hidden)

    monkeypatch.setattr(LlamaForward, "head", counted)
    return at_once


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_prompt_that_is_preempted_in_the_midst_is_scored_once(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded_engine("llama", num_blocks=8, block_size=4)
    loop = loop_of(engine, chunk=chunk)
    old, young = prompt_of(6, 1), prompt_of(22, 2)
    preempted: list[tuple[int, int]] = []
    wait = loop.scheduler.table.wait
    late = asked("young", young, max_tokens=4)
    monkeypatch.setattr(
        loop.scheduler.table, "wait", lambda s: wait(s) or preempted.append((s.num_scored, len(s.output)))
    )
    said, written = serve(loop, asked("old", old, num_top=None, max_tokens=20), late)
    assert any(1 < scored < len(young) for scored, _ in preempted), "in the midst of its prompt"
    check("llama", young, said["young"])
    assert written["young"] == reference_greedy("llama", young, 4)


def test_a_prompt_that_is_preempted_behind_its_end_is_not_scored_again() -> None:
    engine = loaded_engine("llama", num_blocks=8, block_size=4)
    loop = loop_of(engine)
    old, young = prompt_of(6, 1), prompt_of(12, 2)
    said, written = serve(loop, asked("old", old, num_top=None, max_tokens=20), asked("young", young, max_tokens=9))
    assert loop.stats().load.preemptions_total > 0
    check("llama", young, said["young"])
    assert written["young"] == reference_greedy("llama", young, 9)


def test_all_of_a_prompt_is_computed_whatever_the_prefix_cache_has_and_it_leaves_its_blocks() -> None:
    engine, prompt = loaded_engine("llama"), prompt_of(50)
    loop = loop_of(engine, prefix_cache=True)
    serve(loop, asked("first", prompt, num_top=None))
    said, _ = serve(loop, scored := asked("scored", prompt))
    check("llama", prompt, said["scored"])
    assert scored.num_cached == 0
    other = loop_of(engine, prefix_cache=True)
    serve(other, asked("scored", prompt))
    _, written = serve(other, later := asked("later", prompt, num_top=None))
    assert later.num_cached == 48
    assert written["later"] == reference_greedy("llama", prompt, 3)


def test_an_attempt_behind_tokens_scores_the_prompt_alone() -> None:
    prompt = prompt_of(21)
    output = reference_greedy("llama", prompt, 9)
    said, written = serve(loop_of(loaded_engine("llama"), chunk=8), asked("r", prompt, max_tokens=9, output=output[:7]))
    check("llama", prompt, said["r"])
    assert written["r"] == output[7:]


def test_a_step_that_fails_is_scored_when_it_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded_engine("llama")
    score, calls = engine.score, []

    def failing(activation):
        calls.append(activation)
        if len(calls) == 2:
            raise RuntimeError("once")
        return score(activation)

    monkeypatch.setattr(engine, "score", failing)
    prompts = {"a": prompt_of(30, 1), "b": prompt_of(41, 2)}
    said, _ = serve(loop_of(engine, chunk=12), *(asked(name, prompt) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        check("llama", prompt, said[name])


def test_a_request_that_scoring_fails_on_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded_engine("llama")
    monkeypatch.setattr(engine, "score", lambda _: 1 / 0)
    loop = loop_of(engine)
    loop.add(asked("bad", prompt_of(30, 1)))
    loop.add(asked("good", prompt_of(31, 2), num_top=None))
    outputs: list[StreamPart] = []
    while loop.has_work:
        outputs += loop.step().outputs
    ends = {out.request_id: out.finish_reason for out in outputs if out.finish_reason}
    assert ends == {"bad": "error", "good": "length"}


def test_an_engine_without_them_refuses_by_name() -> None:
    with pytest.raises(UnsupportedParameter, match="prompt_logprobs"):
        make_loop().add(asked("r", prompt_of(4)))
