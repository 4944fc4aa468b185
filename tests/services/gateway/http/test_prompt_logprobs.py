"""Log-probabilities of the prompt: what clients get of what workers say, also where a part of that is lost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from services.gateway.http import preparation
from shared.errors import UnsupportedParameter
from shared.messages.generation import TokenLogprobs
from tests.services.gateway.cluster import say
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.http.test_refusals import CHAT, MESSAGES, TEXT, check

PROMPT = "a prompt"
IDS = list(PROMPT.encode())


def own(position: int, ids: list[int] = IDS) -> float:
    """What the fake workers say of the prompt's token there."""
    return -((ids[position] * 31 + position) % 1000) / 100


def expected_list(num_top: int, ids: list[int] = IDS) -> list[Any]:
    def alternative(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = bytes([token_id]).decode("utf-8", "replace") if token_id < 256 else ""
        return {"logprob": pytest.approx(logprob), "rank": rank, "decoded_token": text}

    entries: list[Any] = [None]
    for position in range(1, len(ids)):
        entry = {str(ids[position]): alternative(ids[position], own(position, ids), 1)}
        for place in range(num_top):
            token_id = ids[position] + place
            entry[str(token_id)] = alternative(token_id, own(position, ids) - place, place + 1)
        entries.append(entry)
    return entries


async def complete(stack: Stack, **body: Any) -> dict[str, Any]:
    response = await stack.http.post(TEXT, json={"model": "tiny", "prompt": IDS, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(stack: Stack, **body: Any) -> list[dict[str, Any]]:
    response = await stack.http.post(TEXT, json={"model": "tiny", "prompt": IDS, "stream": True, **body})
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def check_echo(logprobs: dict[str, Any], output: str, num_top: int) -> None:
    """Of the prompt and an output, of which each token's is -0.5."""
    assert logprobs["tokens"] == list(PROMPT + output)
    assert logprobs["token_logprobs"][0] is None
    expected = [*(own(position) for position in range(1, len(IDS))), *[-0.5] * len(output)]
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected)
    assert logprobs["text_offset"] == list(range(len(PROMPT + output)))
    assert logprobs["top_logprobs"][0] is None
    for position in range(1, len(IDS)):
        top = {chr(IDS[position] + place): own(position) - place for place in range(max(1, num_top))}
        assert logprobs["top_logprobs"][position] == pytest.approx(top)
    assert logprobs["top_logprobs"][len(IDS) :] == [{token: -0.5} for token in output]


@pytest.fixture
def hi(stack: Stack) -> Stack:
    stack.workers[0].script = say("hi")
    stack.workers[0].logprobs = TokenLogprobs(logprob=-0.5, top=())
    return stack


async def test_echo_has_the_prompts_log_probabilities_before_the_outputs(hi: Stack) -> None:
    answer = await complete(hi, echo=True, logprobs=2)
    [choice] = answer["choices"]
    assert choice["text"] == PROMPT + "hi"
    check_echo(choice["logprobs"], "hi", 2)
    assert "prompt_logprobs" not in choice
    assert answer["usage"]["completion_tokens"] == 2
    [submit] = hi.workers[0].submits
    assert (submit.sampling.prompt_logprobs, submit.sampling.logprobs) == (2, 2)


async def test_a_token_that_is_put_before_a_text_takes_no_place_in_it(hi: Stack) -> None:
    [choice] = (await complete(hi, prompt="a <s>é!", echo=True, logprobs=0, max_tokens=1))["choices"]
    assert choice["text"] == "a <s>é!h"
    assert choice["logprobs"]["tokens"] == ["<s>", "a", " ", "<s>", "\ufffd", "\ufffd", "!", "h"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 5, 5, 6, 7]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_tokens_is_the_prompt(hi: Stack, stream: bool) -> None:
    if stream:
        *_, last = await events(hi, echo=True, logprobs=0, max_tokens=0)
        [choice] = last["choices"]
    else:
        answer = await complete(hi, echo=True, logprobs=0, max_tokens=0)
        [choice] = answer["choices"]
        assert answer["usage"] == {
            "prompt_tokens": 8, "completion_tokens": 0, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 0}
        }  # fmt: skip
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    check_echo(choice["logprobs"], "", 0)
    assert hi.workers[0].submits[0].sampling.max_tokens == 1


async def test_without_log_probabilities_the_prompt_is_echoed_alone(hi: Stack) -> None:
    [choice] = (await complete(hi, echo=True, max_tokens=0))["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == (PROMPT, None, "length")
    assert hi.workers[0].submits[0].sampling.prompt_logprobs is None


async def test_what_a_loglikelihood_is_made_of(hi: Stack) -> None:
    """As lm-eval sends it, and reads it."""
    prompts = [IDS, list(b"other")]
    answer = await complete(hi, prompt=prompts, max_tokens=1, temperature=0, logprobs=1, seed=1234, echo=True)
    for ids, choice in zip(prompts, answer["choices"], strict=True):
        shown = choice["logprobs"]
        assert shown["token_logprobs"][1:-1] == pytest.approx([own(i, ids) for i in range(1, len(ids))])
        assert len(shown["token_logprobs"]) == len(shown["top_logprobs"]) == len(ids) + 1
        best = [max(top.values()) for top in shown["top_logprobs"][1:-1]]
        assert best == shown["token_logprobs"][1:-1], "greedy"


async def test_a_streams_first_event_has_the_prompt(hi: Stack) -> None:
    first, *rest = await events(hi, echo=True, logprobs=1)
    [choice] = first["choices"]
    assert choice["text"] == PROMPT + "h"
    check_echo(choice["logprobs"], "h", 1)
    assert [event["choices"][0]["text"] for event in rest] == ["i"]
    assert rest[0]["choices"][0]["logprobs"]["text_offset"] == [len(PROMPT) + 1]
    await hi.until(lambda: hi.gateway.response_memory.used_bytes == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_has_them(hi: Stack, stream: bool) -> None:
    if stream:
        firsts: dict[int, Any] = {}
        for event in await events(hi, echo=True, logprobs=1, n=3):
            firsts.setdefault(event["choices"][0]["index"], event["choices"][0])
        assert sorted(firsts) == [0, 1, 2]
        for choice in firsts.values():
            check_echo(choice["logprobs"], "h", 1)
        return
    for choice in (await complete(hi, echo=True, logprobs=1, n=3))["choices"]:
        check_echo(choice["logprobs"], "hi", 1)


@pytest.mark.parametrize("num_top", [0, 2, 20])
async def test_prompt_logprobs_of_completions_are_each_choices(hi: Stack, num_top: int) -> None:
    answer = await complete(hi, prompt=[IDS, list(b"other")], prompt_logprobs=num_top, n=2)
    for index, choice in enumerate(answer["choices"]):
        ids = IDS if index < 2 else list(b"other")
        assert choice["prompt_logprobs"] == expected_list(num_top, ids)
        assert next(iter(choice["prompt_logprobs"][1])) == str(ids[1]), "the prompt's own comes first"
        assert (choice["text"], choice["logprobs"]) == ("hi", None)
    asked = sorted(s.sampling.prompt_logprobs is not None for s in hi.workers[0].submits)
    assert asked == [False, False, True, True], "computed once for each prompt"


async def test_prompt_logprobs_of_a_chat_are_the_answers(hi: Stack) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "prompt_logprobs": 1, "n": 2}
    response = await hi.http.post(CHAT, json=body)
    answer = response.json()
    ids = list(hi.workers[0].submits[0].prompt_token_ids)
    assert answer["prompt_logprobs"] == expected_list(1, ids)
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])


async def test_both_ask_for_the_larger_number_and_each_has_its_own(hi: Stack) -> None:
    [choice] = (await complete(hi, echo=True, logprobs=1, prompt_logprobs=3))["choices"]
    assert choice["prompt_logprobs"] == expected_list(3)
    assert hi.workers[0].submits[0].sampling.prompt_logprobs == 3


async def test_a_prompt_of_one_token_has_null_alone(hi: Stack) -> None:
    [choice] = (await complete(hi, prompt=[97], echo=True, logprobs=1, prompt_logprobs=1))["choices"]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]


@pytest.mark.parametrize("lost", [{1}, {4}, {7}, {1, 4, 7}])
async def test_what_is_lost_is_asked_for_again(hi: Stack, lost: set[int]) -> None:
    hi.workers[0].loses = set(lost)
    [choice] = (await complete(hi, echo=True, logprobs=1, prompt_logprobs=2))["choices"]
    assert choice["text"] == PROMPT + "hi"
    assert choice["prompt_logprobs"] == expected_list(2)
    assert [resend.prompt_offset for resend in hi.workers[0].resends][:1] == [min(lost)]


async def test_another_attempt_computes_the_prompt_again_and_each_position_counts_once(
    make_stack: StackFactory,
) -> None:
    stack = await make_stack(num_workers=2)
    for worker in stack.workers:
        worker.script, worker.logprobs = say("hi"), TokenLogprobs(logprob=-0.5, top=())
        worker.prompt_pages = 2
    answering = asyncio.create_task(complete(stack, echo=True, logprobs=2))
    await stack.until(lambda: any(worker.submits for worker in stack.workers))
    first = next(worker for worker in stack.workers if worker.submits)
    [other] = [worker for worker in stack.workers if worker is not first]
    other.prompt_pages, other.prompt_page = None, 2
    await stack.until(lambda: [r.stream.prompt_offset for r in stack.gateway.dispatcher.requests.all()] == [7])
    await first.stop()
    stack.pool.workers.remove(first)
    await stack.pool.publish()
    [choice] = (await answering)["choices"]
    check_echo(choice["logprobs"], "hi", 2)
    [again] = other.submits
    assert (again.sampling.prompt_logprobs, again.output_token_ids) == (2, ())


async def test_an_attempt_behind_the_first_token_asks_for_nothing_of_the_prompt(make_stack: StackFactory) -> None:
    stack = await make_stack(num_workers=2)
    for worker in stack.workers:
        worker.script, worker.pause_after = say("hi"), 1
        worker.logprobs = TokenLogprobs(logprob=-0.5, top=())
    answering = asyncio.create_task(complete(stack, echo=True, logprobs=2))
    await stack.until(lambda: any(worker.submits for worker in stack.workers))
    await stack.received(1)
    first = next(worker for worker in stack.workers if worker.submits)
    [other] = [worker for worker in stack.workers if worker is not first]
    await first.stop()
    stack.pool.workers.remove(first)
    await stack.pool.publish()
    [choice] = (await answering)["choices"]
    check_echo(choice["logprobs"], "hi", 2)
    assert other.submits[0].sampling.prompt_logprobs is None


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    (TEXT, "prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    (TEXT, "prompt_logprobs", {"prompt_logprobs": 21}),
    (TEXT, "prompt_logprobs", {"prompt_logprobs": -1}),
    (TEXT, "prompt_logprobs", {"prompt_logprobs": "1"}),
    (TEXT, "logprobs", {"logprobs": 21, "echo": True}),
    (TEXT, "max_tokens", {"max_tokens": 0}),
    (TEXT, "max_tokens", {"max_tokens": 0, "echo": False}),
    (TEXT, "max_tokens", {"max_tokens": -1, "echo": True}),
    (TEXT, "min_tokens", {"max_tokens": 0, "echo": True, "min_tokens": 1}),
    (CHAT, "prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    (CHAT, "prompt_logprobs", {"prompt_logprobs": 21}),
    (CHAT, "max_tokens", {"max_tokens": 0}),
]


@pytest.mark.parametrize(("route", "param", "extra"), REFUSED)
async def test_what_is_not_to_be_had_is_refused_by_name(
    stack: Stack, route: str, param: str, extra: dict[str, Any]
) -> None:
    what = {"prompt": PROMPT} if route == TEXT else {"messages": MESSAGES}
    response = await stack.http.post(route, json={"model": "tiny", **what, **extra})
    check(response, 400, "invalid_request_error", "bad_request", param)
    assert stack.workers[0].submits == []


async def test_with_stream_zero_is_none(hi: Stack) -> None:
    assert len(await events(hi, prompt_logprobs=0)) == 2
    assert hi.workers[0].submits[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize(
    ("param", "extra"),
    [
        ("logprobs", {"echo": True, "logprobs": 2}),
        ("logprobs", {"echo": True, "logprobs": 2, "max_tokens": 0, "stream": True}),
        ("prompt_logprobs", {"prompt_logprobs": 2}),
    ],
)
async def test_more_than_the_bound_is_refused_and_what_it_holds_is_not(
    hi: Stack, monkeypatch: pytest.MonkeyPatch, param: str, extra: dict[str, Any]
) -> None:
    monkeypatch.setattr(preparation, "MAX_PROMPT_LOGPROBS_BYTES", 16 * len(IDS) * 3)
    response = await hi.http.post(TEXT, json={"model": "tiny", "prompt": IDS, **extra})
    assert response.status_code == 200
    for more in ({"prompt": [*IDS, 1]}, {"prompt": [IDS, [1]]}, {"n": 2, "prompt_logprobs": 3}):
        response = await hi.http.post(TEXT, json={"model": "tiny", "prompt": IDS, **extra, **more})
        check(response, 400, "invalid_request_error", "bad_request", "prompt_logprobs" if "n" in more else param)


async def test_an_engine_without_them_is_a_refusal(stack: Stack) -> None:
    stack.workers[0].refuse_with = UnsupportedParameter("prompt_logprobs: the engine has none", param="prompt_logprobs")
    response = await stack.http.post(TEXT, json={"model": "tiny", "prompt": PROMPT, "prompt_logprobs": 1})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_parameter"


async def test_others_ask_for_nothing(hi: Stack) -> None:
    await complete(hi, echo=True)
    await complete(hi, logprobs=1)
    assert [submit.sampling.prompt_logprobs for submit in hi.workers[0].submits] == [None, None]
