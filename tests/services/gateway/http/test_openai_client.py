"""The unmodified OpenAI client against a gateway."""

from __future__ import annotations

import json

import openai
import pytest
from openai import AsyncStream

from shared.errors import BadRequest
from shared.messages.generation import TokenLogprobs
from tests.services.gateway.checkpoint import BOS, EOS
from tests.services.gateway.cluster import say
from tests.services.gateway.conftest import Stack

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_chat_completion_whole(stack: Stack) -> None:
    answer = await stack.openai.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    prompt = "<s><|user|>hi<|end|><|assistant|>"
    num_prompt = 1 + len(prompt) - len("<s>")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, 5)
    [submit] = stack.workers[0].submits
    assert submit.prompt_token_ids[0] == BOS
    assert bytes(submit.prompt_token_ids[1:]).decode() == prompt[3:]
    assert submit.sampling.max_tokens == 256 - num_prompt


async def test_chat_completion_streamed(stack: Stack) -> None:
    stream = await stack.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.content for c in chunks[1:-1]] == list("hello")
    assert [c.choices[0].finish_reason for c in chunks[1:-1]] == [None] * 4 + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert {c.id for c in chunks} == {chunks[0].id}


async def test_text_completion_whole_and_streamed(stack: Stack) -> None:
    whole = await stack.openai.completions.create(model="tiny", prompt="ab", max_tokens=3)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("hel", "length")
    stream = await stack.openai.completions.create(model="tiny", prompt="ab", max_tokens=3, stream=True)
    assert [chunk.choices[0].text async for chunk in stream] == ["h", "e", "l"]


async def test_completions_limit_output_to_16_tokens_by_default(stack: Stack) -> None:
    stack.workers[0].script = say("x" * 50)
    answer = await stack.openai.completions.create(model="tiny", prompt="ab")
    assert answer.choices[0].text == "x" * 16


async def test_several_prompts_give_one_choice_each_in_order(stack: Stack) -> None:
    stack.workers[0].script = lambda submit: [*submit.prompt_token_ids[-1:], ord("!")]
    answer = await stack.openai.completions.create(model="tiny", prompt=["a", "b", "c"], max_tokens=4)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "a!"), (1, "b!"), (2, "c!")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 6)


async def test_token_id_prompts_are_taken_as_they_are(stack: Stack) -> None:
    await stack.openai.completions.create(model="tiny", prompt=[104, 105])
    await stack.openai.completions.create(model="tiny", prompt=[[104], [105]])
    assert [s.prompt_token_ids for s in stack.workers[0].submits] == [(104, 105), (104,), (105,)]


async def test_seed_is_passed_on_and_drawn_when_absent(stack: Stack) -> None:
    await stack.openai.completions.create(model="tiny", prompt="a", seed=7)
    for _ in range(2):
        await stack.openai.completions.create(model="tiny", prompt="a")
    seeds = [s.sampling.seed for s in stack.workers[0].submits]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_over_token_boundaries_ends_the_request_at_the_worker_too(stack: Stack, stream: bool) -> None:
    stack.workers[0].script = say("one STOP two")
    stack.workers[0].step_s = 0.02
    if stream:
        chunks = [
            c
            async for c in await stack.openai.chat.completions.create(
                model="tiny", messages=MESSAGES, stop=["STOP"], stream=True
            )
        ]
        text, reason = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        answer = await stack.openai.chat.completions.create(model="tiny", messages=MESSAGES, stop=["STOP"])
        text, reason = answer.choices[0].message.content or "", answer.choices[0].finish_reason
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len("one STOP")
    assert (text, reason) == ("one ", "stop")
    await stack.until(lambda: stack.workers[0].cancels)


async def test_stop_string_can_be_included(stack: Stack) -> None:
    stack.workers[0].script = say("one STOP two")
    answer = await stack.openai.completions.create(
        model="tiny", prompt="a", stop="STOP", extra_body={"include_stop_str_in_output": True}
    )
    assert answer.choices[0].text == "one STOP"


async def test_held_back_text_is_shown_when_the_stop_string_does_not_come(stack: Stack) -> None:
    stack.workers[0].script = say("one STO")
    answer = await stack.openai.completions.create(model="tiny", prompt="a", stop="STOP")
    assert answer.choices[0].text == "one STO"


async def test_characters_split_over_tokens_are_never_sent_in_halves(stack: Stack) -> None:
    text = "héllo 😀 𝄞 日本"
    stack.workers[0].script = say(text)
    stream = await stack.openai.completions.create(model="tiny", prompt="a", stream=True, max_tokens=64)
    pieces = [c.choices[0].text async for c in stream]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) == len(text.encode())


async def test_invalid_bytes_at_the_end_become_replacement_characters(stack: Stack) -> None:
    stack.workers[0].script = lambda submit: [*b"ok", 0xF0, 0x9F]
    stream = await stack.openai.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == "ok\ufffd"


async def test_end_token_is_counted_but_not_shown(stack: Stack) -> None:
    stack.workers[0].script = lambda submit: [*b"ok", EOS]
    answer = await stack.openai.completions.create(model="tiny", prompt="a", extra_body={"skip_special_tokens": False})
    assert answer.choices[0].text == "ok"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_echo_puts_the_prompt_first(stack: Stack) -> None:
    answer = await stack.openai.completions.create(model="tiny", prompt="ab", echo=True)
    assert answer.choices[0].text == "abhello"
    stream = await stack.openai.completions.create(model="tiny", prompt="ab", echo=True, stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == "abhello"


async def test_chat_logprobs(stack: Stack) -> None:
    stack.workers[0].logprobs = TokenLogprobs(logprob=-0.5, top=((104, -0.5), (105, float("-inf"))))
    stack.workers[0].script = say("h")
    answer = await stack.openai.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    [entry] = answer.choices[0].logprobs.content or []
    assert (entry.token, entry.logprob, entry.bytes) == ("h", -0.5, [104])
    assert [(t.token, t.logprob) for t in entry.top_logprobs] == [("h", -0.5), ("i", -9999.0)]
    assert stack.workers[0].submits[0].sampling.logprobs == 2


async def test_completion_logprobs(stack: Stack) -> None:
    stack.workers[0].logprobs = TokenLogprobs(logprob=-0.5, top=((104, -0.5),))
    stack.workers[0].script = say("hi")
    answer = await stack.openai.completions.create(model="tiny", prompt="a", logprobs=1)
    shown = answer.choices[0].logprobs
    assert shown is not None
    assert (shown.tokens, shown.token_logprobs, shown.text_offset) == (["h", "i"], [-0.5, -0.5], [0, 1])


async def test_models_are_listed_and_found(stack: Stack) -> None:
    models = [m.id async for m in stack.openai.models.list()]
    assert models == ["tiny"]
    assert (await stack.openai.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        await stack.openai.models.retrieve("other")
    assert caught.value.code == "model_not_found"


async def test_fields_that_say_nothing_of_the_answer_are_taken(stack: Stack) -> None:
    answer = await stack.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, user="me", store=True, metadata={"run": "7"}, service_tier="priority",
        safety_identifier="someone", logit_bias={"104": 100}, extra_body={"priority": -3},
    )  # fmt: skip
    assert answer.choices[0].message.content == "hello"
    assert stack.workers[0].submits[0].sampling.logit_bias == ((104, 100.0),)


async def test_errors_arrive_as_the_clients_own_classes(stack: Stack) -> None:
    with pytest.raises(openai.NotFoundError):
        await stack.openai.chat.completions.create(model="absent", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        await stack.openai.chat.completions.create(model="tiny", messages=MESSAGES, temperature=3)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_name_their_request(stack: Stack, stream: bool) -> None:
    raw = await stack.openai.completions.with_raw_response.create(model="tiny", prompt="a", stream=stream)
    answer = raw.parse()
    found = {chunk.id async for chunk in answer} if isinstance(answer, AsyncStream) else {answer.id}
    assert {raw.headers["x-request-id"]} == found


async def test_an_error_names_its_request_once_it_has_a_name(stack: Stack) -> None:
    [worker] = stack.workers
    worker.refuse_with = BadRequest("the worker knows better")
    with pytest.raises(openai.BadRequestError, match="knows better") as caught:
        await stack.openai.completions.create(model="tiny", prompt="a")
    assert (caught.value.request_id or "").startswith("cmpl-")


async def test_continuous_usage_counts_every_token(stack: Stack) -> None:
    stream = await stack.openai.completions.create(
        model="tiny", prompt="a", stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    counts = [c.usage.completion_tokens async for c in stream if c.usage]
    assert counts == [1, 2, 3, 4, 5, 5]


async def test_continuous_usage_begins_with_the_event_that_has_the_role(stack: Stack) -> None:
    stream = await stack.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    usages = [chunk.usage async for chunk in stream]
    assert [usage and usage.completion_tokens for usage in usages] == [0, 1, 2, 3, 4, 5, 5]
    assert len({usage.prompt_tokens for usage in usages if usage}) == 1


async def test_continuous_usage_is_part_of_include_usage(stack: Stack) -> None:
    stream = await stack.openai.completions.create(
        model="tiny", prompt="a", stream=True, stream_options={"continuous_usage_stats": True}
    )
    assert [c.usage async for c in stream] == [None] * 5


async def test_every_terminal_part_is_acknowledged(stack: Stack) -> None:
    await stack.openai.completions.create(model="tiny", prompt="a")
    await stack.until(lambda: stack.workers[0].acks)
    assert [a.request_id for a in stack.workers[0].acks] == [stack.workers[0].submits[0].request_id]


VLLM_BENCH = {
    "/v1/completions": {"prompt": "ab", "repetition_penalty": 1.0, "max_tokens": 5, "logprobs": None},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}],
        "max_completion_tokens": 5,
    },
}
"""What `vllm bench serve` asks for, beside the fields that both routes share."""


@pytest.mark.parametrize("route", VLLM_BENCH)
async def test_vllms_benchmark_finds_an_event_per_token_and_usage_at_the_end(stack: Stack, route: str) -> None:
    body = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    response = await stack.http.post(route, json=body | VLLM_BENCH[route])
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    usage = chunks.pop()
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 5)
    choices = [chunk["choices"][0] for chunk in chunks]
    # It takes every event that has no role for a token, and the first one for the first token.
    tokens = [c["text"] if "text" in c else c["delta"]["content"] for c in choices if "role" not in c.get("delta", {})]
    assert tokens == list("hello")
    assert stack.workers[0].submits[0].sampling.ignore_eos


AIPERF = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 5, "min_tokens": 5},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "ab"}],
        "max_completion_tokens": 5,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
}
"""What `aiperf profile` asks for (0.13; chat with `--per-chunk-usage`), beside the fields that both routes share."""


@pytest.mark.parametrize("route", AIPERF)
async def test_aiperf_finds_the_objects_that_it_knows_and_counts_of_the_servers(stack: Stack, route: str) -> None:
    body = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    response = await stack.http.post(route, json=body | AIPERF[route], headers={"Accept": "text/event-stream"})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    known = "text_completion" if route == "/v1/completions" else "chat.completion.chunk"
    assert {chunk["object"] for chunk in chunks} == {known}, "it takes no other for an answer"
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["prompt_tokens"] > 0
    texts = [c["text"] if "text" in c else c["delta"].get("content") for chunk in chunks for c in chunk["choices"]]
    assert "".join(text for text in texts if text) == "hello"
    if route == "/v1/chat/completions":
        worded = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["delta"].get("content")]
        assert [chunk["usage"]["completion_tokens"] for chunk in worded] == [1, 2, 3, 4, 5], "so far, with every word"
