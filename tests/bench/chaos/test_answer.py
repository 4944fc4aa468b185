from __future__ import annotations

import json

from bench.chaos.answer import Answer, Failure, Reader
from bench.chaos.question import make_questions


def event(text: str, finish: str | None = None, **more: object) -> bytes:
    choice = {"text": text, "finish_reason": finish, **more}
    return json.dumps({"id": "cmpl-1", "choices": [choice], "usage": None}).encode()


USAGE = json.dumps({"id": "cmpl-1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}).encode()


def read(*events: bytes) -> tuple[Reader, Answer | Failure]:
    reader = Reader()
    for index, data in enumerate(events):
        reader.on_event(data, float(index))
    return reader, reader.end(200, b"", stream=True)


def test_a_stream_and_a_whole_answer_are_the_same() -> None:
    parts = [
        event("a", logprobs={"tokens": ["a"], "token_logprobs": [-0.5]}),
        event("b", "length", logprobs={"tokens": ["b"], "token_logprobs": [-1.5]}),
    ]
    reader, streamed = read(*parts, USAGE, b"[DONE]")
    assert streamed == Answer("ab", "length", 3, 2, ("a", "b"), (-0.5, -1.5))
    assert reader.response_id == "cmpl-1"
    assert reader.token_times_s == [0.0, 1.0]
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -1.5]}
    choice = {"text": "ab", "finish_reason": "length", "logprobs": logprobs}
    body = {"id": "cmpl-2", "choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    assert Reader().end(200, json.dumps(body).encode(), stream=False) == streamed


def test_events_without_text_are_no_tokens() -> None:
    reader, _ = read(event("a"), event("", "stop"), USAGE, b"[DONE]")
    assert reader.token_times_s == [0.0]


def test_what_is_no_complete_answer_is_a_failure() -> None:
    def kind(*events: bytes) -> str:
        _, got = read(*events)
        assert isinstance(got, Failure)
        return got.kind

    assert kind(event("a"), event("b", "length"), USAGE) == "cut"
    assert kind(event("a"), b"[DONE]") == "protocol"
    assert kind(event("a"), b"{not json", USAGE, b"[DONE]") == "protocol"
    assert kind(event("a"), b'{"error":{"message":"gone","code":"unavailable"}}', b"[DONE]") == "error_event"
    refused = Reader().end(503, b'{"error":{"message":"no","code":"no_capacity"}}', stream=False)
    assert refused == Failure("http_503", '{"error":{"message":"no","code":"no_capacity"}}', "no_capacity")


def test_questions_are_decided_by_the_seed_and_of_all_kinds() -> None:
    questions = make_questions(7, 40)
    assert questions == make_questions(7, 40)
    assert questions != make_questions(8, 40)
    assert {question.drawn for question in questions} == {True, False}
    bodies = [json.loads(question.body("m", stream=False)) for question in questions]
    assert all("seed" in body for body in bodies if body["temperature"] > 0)
    assert any("stop" in body for body in bodies)
    assert any("logprobs" in body for body in bodies)
    assert sum("guided_json" in body for body in bodies) == sum(q.has_schema for q in questions) == 13
    assert not any(q.has_schema for q in make_questions(7, 40, schemas=False))
    assert min(len(body["prompt"]) for body in bodies) < 40
    assert max(len(body["prompt"]) for body in bodies) > 400


def test_an_engine_that_draws_anew_is_asked_what_does_not_depend_on_it() -> None:
    questions = make_questions(7, 48, redraws=True)
    assert all(question.is_open and question.has_schema for question in questions if question.drawn)
    third = [question for question in questions if question.has_schema or question.is_penalized]
    assert len(third) == 16
    assert not any(question.has_schema and question.is_penalized for question in third)
    penalized = [question for question in third if question.is_penalized]
    assert {len({name for name, _ in q.options if name.endswith("_penalty")}) for q in penalized} == {1, 3}
    assert min(question.max_tokens for question in penalized) >= 60
    assert sum(question.is_open for question in questions) == 4
