"""Open WebUI's requests, sent as it sends them. It is a whole server, so only what it asks is here.

Version 0.12.4, files of ``open_webui``: headers are made in ``utils/headers.py:171`` (those of the user and the chat in
``56`` and ``198``), models are listed in ``routers/openai.py:129`` (and, to verify a connection, ``1045``), chats are
asked from ``1431`` (what goes to a server that is not OpenAI's: ``1495``, ``1565``, ``1572``), as responses from
``1196``. ``stream_options`` come from ``main.py:1243``, ``tools`` from ``utils/middleware.py:2927``, parameters of a
model from ``utils/payload.py:204``, tasks such as titles from ``routers/tasks.py:185``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clients.names import KEY, SCRIPTED
from tests.clients.weather import FUNCTION, WEATHER, ask

HEADERS = {
    "Content-Type": "application/json",
    "Authorization": f"Bearer {KEY}",
    "User-Agent": "Python/3.11 aiohttp/3.14.5",
    "X-OpenWebUI-User-Name": "Jane Doe",
    "X-OpenWebUI-User-Id": "0f2f5b7c-5d1c-4c56-a2f5-5d6f5b0e7a11",
    "X-OpenWebUI-User-Email": "jane@example.org",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "bb0de0c6-5a7b-4a1b-9f21-3d1b0f6f2f52",
}
PARAMETERS = {
    "temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.1, "presence_penalty": 0.1, "seed": 7, "stop": ["\n\n\n"],
    "logit_bias": {"65": -1}, "reasoning_effort": "low", "max_tokens": 200, "top_k": 40, "repeat_penalty": 1.1,
}  # fmt: skip
"""What a person may set for a model."""


@pytest.fixture(scope="module")
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.openai_url, headers=HEADERS, timeout=60.0) as http:
        yield http


def chat(http: httpx.Client, **body: Any) -> httpx.Response:
    response = http.post("/chat/completions", json={"model": SCRIPTED} | body)
    assert response.status_code == 200, response.text
    return response


def chunks_of(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_models_are_listed(http: httpx.Client) -> None:
    listed = http.get("/models").json()
    assert SCRIPTED in [model["id"] for model in listed["data"]]


def test_a_chat_is_streamed_with_its_usage(http: httpx.Client) -> None:
    asked = chat(
        http, messages=[{"role": "system", "content": "Be kind."}, ask("hello")], stream=True,
        stream_options={"include_usage": True}, **PARAMETERS,
    )  # fmt: skip
    *chunks, last = chunks_of(asked)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks).startswith("Hello!")
    assert last["usage"]["completion_tokens"] > 4


def test_functions_are_called_in_a_stream_and_give_their_results(http: httpx.Client) -> None:
    asked: dict[str, Any] = {"messages": [ask("weather")], "stream": True, "tools": [FUNCTION]}
    call: dict[str, Any] = {}
    for chunk in chunks_of(chat(http, **asked)):
        # As middleware.py puts deltas of a call together: the first one is kept, arguments of others are added.
        for delta in chunk["choices"][0]["delta"].get("tool_calls", ()):
            if not call:
                call = delta
            else:
                call["function"]["arguments"] += delta["function"]["arguments"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": WEATHER}
    chunks = chunks_of(chat(http, **asked | {"messages": [ask("weather"), called, result]}))
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks).startswith("It is sunny")


def test_titles_are_asked_for(http: httpx.Client) -> None:
    answer = chat(http, messages=[ask("### Task:\nGenerate a title ...")], stream=False, max_tokens=1000).json()
    assert answer["choices"][0]["message"]["content"]


def test_the_same_as_responses(http: httpx.Client) -> None:
    tool = {"type": "function", **FUNCTION["function"], "strict": False}
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather"}]}
    body = {"model": SCRIPTED, "stream": True, "input": [said], "instructions": "Be kind.", "tools": [tool]}
    response = http.post("/responses", json=body | {"temperature": 0.7, "max_output_tokens": 200})
    events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")]
    (call,) = events[-1]["response"]["output"]
    items = [
        said,
        {"type": "function_call", "call_id": call["call_id"], "name": call["name"], "arguments": call["arguments"]},
        {"type": "function_call_output", "call_id": call["call_id"], "output": WEATHER},
    ]
    answer = http.post("/responses", json=body | {"input": items, "stream": False}).json()
    assert answer["output"][0]["content"][0]["text"].startswith("It is sunny")
