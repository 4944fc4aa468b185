"""Every refused input: status, OpenAI error shape, and the parameter that is at fault."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from services.gateway.chat_template import ChatTemplate
from tests.services.gateway.checkpoint import model_record, write_checkpoint
from tests.services.gateway.conftest import Stack, StackFactory

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def check(response: httpx.Response, status: int, kind: str, code: str, param: str | None = None) -> str:
    """The error's message, after checking all else."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (response.status_code, error["type"], error["code"], error["param"]) == (status, kind, code, param)
    return str(error["message"])


UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("tool_choice", {"tool_choice": "nonsense"}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("response_format", {"response_format": {"type": "structural_tag"}}),
    ("best_of", {"best_of": 3}),
    ("audio", {"audio": {"voice": "x"}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("prediction", {"prediction": {"type": "content", "content": "x"}}),
    ("guided_whitespace_pattern", {"guided_whitespace_pattern": " "}),
    ("chat_template", {"chat_template": "{{ 1 }}"}),
    ("suffix", {"suffix": "end"}),
]


@pytest.mark.parametrize(("param", "extra"), UNSUPPORTED)
async def test_known_but_unsupported_parameters_are_named(stack: Stack, param: str, extra: dict[str, Any]) -> None:
    response = await stack.http.post(CHAT, json={"model": "tiny", "messages": MESSAGES, **extra})
    check(response, 400, "invalid_request_error", "unsupported_parameter", param)
    assert not stack.workers[0].submits


async def test_images_are_unsupported(stack: Stack) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}, image]}]
    response = await stack.http.post(CHAT, json={"model": "tiny", "messages": messages})
    where = "messages[0].content[1]"
    check(response, 400, "invalid_request_error", "unsupported_parameter", where)


HARMLESS: list[dict[str, Any]] = [
    {"tools": []},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    {"functions": [{"name": "f"}], "function_call": "none"},
    {"stop": []},
    {"stop": ["unheard of"]},
    {"tool_choice": "none"},
    {"tool_choice": "auto"},
    {"response_format": {"type": "text"}},
    {"n": 1},
    {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "unheard_of": [1]},
    {"modalities": ["text"]},
    {"store": True, "service_tier": "flex", "user": "", "metadata": None, "safety_identifier": "s"},
    {"metadata": {"a": "b" * 512}, "reasoning_effort": "low", "verbosity": "low", "prompt_cache_retention": "24h"},
    {"logit_bias": {"0": -100, "299": 100}},
    {"priority": -5},
    {"temperature": None, "stop": None, "max_tokens": None},
]


@pytest.mark.parametrize("extra", HARMLESS)
async def test_harmless_and_unknown_parameters_are_ignored(stack: Stack, extra: dict[str, Any]) -> None:
    response = await stack.http.post(CHAT, json={"model": "tiny", "messages": MESSAGES, **extra})
    assert response.status_code == 200


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": True}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.5}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 1.5}),
    ("frequency_penalty", {"frequency_penalty": 2.5}),
    ("presence_penalty", {"presence_penalty": -2.5}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("seed", {"seed": 2**63}),
    ("seed", {"seed": "x"}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": "many"}),
    ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ("stop", {"stop": [1]}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": ["end", ""]}),
    ("stop", {"stop": "x" * 1025}),
    ("stop", {"stop": ["x"] * 65}),
    ("stop_token_ids", {"stop_token_ids": [300]}),
    ("stop_token_ids", {"stop_token_ids": "a"}),
    ("logit_bias", {"logit_bias": {"300": 1}}),
    ("logit_bias", {"logit_bias": {"x": 1}}),
    ("logit_bias", {"logit_bias": {"1": 101}}),
    ("logit_bias", {"logit_bias": {"\u00b2": 1}}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream": True, "stream_options": 1}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
    ("n", {"n": 0}),
    ("priority", {"priority": 2**63}),
    ("priority", {"priority": -(2**63) - 1}),
    ("priority", {"priority": 0.5}),
    ("priority", {"priority": "high"}),
    ("priority", {"priority": True}),
    ("logit_bias", {"logit_bias": {"1": -100.5}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {"1": "x"}}),
    ("ignore_eos", {"ignore_eos": 1}),
    ("skip_special_tokens", {"skip_special_tokens": "no"}),
]


@pytest.mark.parametrize(("param", "extra"), WRONG)
async def test_wrong_types_and_ranges_name_the_parameter(stack: Stack, param: str, extra: dict[str, Any]) -> None:
    response = await stack.http.post(TEXT, json={"model": "tiny", "prompt": "a", **extra})
    check(response, 400, "invalid_request_error", "bad_request", param)


CHAT_WRONG: list[tuple[str, dict[str, Any]]] = [
    ("messages", {}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages[0]", {"messages": ["hi"]}),
    ("messages[0].role", {"messages": [{"content": "x"}]}),
    ("messages[0].role", {"messages": [{"role": "king", "content": "x"}]}),
    ("messages[0].role", {"messages": [{"role": 3, "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
    ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("top_logprobs", {"messages": MESSAGES, "top_logprobs": 2}),
    ("top_logprobs", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}),
    ("logprobs", {"messages": MESSAGES, "logprobs": 3}),
    ("max_completion_tokens", {"messages": MESSAGES, "max_completion_tokens": 0}),
    ("chat_template_kwargs", {"messages": MESSAGES, "chat_template_kwargs": 1}),
    ("chat_template_kwargs.messages", {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}),
    ("chat_template_kwargs.tools", {"messages": MESSAGES, "chat_template_kwargs": {"a": 1, "tools": None}}),
    ("chat_template_kwargs.chat_template", {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "a"}}),
    ("reasoning_effort", {"messages": MESSAGES, "reasoning_effort": "max"}),
    ("reasoning_effort", {"messages": MESSAGES, "reasoning_effort": 1}),
    ("messages[0].reasoning_content", {"messages": [{**MESSAGES[0], "reasoning_content": 1}]}),
    ("messages[0].reasoning", {"messages": [{**MESSAGES[0], "reasoning": ["a"]}]}),
]


@pytest.mark.parametrize(("param", "body"), CHAT_WRONG)
async def test_wrong_chat_bodies_name_the_parameter(stack: Stack, param: str, body: dict[str, Any]) -> None:
    response = await stack.http.post(CHAT, json={"model": "tiny", **body})
    check(response, 400, "invalid_request_error", "bad_request", param)


@pytest.mark.parametrize("prompt", [None, "", [], [""], [[]], [300], [-1], [1, "a"], 3, [True], [["a"]], [{}]])
async def test_wrong_prompts_are_refused(stack: Stack, prompt: Any) -> None:
    response = await stack.http.post(TEXT, json={"model": "tiny", "prompt": prompt})
    check(response, 400, "invalid_request_error", "bad_request", "prompt")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": "tiny", "a": "\\ud800"}', b"[" * 9999]
)
async def test_bodies_that_are_not_json_objects_are_refused(stack: Stack, body: bytes) -> None:
    check(await stack.http.post(CHAT, content=body), 400, "invalid_request_error", "bad_request")


@pytest.mark.parametrize(
    ("body", "param", "shown"),
    [
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', "messages", "\\ud800 at byte 60"),
        (b'{"user": "\\\\ud800 \\ud83d\\ude00", "stop": ["\\udC00 a"], "messages": []}', "stop", "\\udC00 at byte 43"),
        (b'{"user": "\\ud83d\\ud83d\\ude00"}', None, "\\ud83d at byte 10"),
        (b'{"stop": "\\ud83d", 5', None, "\\ud83d at byte 10"),
    ],
)
async def test_half_of_a_surrogate_pair_is_shown_and_its_field_named(
    stack: Stack, body: bytes, param: str | None, shown: str
) -> None:
    response = await stack.http.post(CHAT, content=body)
    assert shown in check(response, 400, "invalid_request_error", "bad_request", param)


async def test_a_wrong_value_that_cannot_be_shown_is_refused_all_the_same(stack: Stack) -> None:
    for value in (b'["", "\x97"]', b'["", 1e999]', b"[" * 300 + b"]" * 300):
        body = b'{"model": "tiny", "messages": ' + value + b"}"
        message = check(
            await stack.http.post(CHAT, content=body), 400, "invalid_request_error", "bad_request", "messages[0]"
        )
        assert "must be an object" in message


@pytest.mark.parametrize("model", [None, 3, ""])
async def test_a_model_name_is_required(stack: Stack, model: Any) -> None:
    response = await stack.http.post(CHAT, json={"model": model, "messages": MESSAGES})
    check(response, 400, "invalid_request_error", "bad_request", "model")


async def test_prompt_and_output_must_fit_the_context(stack: Stack) -> None:
    code = "context_length_exceeded"
    long = await stack.http.post(TEXT, json={"model": "tiny", "prompt": "x" * 300})
    message = check(long, 400, "invalid_request_error", code, "prompt")
    # Clients such as LiteLLM, and those of Anthropic's API, which has no codes, know the error by these words.
    assert message.startswith("this model's maximum context length is 256 tokens; 301 of the prompt")
    both = await stack.http.post(TEXT, json={"model": "tiny", "prompt": "x" * 100, "max_tokens": 200})
    message = check(both, 400, "invalid_request_error", code, "max_tokens")
    assert message.startswith("this model's maximum context length is 256 tokens; 101 of the prompt and 200 of output")
    fits = await stack.http.post(TEXT, json={"model": "tiny", "prompt": [1] * 56, "max_tokens": 200})
    assert fits.status_code == 200


@pytest.mark.parametrize(("num_prompt", "num_output"), [(200, 16), (240, 16), (241, 15), (255, 1)])
async def test_a_default_that_nobody_asked_for_never_refuses(stack: Stack, num_prompt: int, num_output: int) -> None:
    response = await stack.http.post(TEXT, json={"model": "tiny", "prompt": [1] * num_prompt})
    assert response.status_code == 200
    assert stack.workers[0].submits[0].sampling.max_tokens == num_output


async def test_a_chat_has_a_bounded_number_of_messages(stack: Stack) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": ""}] * 4097}
    check(await stack.http.post(CHAT, json=body), 400, "invalid_request_error", "bad_request", "messages")


async def test_many_short_messages_are_not_rendered_between_other_streams_tokens(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    render = ChatTemplate.render

    def noted(self: ChatTemplate, *arguments: Any, **keywords: Any) -> str:
        threads.append(threading.current_thread() is not threading.main_thread())
        return render(self, *arguments, **keywords)

    monkeypatch.setattr(ChatTemplate, "render", noted)
    for count in (4, 1000):
        messages = [{"role": "user", "content": ""}] * count
        await stack.http.post(CHAT, json={"model": "tiny", "messages": messages})
    assert threads == [False, True]


async def test_unknown_routes_methods_and_models_have_the_same_shape(stack: Stack) -> None:
    check(await stack.http.get("/nowhere"), 404, "not_found_error", "not_found")
    check(await stack.http.get("/v1"), 404, "not_found_error", "not_found")
    check(await stack.http.get(CHAT), 405, "invalid_request_error", "method_not_allowed")
    check(await stack.http.put("/v1/models"), 405, "invalid_request_error", "method_not_allowed")
    response = await stack.http.post(CHAT, json={"model": "none", "messages": MESSAGES})
    check(response, 404, "not_found_error", "model_not_found", "model")


async def test_too_large_a_body_is_413_declared_or_not(make_stack: StackFactory) -> None:
    stack = await make_stack(max_body_bytes=2000)
    body = b'{"model": "tiny", "prompt": "%s"}' % (b"x" * 3000)
    check(await stack.http.post(TEXT, content=body), 413, "invalid_request_error", "payload_too_large")

    async def chunks() -> Any:
        yield body[:1500]
        yield body[1500:]

    check(await stack.http.post(TEXT, content=chunks()), 413, "invalid_request_error", "payload_too_large")


async def test_chat_needs_a_chat_template(make_stack: StackFactory, tmp_path: Path) -> None:
    bare = write_checkpoint(tmp_path / "bare", chat_template=None)
    stack = await make_stack(record=model_record(bare, "bare"))
    response = await stack.http.post(CHAT, json={"model": "bare", "messages": MESSAGES})
    message = check(response, 400, "invalid_request_error", "bad_request", "messages")
    assert "chat template" in message


async def test_a_template_cannot_leave_its_sandbox(make_stack: StackFactory, tmp_path: Path) -> None:
    evil = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    stack = await make_stack(record=model_record(write_checkpoint(tmp_path / "evil", chat_template=evil)))
    response = await stack.http.post(CHAT, json={"model": "tiny", "messages": MESSAGES})
    message = check(response, 400, "invalid_request_error", "bad_request", "messages")
    assert "sandbox" in message


@pytest.mark.parametrize(
    ("path", "body", "param"), [(TEXT, {"prompt": ["ok", "hi"]}, "prompt"), (CHAT, {"messages": MESSAGES}, "messages")]
)
async def test_text_that_the_tokenizer_takes_beyond_the_vocabulary_is_refused(
    stack: Stack, path: str, body: dict[str, Any], param: str
) -> None:
    [record] = stack.pool.models
    # "hi" has bytes 104 and 105, "ok" 111 and 107.
    stack.pool.models[:] = [msgspec.structs.replace(record, spec=msgspec.structs.replace(record.spec, vocab_size=105))]
    await stack.pool.publish()
    await stack.until(lambda: stack.gateway.find_model("tiny").record.spec.vocab_size == 105)
    response = await stack.http.post(path, json={"model": "tiny", **body})
    message = check(response, 400, "invalid_request_error", "bad_request", param)
    assert "the model has only 0..104" in message
    assert not stack.workers[0].submits


async def test_an_unreadable_tokenizer_is_said_to_be_the_checkpoints_fault(
    make_stack: StackFactory, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "broken")
    (folder / "tokenizer.json").write_text("{")
    stack = await make_stack(record=model_record(folder))
    response = await stack.http.post(TEXT, json={"model": "tiny", "prompt": "a"})
    check(response, 422, "invalid_request_error", "bad_checkpoint")


async def test_a_chat_template_that_changed_since_the_model_was_registered_is_not_used(
    make_stack: StackFactory, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "changed")
    record = model_record(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    stack = await make_stack(record=record)
    response = await stack.http.post(CHAT, json={"model": "tiny", "messages": MESSAGES})
    message = check(response, 422, "invalid_request_error", "checkpoint_changed")
    assert "chat_template.jinja" in message


async def test_api_keys_guard_v1_and_nothing_else(make_stack: StackFactory) -> None:
    stack = await make_stack(api_keys=("alpha", "beta"))
    check(await stack.http.get("/v1/models"), 401, "authentication_error", "unauthorized")
    for wrong in ("Bearer gamma", "Basic alpha", "Bearer", "alpha", "Bearer \xff"):
        response = await stack.http.post(CHAT, headers={b"authorization": wrong.encode("latin-1")}, json={})
        check(response, 401, "authentication_error", "unauthorized")
    for key in ("alpha", "beta"):
        assert (await stack.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code == 200
    for path in ("/health", "/live", "/metrics"):
        assert (await stack.http.get(path)).status_code == 200


async def test_admin_keys_guard_administration(make_stack: StackFactory) -> None:
    stack = await make_stack(api_keys=("alpha",), admin_keys=("root",))
    for headers in ({}, {"authorization": "Bearer alpha"}):
        check(await stack.http.get("/admin/status", headers=headers), 401, "authentication_error", "unauthorized")
    response = await stack.http.get("/admin/status", headers={"authorization": "Bearer root"})
    assert response.status_code == 200
