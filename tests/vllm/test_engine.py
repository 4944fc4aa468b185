"""Requests of a worker, served by vLLM with the worker's weights."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.gateway.http.prompt_logprobs import tokens_of
from services.worker.core.scheduling.gateways import Gone
from shared.errors import BadRequest, ContextLengthExceeded, EngineBroken, SentBack
from shared.messages.common import ErrorInfo
from shared.messages.generation import Grammar, PromptLogprobs
from tests.checkpoints import EOS_ID
from tests.vllm.conftest import CONTEXT_TOKENS, Serving, processes_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = [[1 + (7 * i + 3 * j) % 255 for j in range(3 + 9 * i)] for i in range(12)]
"""Without the token 0, which ``transformers`` takes for padding."""


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()  # type: ignore[no-any-return]


def greedy(model: torch.nn.Module, prompt: Sequence[int], num_tokens: int) -> list[int]:
    out = model.generate(  # type: ignore[operator]
        torch.tensor([list(prompt)]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0].tolist()[len(prompt) :]  # type: ignore[no-any-return]


async def test_greedy_tokens_are_those_of_the_model(serving: Serving, model: torch.nn.Module) -> None:
    for number, prompt in enumerate(PROMPTS):
        await serving.submit(f"greedy{number}", prompt, max_tokens=24)
    for number, prompt in enumerate(PROMPTS):
        assert (await serving.ends(f"greedy{number}")).finish_reason == "length"
        assert serving.tokens(f"greedy{number}") == greedy(model, prompt, 24)


async def test_logprobs_are_those_of_the_model(serving: Serving, model: torch.nn.Module) -> None:
    prompt = PROMPTS[3]
    tokens = await serving.run("logprobs", prompt, logprobs=3, max_tokens=8)
    expected = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0].float(), dim=-1)[len(prompt) - 1 :]
    logprobs = [one for part in serving.parts["logprobs"] for one in part.logprobs or ()]
    assert len(logprobs) == len(tokens)
    for row, token, said in zip(expected, tokens, logprobs, strict=False):
        assert said.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert [value for _, value in said.top] == pytest.approx(torch.topk(row, 3).values.tolist(), abs=1e-3)


async def test_drawn_tokens_are_those_of_the_seed_however_a_prompt_is_cut(serving: Serving) -> None:
    """A step has 2,048 tokens: of eight prompts at once some are computed in pieces, with nothing drawn behind them."""
    prompts = [[1 + (7 * i + 3 * j) % 255 for j in range(490)] for i in range(8)]
    how = {"temperature": 1.0, "max_tokens": 12}
    whole = [
        await serving.run(f"whole{seed}", prompt, seed=seed, scope=f"whole{seed}", **how)
        for seed, prompt in enumerate(prompts)
    ]
    for seed, prompt in enumerate(prompts):
        await serving.submit(f"cut{seed}", prompt, seed=seed, scope=f"cut{seed}", **how)
    for seed, tokens in enumerate(whole):
        await serving.ends(f"cut{seed}")
        assert serving.tokens(f"cut{seed}") == tokens
    assert not serving.failures


async def test_one_that_workers_died_with_is_computed_alone_and_others_go_on_behind_it(serving: Serving) -> None:
    whole = [await serving.run(f"undisturbed{n}", prompt, max_tokens=100) for n, prompt in enumerate(PROMPTS[:4])]
    for number, prompt in enumerate(PROMPTS[:3]):
        await serving.submit(f"beside{number}", prompt, max_tokens=100)
    while not all(f"beside{number}" in serving.parts for number in range(3)):
        await asyncio.sleep(0.005)
    await serving.submit("suspect", PROMPTS[3], max_tokens=100, alone_tokens=17)
    for number in range(3):
        assert (await serving.ends(f"beside{number}")).finish_reason == "length"
        assert serving.tokens(f"beside{number}") == whole[number]
    await serving.ends("suspect")
    assert serving.tokens("suspect") == whole[3]
    parts = serving.parts["suspect"]
    said = [index for index, part in enumerate(parts) if part.computing is not None]
    assert [parts[index].computing for index in said] == [True, False]
    assert (said[0], sum(len(part.token_ids) for part in parts[: said[1]])) == (0, 17)


async def test_no_request_waits_for_a_compiler(serving: Serving, compiled: Path) -> None:
    await serving.run("ranked", PROMPTS[3], logprobs=3, max_tokens=2)
    await serving.run("drawn", PROMPTS[3], temperature=1.0, top_k=5, top_p=0.9, max_tokens=2)
    await serving.run("scored-ranked", PROMPTS[3], prompt_logprobs=3, max_tokens=2)
    assert not await asyncio.to_thread(lambda: [file for file in compiled.rglob("*") if file.is_file()])


def check_scores(model: torch.nn.Module, prompt: Sequence[int], said: Sequence[PromptLogprobs], num_top: int) -> None:
    """Each position once, and all of them."""
    table = torch.log_softmax(model(torch.tensor([list(prompt)])).logits[0].float(), dim=-1)
    position = 1
    for piece in said:
        assert (piece.start, piece.num_top, piece.is_whole) == (position, num_top, True)
        for token in tokens_of(piece):
            row, own = table[token.position - 1], float(table[token.position - 1, prompt[token.position]])
            assert token.logprob == pytest.approx(own, abs=1e-3)
            # Of tokens that are as likely to within that, any may be before it.
            assert int((row > own + 1e-3).sum()) < token.rank <= int((row >= own - 1e-3).sum())
            assert [value for _, value in token.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-3)
            assert [float(row[token_id]) for token_id, _ in token.top] == pytest.approx(
                [value for _, value in token.top], abs=1e-3
            )
        position = piece.end
    assert position == len(prompt)


LONG = [[1 + (7 * i + 3 * j) % 255 for j in range(480 + i)] for i in range(8)]
"""Together more than a step's tokens: some are computed in several."""


async def test_those_of_prompts_are_those_of_the_model(serving: Serving, model: torch.nn.Module) -> None:
    for number, prompt in enumerate(LONG):
        await serving.submit(f"scored{number}", prompt, prompt_logprobs=number, max_tokens=1)
    for number, prompt in enumerate(LONG):
        assert (await serving.ends(f"scored{number}")).finish_reason == "length"
        check_scores(model, prompt, serving.scores[f"scored{number}"], number)
    await serving.run("unscored", LONG[0])
    assert "unscored" not in serving.scores


async def test_kv_is_found_by_those_of_its_scope_and_without_one_by_nobody(serving: Serving) -> None:
    found = []
    for number, scope in enumerate(("", "", "one key", "", "another key", "one key")):
        name = f"scope{number}"
        await serving.run(name, LONG[5], scope=scope)
        found.append(serving.parts[name][0].cached_tokens > 0)
    assert found == [False] * 5 + [True]


async def test_a_prompt_that_is_scored_is_computed_whatever_is_there_of_it(
    serving: Serving, model: torch.nn.Module
) -> None:
    tokens = await serving.run("before", LONG[3], scope="a key")
    assert await serving.run("amid", LONG[3], scope="a key", prompt_logprobs=20, logprobs=2) == tokens
    assert await serving.run("behind", LONG[3], scope="a key") == tokens
    assert [serving.parts[name][0].cached_tokens > 0 for name in ("amid", "behind")] == [False, True]
    check_scores(model, LONG[3], serving.scores["amid"], 20)
    logprobs = [one for part in serving.parts["amid"] for one in part.logprobs or ()]
    assert [len(one.top) for one in logprobs] == [2] * len(tokens)


@pytest.mark.parametrize("prompt", [PROMPTS[3], PROMPTS[3][:2], PROMPTS[3][:1]], ids=["long", "two", "one"])
async def test_an_answer_that_goes_on_has_those_of_its_prompt_alone(
    serving: Serving, model: torch.nn.Module, prompt: list[int]
) -> None:
    name = f"scored-cut{len(prompt)}"
    whole = await serving.run(name, prompt, prompt_logprobs=1)
    assert whole[:5] + await serving.run(f"{name}-on", prompt, output=whole[:5], prompt_logprobs=1) == whole
    for each in (name, f"{name}-on"):
        check_scores(model, prompt, serving.scores.get(each, ()), 1)


async def test_an_answer_with_a_grammar_has_them_too(serving: Serving, model: torch.nn.Module) -> None:
    grammar = Grammar(kind="choice", text='["yes", "no"]')
    chosen = await serving.run("scored-choice", PROMPTS[5], grammar=grammar, prompt_logprobs=2)
    assert bytes(chosen[:-1]) in (b"yes", b"no")
    check_scores(model, PROMPTS[5], serving.scores["scored-choice"], 2)


async def test_an_end_token_ends_it_and_is_put_out(serving: Serving) -> None:
    tokens = await serving.run("without", PROMPTS[2], max_tokens=24)
    place = next(i for i, token in enumerate(tokens) if token not in tokens[:i] and i > 2)
    assert await serving.run("with", PROMPTS[2], max_tokens=24, stops=(tokens[place],)) == tokens[: place + 1]
    assert serving.parts["with"][-1].finish_reason == "stop"
    heeded = await serving.run("min", PROMPTS[2], max_tokens=24, stops=(tokens[place],), min_tokens=place + 4)
    assert len(heeded) > place + 4
    assert heeded[:place] == tokens[:place]
    assert EOS_ID not in tokens


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"presence_penalty": 1.3, "frequency_penalty": 0.6},
        {"repetition_penalty": 1.3},
        {"presence_penalty": -0.8, "repetition_penalty": 1.2, "min_tokens": 20},
        {"logit_bias": ((7, 5.0), (9, -100.0))},
    ],
    ids=["greedy", "penalties", "repetition", "all", "bias"],
)
async def test_an_answer_goes_on_where_it_was_cut(serving: Serving, how: dict[str, object]) -> None:
    name, prompt = f"cut-{sorted(how)}", PROMPTS[4]
    whole = await serving.run(name, prompt, max_tokens=24, **how)
    for cut in (1, 7, 23):
        rest = await serving.run(f"{name}-{cut}", prompt, output=whole[:cut], max_tokens=24, **how)
        assert whole[:cut] + rest == whole
        assert serving.parts[f"{name}-{cut}"][0].offset == cut


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 2, "maxItems": 5},
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "presence_penalty": 0.5}], ids=["greedy", "drawn"])
async def test_an_answer_with_a_grammar_follows_it_also_where_it_goes_on(
    serving: Serving, how: dict[str, object]
) -> None:
    how = {"max_tokens": 150, "grammar": Grammar(kind="json_schema", text=SCHEMA), **how}
    name, prompt = f"guided-{len(how)}", PROMPTS[4]
    whole = await serving.run(name, prompt, **how)
    assert serving.parts[name][-1].finish_reason == "stop"
    jsonschema.validate(json.loads(bytes(whole[:-1])), json.loads(SCHEMA))
    assert whole[-1] == EOS_ID
    for cut in (1, 9, len(whole) - 2, len(whole) - 1):
        rest = await serving.run(f"{name}-{cut}", prompt, output=whole[:cut], **how)
        jsonschema.validate(json.loads(bytes((whole[:cut] + rest)[:-1])), json.loads(SCHEMA))
        assert "temperature" in how or whole[:cut] + rest == whole


async def test_an_answer_with_a_grammar_is_as_long_as_it_may_be(serving: Serving) -> None:
    digits = Grammar(kind="regex", text="[0-9]{2,20}")
    at_least = await serving.run("digits", PROMPTS[1], grammar=digits, min_tokens=15, max_tokens=100)
    assert len(at_least) > 15
    assert set(at_least[:-1]) <= set(b"0123456789")
    longest = await serving.run("ignored", PROMPTS[1], grammar=digits, ignore_eos=True, max_tokens=100)
    assert (len(longest), longest[-1]) == (21, EOS_ID), "a complete one ends, whatever else was asked for"
    chosen = await serving.run("chosen", PROMPTS[1], grammar=Grammar(kind="choice", text='["yes", "no"]'))
    assert bytes(chosen[:-1]) in (b"yes", b"no")


async def test_a_grammar_that_fails_ends_its_request_alone(serving: Serving) -> None:
    await serving.submit("beside", PROMPTS[2], max_tokens=100)
    await serving.submit("none", PROMPTS[2], grammar=Grammar(kind="lark", text="start: start"))
    end = await serving.ends("none")
    assert end.error is not None
    assert end.error.code == BadRequest.code
    with pytest.raises(BadRequest, match="response_format"):
        await serving.submit("no-schema", PROMPTS[2], grammar=Grammar(kind="json_schema", text="[1]"))
    await serving.submit("not-its-own", PROMPTS[2], output=[65, 66], grammar=Grammar(kind="regex", text="[0-9]+"))
    end = await serving.ends("not-its-own")
    assert end.error is not None
    assert (await serving.ends("beside")).finish_reason == "length"


async def test_a_limit_that_one_answer_meets_is_not_the_others(serving: Serving) -> None:
    costly = Grammar(kind="regex", text="((a|b|ab|ba|aab){1,1000}c?){1,1000}")
    bias = ((ord("c"), -100.0),)
    await serving.submit(
        "costly", [1, 2], grammar=costly, min_tokens=499, max_tokens=500, temperature=1.0, logit_bias=bias
    )
    end = await serving.ends("costly")
    assert end.error is not None
    assert end.error.code == BadRequest.code
    for number in range(3):
        await serving.run(f"after{number}", [1, 2], grammar=costly, min_tokens=6, max_tokens=6)
        assert serving.parts[f"after{number}"][-1].finish_reason == "length"


async def test_an_answer_with_a_grammar_heeds_its_own_stops(serving: Serving) -> None:
    digits = Grammar(kind="regex", text="[0-9]{30}")
    stops = tuple(range(ord("0"), ord("9")))
    early = await serving.run("early", PROMPTS[1], grammar=digits, stop_token_ids=stops, max_tokens=100)
    late = await serving.run("late", PROMPTS[1], grammar=digits, stop_token_ids=stops, min_tokens=10, max_tokens=100)
    assert len(early) < 10 < len(late)
    assert late[:9] == [ord("9")] * 9


async def test_what_has_no_room_is_refused_and_what_has_ended_ends(serving: Serving) -> None:
    with pytest.raises(ContextLengthExceeded):
        await serving.submit("long", [1] * CONTEXT_TOKENS)
    await serving.submit("ended", PROMPTS[0], output=PROMPTS[1][:4], max_tokens=4)
    end = await serving.ends("ended")
    assert (end.finish_reason, end.offset, end.token_ids) == ("length", 4, ())
    fills = await serving.run("fills", [1] * (CONTEXT_TOKENS - 3), max_tokens=100)
    assert len(fills) == 3


async def test_one_that_is_to_be_longer_than_there_is_room_for_ends_there(serving: Serving) -> None:
    await serving.submit("long", PROMPTS[0], max_tokens=9000, min_tokens=9000)
    assert (await serving.ends("long")).finish_reason == "length"
    assert len(serving.tokens("long")) + len(PROMPTS[0]) == CONTEXT_TOKENS


async def test_what_vllm_does_not_begin_no_other_vllm_is_asked_for(serving: Serving) -> None:
    await serving.submit("refused", PROMPTS[0], logprobs=1_000_000)
    end = await serving.ends("refused")
    assert end.error is not None
    assert end.error.code == BadRequest.code
    assert "vLLM refuses this" in end.error.message
    await serving.run("later", PROMPTS[0])


async def test_what_is_cancelled_says_nothing_more(serving: Serving) -> None:
    await serving.submit("cancelled", PROMPTS[1], max_tokens=400)
    assert await asyncio.wrap_future(serving.engine.cancel("cancelled", 1))
    assert not await asyncio.wrap_future(serving.engine.cancel("cancelled", 1))
    before = len(serving.parts.get("cancelled", ()))
    await asyncio.sleep(0.5)
    assert len(serving.parts.get("cancelled", ())) == before
    await serving.submit("orphan", PROMPTS[1], max_tokens=400)
    assert await asyncio.wrap_future(serving.engine.cancel_gateway(Gone("g", "", others=False))) == 1
    assert await asyncio.wrap_future(serving.engine.count_requests()) == 0


async def test_requests_go_back_with_what_they_have_put_out(serving: Serving, model: torch.nn.Module) -> None:
    await serving.submit("back", PROMPTS[5], max_tokens=300)
    while len(serving.parts.get("back", ())) < 3:
        await asyncio.sleep(0.01)
    goes = ErrorInfo.of(SentBack("it goes", retry_after_s=0.0))
    assert await asyncio.wrap_future(serving.engine.see_off(1e9, "none", goes)) == []
    assert await asyncio.wrap_future(serving.engine.see_off(1e9, "all", goes)) == []
    end = await serving.ends("back")
    assert end.error == goes
    tokens = serving.tokens("back")
    assert end.offset == len(tokens)
    rest = await serving.run("went", PROMPTS[5], output=tokens, max_tokens=len(tokens) + 10)
    assert tokens + rest == greedy(model, PROMPTS[5], len(tokens) + 10)


async def test_its_load_is_said(serving: Serving) -> None:
    await serving.run("counted", PROMPTS[0], max_tokens=5)
    await asyncio.sleep(0.3)
    load = serving.engine.stats().load
    assert (load.running_requests, load.queued_requests) == (0, 0)
    assert load.ended_requests_total > 0
    assert load.decode_tokens_total > 5
    assert load.kv_blocks_total == 128


async def test_its_speed_is_that_of_its_steps(serving: Serving) -> None:
    await asyncio.gather(*(serving.run(f"fast{i}", [i + 1] * 300, max_tokens=40) for i in range(4)))
    await serving.run("alone", PROMPTS[3], max_tokens=40)
    await asyncio.sleep(0.3)
    speed = serving.engine.stats().speed
    prompt = [2, *[9] * 399]
    began_s = time.monotonic()
    await serving.run("prefill", prompt, max_tokens=1)
    prefill_s = time.monotonic() - began_s
    assert len(prompt) / prefill_s < 2 * speed.prefill_tokens_per_s
    assert speed.prefill_tokens_per_s < 20 * len(prompt) / prefill_s
    began_s = time.monotonic()
    await serving.run("decode", PROMPTS[3], max_tokens=41)
    decode_s = (time.monotonic() - began_s) / 40
    assert 0.2 * decode_s < speed.decode_base_s + speed.decode_request_s < 2 * decode_s
    assert speed.decode_tokens_per_s > 0


async def test_killed_it_is_noticed_and_nothing_of_it_stays(serving: Serving) -> None:
    """The last one: it ends the module's engine."""
    started = processes_of(serving.engine)
    assert len(started) > 1
    await serving.submit("dies", PROMPTS[1], max_tokens=400)
    killed_s = time.monotonic()
    os.kill(max(pid for pid in started if pid != serving.engine.pid), signal.SIGKILL)
    end = await serving.ends("dies")
    assert time.monotonic() - killed_s < 5.0
    assert end.error is not None
    assert end.error.code == EngineBroken.code
    assert [type(error) for error in serving.failures] == [EngineBroken]
    with pytest.raises(EngineBroken):
        await asyncio.wrap_future(serving.engine.count_requests())
    assert await asyncio.to_thread(serving.engine.join, 30.0)
    assert processes_of(serving.engine) == []
