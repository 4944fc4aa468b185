"""Several choices of one prompt (``n``): each a stream of its own, and the prompt once in the usage."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from shared.messages.generation import Submit
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.http.test_rate_limits import key, keys_file, post, remaining, stand_still
from tests.services.gateway.http.test_refusals import CHAT, MESSAGES, TEXT, check

SHARED_FIELDS: dict[str, Any] = {"model": "tiny", "max_tokens": 4}
BODIES = {CHAT: {**SHARED_FIELDS, "messages": MESSAGES}, TEXT: {**SHARED_FIELDS, "prompt": "a"}}


def drawn(submit: Submit) -> list[int]:
    """The prompt's last byte, and the seed as a letter: ``a0`` to ``a9``."""
    return [submit.prompt_token_ids[-1], ord("0") + submit.sampling.seed % 10, ord("!")]


async def test_a_chat_has_n_messages_and_its_prompt_counts_once(stack: Stack) -> None:
    stack.workers[0].script = drawn
    one = await stack.openai.chat.completions.create(model="tiny", messages=MESSAGES, seed=3)
    answer = await stack.openai.chat.completions.create(model="tiny", messages=MESSAGES, n=3, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == [">3!", ">4!", ">5!"]
    assert answer.choices[0].message.content == one.choices[0].message.content
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens
    assert answer.usage.completion_tokens == 9


async def test_choices_of_several_prompts_are_in_order_of_the_prompts(stack: Stack) -> None:
    stack.workers[0].script = drawn
    answer = await stack.openai.completions.create(model="tiny", prompt=["a", "b"], n=2, seed=0, echo=True)
    shown = [(choice.index, choice.text) for choice in answer.choices]
    assert shown == [(0, "aa0!"), (1, "aa1!"), (2, "bb0!"), (3, "bb1!")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 12)


async def test_streamed_choices_have_their_indices_and_one_usage(stack: Stack) -> None:
    stack.workers[0].script = drawn
    stream = await stack.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, seed=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    usage = chunks.pop().usage
    texts, roles, ends = {0: "", 1: ""}, [], []
    for chunk in chunks:
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles += [choice.index] if choice.delta.role else []
        ends += [(choice.index, choice.finish_reason)] if choice.finish_reason else []
    assert texts == {0: ">8!", 1: ">9!"}
    assert sorted(roles) == [0, 1]
    assert sorted(ends) == [(0, "stop"), (1, "stop")]
    assert usage.completion_tokens == 6
    assert usage.prompt_tokens == len(stack.workers[0].submits[0].prompt_token_ids)


async def test_streamed_completions_are_in_order_of_the_prompts_too(stack: Stack) -> None:
    stack.workers[0].script = drawn
    stream = await stack.openai.completions.create(model="tiny", prompt=["a", "b"], n=2, seed=0, stream=True)
    texts: dict[int, str] = {}
    async for chunk in stream:
        texts[chunk.choices[0].index] = texts.get(chunk.choices[0].index, "") + chunk.choices[0].text
    assert texts == {0: "a0!", 1: "a1!", 2: "b0!", 3: "b1!"}


async def test_choices_differ_by_their_seeds_alone(stack: Stack) -> None:
    """So greedy ones are equal: those draw nothing."""
    answer = await stack.openai.completions.create(model="tiny", prompt="a", n=4, temperature=0, seed=2**63 - 2)
    assert {choice.text for choice in answer.choices} == {"hello"}
    submits = stack.workers[0].submits
    assert [submit.sampling.seed for submit in submits] == [2**63 - 2, 2**63 - 1, 0, 1]
    assert len({structs.replace(submit.sampling, seed=0) for submit in submits}) == 1
    assert len({submit.prompt_token_ids for submit in submits}) == 1


async def test_without_a_seed_each_choice_has_its_own(stack: Stack) -> None:
    await stack.openai.completions.create(model="tiny", prompt="a", n=8)
    seeds = [submit.sampling.seed for submit in stack.workers[0].submits]
    assert len(set(seeds)) == 8
    assert len({later - earlier for earlier, later in pairwise(seeds)}) == 7, "they are no row"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [0, -1, 17, 1.5, "2", True, [2]])
async def test_n_is_a_small_number(stack: Stack, path: str, n: Any) -> None:
    response = await stack.http.post(path, json={**BODIES[path], "n": n})
    message = check(response, 400, "invalid_request_error", "bad_request", "n")
    assert "from 1 to 16" in message
    assert not stack.workers[0].submits


async def test_the_choices_of_all_prompts_are_bounded(stack: Stack) -> None:
    response = await stack.http.post(TEXT, json={**BODIES[TEXT], "prompt": ["a"] * 17, "n": 16})
    assert "272 choices" in check(response, 400, "invalid_request_error", "bad_request", "n")
    assert not stack.workers[0].submits
    most = await stack.http.post(TEXT, json={**BODIES[TEXT], "prompt": ["a"] * 16, "n": 16, "max_tokens": 1})
    assert len(most.json()["choices"]) == 256


@pytest.mark.parametrize(("n", "best_of"), [(1, 1), (2, 2), (2, 1), (None, 1), (3, None)])
async def test_best_of_that_asks_for_nothing_more_is_no_matter(stack: Stack, n: Any, best_of: Any) -> None:
    response = await stack.http.post(TEXT, json={**BODIES[TEXT], "n": n, "best_of": best_of})
    assert len(response.json()["choices"]) == (n or 1)


@pytest.mark.parametrize(("n", "best_of"), [(1, 2), (None, 2), (2, 3), (3, 2)])
async def test_choosing_the_best_is_not_supported(stack: Stack, n: Any, best_of: Any) -> None:
    response = await stack.http.post(TEXT, json={**BODIES[TEXT], "n": n, "best_of": best_of})
    check(response, 400, "invalid_request_error", "unsupported_parameter", "best_of")


async def test_limits_count_each_choice(
    make_stack: StackFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await make_stack(1, keys_file=keys_file(tmp_path, key("a", requests_per_minute=5, tokens_per_minute=1000)))
    stand_still(monkeypatch, stack)
    body = {"model": "tiny", "prompt": [97, 98, 99], "max_tokens": 5, "n": 3}
    # Before any has ended: three prompts of 3 tokens, and 5 of output each.
    assert remaining(await post(stack, "a", {**body, "stream": True})) == ("2", "976")
    refused = await post(stack, "a", body)
    assert refused.status_code == 429
    assert len(stack.workers[0].submits) == 3


async def test_the_queue_takes_all_choices_or_none(make_stack: StackFactory) -> None:
    stack = await make_stack(0, max_queued_requests=3)
    response = await stack.http.post(TEXT, json={**BODIES[TEXT], "n": 4})
    check(response, 429, "rate_limit_error", "overloaded")
    assert stack.gateway.dispatcher.router.queued("tiny") == (0, 0)
    assert stack.gateway.request_memory.used_bytes == 0


async def test_an_open_length_leaves_each_choice_its_share_of_the_keys_tokens(
    make_stack: StackFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await make_stack(1, keys_file=keys_file(tmp_path, key("a", tokens_per_minute=400)))
    stand_still(monkeypatch, stack)
    body = {"model": "tiny", "messages": MESSAGES, "n": 2}
    assert (await post(stack, "a", body, "chat/completions")).status_code == 200
    submits = stack.workers[0].submits
    assert [submit.sampling.max_tokens for submit in submits] == [(400 - 2 * len(submits[0].prompt_token_ids)) // 2] * 2
