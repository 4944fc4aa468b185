"""``/tokenize`` and ``/detokenize``: the ids that a request would have, without a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.gateway.http.tokenization import Detokenize, Tokenize
from services.gateway.tokenizer import ModelTokenizer
from tests.services.gateway.checkpoint import BOS, CONTEXT_TOKENS, EOS, VOCAB_SIZE, model_record, write_checkpoint
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.core.tools import templates
from tests.services.gateway.http.test_field_types import TOKENIZE_FIELDS, VALUES, faults
from tests.services.gateway.http.test_rate_limits import key, keys_file
from tests.services.gateway.http.test_refusals import CHAT, MESSAGES, TEXT, check
from tests.services.gateway.http.test_tools import stack_of
from tests.shared.bus.memory import MemoryBroker

TOOLS = [{"type": "function", "function": {"name": "f"}}]


async def tokenized(stack: Stack, **body: Any) -> dict[str, Any]:
    response = await stack.http.post(Tokenize.path, json={"model": "tiny", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["count"] == len(answer["tokens"])
    return answer


async def detokenized(stack: Stack, tokens: list[int]) -> str:
    response = await stack.http.post(Detokenize.path, json={"model": "tiny", "tokens": tokens})
    assert response.status_code == 200, response.text
    assert set(response.json()) == {"prompt"}
    return str(response.json()["prompt"])


async def test_a_prompt_becomes_the_ids_of_its_request(stack: Stack) -> None:
    answer = await tokenized(stack, prompt="héllo")
    assert answer == {
        "count": 7,
        "max_model_len": CONTEXT_TOKENS,
        "tokens": [BOS, *"héllo".encode()],
        "token_strs": None,
    }
    assert (await tokenized(stack, prompt="a b", add_special_tokens=False))["tokens"] == list(b"a b")
    assert (await tokenized(stack, prompt=""))["tokens"] == [BOS]
    await stack.http.post(TEXT, json={"model": "tiny", "prompt": "héllo"})
    [submit] = stack.workers[0].submits
    assert list(submit.prompt_token_ids) == answer["tokens"]


async def test_token_strings_are_those_of_the_vocabulary(stack: Stack) -> None:
    answer = await tokenized(stack, prompt="a é", return_token_strs=True)
    assert answer["token_strs"] == ["<s>", "a", "Ġ", "Ã", "©"]


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"add_generation_prompt": False},
        {"add_special_tokens": True},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"chat_template_kwargs": {"bos_token": "?"}},
        {"temperature": 0.5, "max_tokens": 9, "stream": True, "unheard_of": 1},
    ],
)
async def test_a_chat_has_the_ids_of_its_prompt(
    make_stack: StackFactory, tmp_path: Path, extra: dict[str, Any]
) -> None:
    stack = await stack_of(make_stack, tmp_path / "tools", "{{ bos_token }}" + templates.HERMES)
    answer = await tokenized(stack, messages=MESSAGES, **extra)
    await stack.http.post(CHAT, json={"model": "tiny", "messages": MESSAGES, **extra})
    [submit] = stack.workers[0].submits
    assert answer["tokens"] == list(submit.prompt_token_ids)


@pytest.mark.parametrize("text", ["", "a", "héllo 日本 😀", "\x00\x1f", "x" * 20_000])
async def test_ids_become_their_text_again(stack: Stack, text: str) -> None:
    tokens = (await tokenized(stack, prompt=text, add_special_tokens=False))["tokens"]
    assert await detokenized(stack, tokens) == text


async def test_special_tokens_are_shown_and_halves_of_characters_replaced(stack: Stack) -> None:
    assert await detokenized(stack, [BOS, 97, EOS]) == "<s>a</s>"
    assert await detokenized(stack, [97, 0xC3]) == "a\ufffd"
    assert await detokenized(stack, [VOCAB_SIZE - 1]) == "", "the model has it, the tokenizer does not"


async def test_they_work_while_the_model_sleeps(make_stack: StackFactory) -> None:
    stack = await make_stack(0)
    assert (await tokenized(stack, prompt="a"))["tokens"] == [BOS, 97]
    assert await detokenized(stack, [97]) == "a"


async def test_they_need_a_key_and_count_against_none_of_its_limits(make_stack: StackFactory, tmp_path: Path) -> None:
    limits = {"requests_per_minute": 1, "tokens_per_minute": 10, "max_concurrent_requests": 1}
    path = keys_file(tmp_path, key("a", **limits), key("b", models=["other"]))
    stack = await make_stack(keys_file=path)
    for route, body in ((Tokenize.path, {"prompt": "x" * 99}), (Detokenize.path, {"tokens": [97]})):
        body = {"model": "tiny", **body}
        check(await stack.http.post(route, json=body), 401, "authentication_error", "unauthorized")
        wrong = await stack.http.post(route, json=body, headers={"Authorization": "Bearer sk-b"})
        check(wrong, 403, "permission_error", "forbidden", "model")
        for _ in range(3):
            answer = await stack.http.post(route, json=body, headers={"Authorization": "Bearer sk-a"})
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-remaining-requests"] == "1"
            assert answer.headers["x-ratelimit-remaining-tokens"] == "10"


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (Tokenize.path, {}, "bad_request", "prompt"),
    (Tokenize.path, {"prompt": ["a"]}, "bad_request", "prompt"),
    (Tokenize.path, {"prompt": [1]}, "bad_request", "prompt"),
    (Tokenize.path, {"prompt": "a", "messages": MESSAGES}, "bad_request", "messages"),
    (Tokenize.path, {"messages": []}, "bad_request", "messages"),
    (Tokenize.path, {"prompt": "a", "return_token_strs": "yes"}, "bad_request", "return_token_strs"),
    (Tokenize.path, {"prompt": "a", "add_special_tokens": 1}, "bad_request", "add_special_tokens"),
    (Tokenize.path, {"messages": MESSAGES, "chat_template": "x"}, "unsupported_parameter", "chat_template"),
    (Tokenize.path, {"messages": MESSAGES, "tools": TOOLS}, "unsupported_parameter", "tools"),
    (Tokenize.path, {"prompt": "a", "truncate_prompt_tokens": 3}, "unsupported_parameter", "truncate_prompt_tokens"),
    (Tokenize.path, {"messages": MESSAGES, "continue_final_message": True}, "unsupported_parameter",
     "continue_final_message"),
    (Detokenize.path, {}, "bad_request", "tokens"),
    (Detokenize.path, {"tokens": "a"}, "bad_request", "tokens"),
    (Detokenize.path, {"tokens": [-1]}, "bad_request", "tokens"),
    (Detokenize.path, {"tokens": [VOCAB_SIZE]}, "bad_request", "tokens"),
    (Detokenize.path, {"tokens": [1.5]}, "bad_request", "tokens"),
    (Detokenize.path, {"tokens": [[1]]}, "bad_request", "tokens"),
    (Detokenize.path, {"tokens": [True]}, "bad_request", "tokens"),
    (Detokenize.path, {"tokens": [10**30]}, "bad_request", "tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "code", "param"), WRONG)
async def test_wrong_bodies_name_the_parameter(
    stack: Stack, path: str, body: dict[str, Any], code: str, param: str
) -> None:
    response = await stack.http.post(path, json={"model": "tiny", **body})
    check(response, 400, "invalid_request_error", code, param)


@pytest.mark.parametrize("path", [Tokenize.path, Detokenize.path])
async def test_models_methods_and_bodies_are_checked_as_elsewhere(stack: Stack, path: str) -> None:
    check(await stack.http.get(path), 405, "invalid_request_error", "method_not_allowed")
    check(await stack.http.post(path, json={}), 400, "invalid_request_error", "bad_request", "model")
    check(await stack.http.post(path, json={"model": "no"}), 404, "not_found_error", "model_not_found", "model")
    check(await stack.http.post(path, content=b"["), 400, "invalid_request_error", "bad_request")
    form = {"content-type": "application/x-www-form-urlencoded"}
    check(await stack.http.post(path, content=b"a=b", headers=form), 415, "invalid_request_error",
          "unsupported_media_type")  # fmt: skip
    stack.gateway.draining = True
    check(await stack.http.post(path, json={}), 503, "server_error", "unavailable")
    stack.gateway.draining = False


async def test_a_model_without_a_chat_template_has_no_chats(make_stack: StackFactory, tmp_path: Path) -> None:
    stack = await make_stack(record=model_record(write_checkpoint(tmp_path / "bare", chat_template=None)))
    response = await stack.http.post(Tokenize.path, json={"model": "tiny", "messages": MESSAGES})
    check(response, 400, "invalid_request_error", "bad_request", "messages")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (Tokenize.path, {"prompt": "x" * 2001}, "prompt"),
        (Tokenize.path, {"prompt": "\u00e9" * 1001}, "prompt"),
        (Tokenize.path, {"messages": [{"role": "user", "content": "x" * 1990}]}, "messages"),
        (Detokenize.path, {"tokens": [1] * 2001}, "tokens"),
    ],
)
async def test_what_no_request_could_hold_is_refused_before_it_is_tokenized(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    stack = await make_stack(broker=MemoryBroker(max_payload_bytes=2000))

    def touched(*_: Any, **__: Any) -> None:
        raise AssertionError("it reached the tokenizer")

    for name in ("encode_all", "decode", "text_bytes"):
        monkeypatch.setattr(ModelTokenizer, name, touched)
    response = await stack.http.post(path, json={"model": "tiny", **body})
    check(response, 413, "invalid_request_error", "payload_too_large", param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (Tokenize.path, {"prompt": "x" * 60_000}),
        (Tokenize.path, {"prompt": "x" * 20_000, "return_token_strs": True}),
        (Detokenize.path, {"tokens": [97] * 60_000}),
    ],
)
async def test_answers_count_as_memory_of_requests(make_stack: StackFactory, path: str, body: dict[str, Any]) -> None:
    stack = await make_stack(request_memory_bytes=2 * 2**20)
    response = await stack.http.post(path, json={"model": "tiny", **body})
    check(response, 429, "rate_limit_error", "overloaded")
    assert stack.gateway.request_memory.used_bytes == 0
    assert (await stack.http.post(path, json={"model": "tiny", "prompt": "a", "tokens": [97]})).status_code == 200


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:12])
async def test_no_json_value_in_any_field_is_a_fault(stack: Stack, value: Any) -> None:
    texts = [{"prompt": "a", name: value} for name in TOKENIZE_FIELDS]
    chats = [{"messages": MESSAGES, name: value} for name in TOKENIZE_FIELDS]
    assert await faults(stack, Tokenize.path, texts + chats) == []
    ids = [{"tokens": value}, {"tokens": [value]}, {"model": value, "tokens": [1]}]
    assert await faults(stack, Detokenize.path, ids) == []
