"""Bodies that no client should send, drawn by hypothesis: malformed, oversized, odd."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from services.gateway.request_bodies.schema_check import ANNOTATIONS, ENFORCED
from tests.services.gateway.http.test_field_types import (
    CHAT_FIELDS,
    RESPONSES_FIELDS,
    TEXT_FIELDS,
    TOKENIZE_FIELDS,
    TURN_FIELDS,
)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(10**400), max_value=10**400),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["", "text", "user", "\u0000", "\ud7ff", "\U0001f600", "x" * 5000, "1", "-1", "auto", "none"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=8) | st.sampled_from(["type", "text"]), inner)
    ),
    max_leaves=12,
)
long_lists = st.builds(lambda item, count: [item] * count, scalars, st.sampled_from([65, 257, 1025, 4097, 20_000]))
odd = st.one_of(values, long_lists)
messages = st.lists(
    st.one_of(
        values,
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "king"]) | values, "content": st.text(max_size=30) | odd},
            optional={"name": odd, "tool_calls": odd},
        ),
    ),
    max_size=4,
)


_names = st.sampled_from(["f", "now", "a.b", "g"]) | st.sampled_from(["", "a b", "x" * 65]) | values
_json = st.sampled_from(["{}", '{"a": [1, {"b": null}]}', "{", "[]", "null", '"x"', '{"a": "\\ud800"}', "[" * 5000, ""])
_tool = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["function", "custom"]) | values,
        "function": values
        | st.fixed_dictionaries(
            {}, optional={"name": _names, "description": values, "parameters": values, "strict": values, "more": values}
        ),
    },
)
_call = st.fixed_dictionaries(
    {},
    optional={
        "id": st.just("call_1") | values,
        "type": st.sampled_from(["function", "custom"]) | values,
        "function": values | st.fixed_dictionaries({}, optional={"name": _names, "arguments": _json | values}),
    },
)
_called = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["assistant", "assistant", "tool", "user"]),
            "content": st.text(max_size=9) | st.none(),
        },
        optional={
            "tool_calls": st.lists(_call | values, max_size=3) | values,
            "tool_call_id": st.just("call_1") | values,
        },
    ),
    max_size=3,
)


_part = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "text"]) | values},
    optional={"text": st.text(max_size=9) | values},
)
_block = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "image"]) | values},
    optional={
        "text": st.text(max_size=9) | values,
        "id": st.just("call_1") | values,
        "tool_use_id": st.just("call_1") | values,
        "name": _names,
        "input": st.dictionaries(st.text(max_size=3), values, max_size=2) | values,
        "content": st.text(max_size=9) | st.lists(_part | values, max_size=3) | odd,
    },
)


def _objects(base: dict[str, Any], fields: list[str]) -> st.SearchStrategy[bytes]:
    extra = st.dictionaries(st.sampled_from(fields) | st.text(max_size=10), odd, max_size=4)
    return extra.map(lambda drawn: json.dumps({**base, **drawn}).encode())


_MAX_BODY_BYTES = 16 * 1024 * 1024
"""Twice what a gateway takes. A client needs long to write more, in the same process here."""


def _broken(bodies: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Cut, doubled, or with a byte changed."""
    return st.builds(
        lambda body, at, byte, how: (
            body[: at % (len(body) + 1)]
            if how == 0
            else body + body
            if how == 1
            else body[: at % (len(body) + 1)] + bytes([byte]) + body[at % (len(body) + 1) + 1 :]
        ),
        bodies,
        st.integers(min_value=0, max_value=2**20),
        st.integers(min_value=0, max_value=255),
        st.integers(min_value=0, max_value=2),
    )


_RAW = st.one_of(
    st.binary(max_size=200),
    st.sampled_from(
        [
            b"", b"[" * 5000, b'{"a":' * 5000, b"null", b'"', b"{" + b'"a":1,' * 5000 + b'"a":1}',
            b'{"model":"tiny","prompt":[' + b"[1]," * 5000 + b"[1]]}",
            b'{"model":"tiny","prompt":[' + b"1," * 300_000 + b"1]}",
            b'{"model":"tiny","prompt":"a","stop_token_ids":[' + b"1," * 700_000 + b"1]}",
            b'{"model":"tiny","messages":[' + b"{}," * 200_000 + b"{}]}",
            b'{"model":"tiny","messages":[{"role":"user","content":"' + b"a\\n" * 400_000 + b'"}]}',
            b'{"model":"tiny","input":[' + b"{}," * 200_000 + b"{}]}",
            b'{"model":"tiny","prompt":"' + b"\\u0000" * 100_000 + b'"}',
            b'{"model":"tiny","prompt":"a","x":"\\ud800"}',
        ]
    ),
)  # fmt: skip

chat = st.one_of(
    _objects({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}, CHAT_FIELDS),
    messages.map(lambda drawn: json.dumps({"model": "tiny", "messages": drawn}).encode()),
)
tools = st.builds(
    lambda messages, extra: json.dumps({"model": "tiny", "messages": messages, **extra}).encode(),
    st.just([{"role": "user", "content": "hi"}]) | _called,
    st.fixed_dictionaries(
        {"tools": st.lists(_tool, max_size=3) | st.lists(odd, max_size=2) | odd},
        optional={
            "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function"}]) | odd,
            "parallel_tool_calls": st.booleans() | odd,
            "stream": st.booleans(),
        },
    ),
)
"""Chats with functions, calls and results."""
_keywords = st.sampled_from([*sorted(ENFORCED), *sorted(ANNOTATIONS), "not", "if", "uniqueItems", "x-guidance", "a"])
_schema = st.recursive(
    st.sampled_from(
        [
            {}, True, {"type": "string"}, {"type": "object"}, {"$ref": "#/$defs/a"}, {"$ref": "#"}, {"enum": [1, "a"]},
            {"pattern": "(.*a){30}"}, {"minItems": 10**9}, {"maxLength": 10**9}, {"const": "x" * 5000},
            {"multipleOf": 0.1},
        ]
    )
    | values,
    lambda inner: st.one_of(
        st.dictionaries(_keywords, inner | values, max_size=4),
        st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(st.text(max_size=4), inner)}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=4)}),
        st.fixed_dictionaries({"oneOf": st.lists(inner, max_size=4), "$defs": st.fixed_dictionaries({"a": inner})}),
    ),
    max_leaves=20,
)  # fmt: skip
_text = st.sampled_from(
    ["a+", "(", "[" * 5000, "a{1000000000}", "((a{99}){99}){99}", "(?x)a # b", "a\\", "/", "(" * 5000, "\\p{L}{9}",
     'start: "a"', "start: %json {}", "start: a\na: a a | ", "start: <[1-9]>", "start: " + "(" * 9000,
     'start: "a"{999999}', "start: A\nA: B B\nB: A", "\n".join(f"r{i}: r{i + 1}" for i in range(5000))]
)  # fmt: skip
guided = st.builds(
    lambda extra: json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **extra}).encode(),
    st.fixed_dictionaries(
        {},
        optional={
            "response_format": odd
            | st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object"]) | values})
            | st.fixed_dictionaries(
                {"type": st.just("json_schema"), "json_schema": values | st.fixed_dictionaries({"schema": _schema})}
            ),
            "guided_json": _schema | _json,
            "guided_regex": _text | odd,
            "guided_choice": st.lists(st.text(max_size=9) | scalars, max_size=4) | odd,
            "guided_grammar": _text | odd,
            "structured_outputs": odd
            | st.dictionaries(
                st.sampled_from(["json", "regex", "choice", "grammar", "json_object"]),
                _schema | _text | odd,
                max_size=2,
            ),
        },
    ),
)
"""Chats whose answer must be something."""
_item = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | values,
        "role": st.sampled_from(["user", "assistant", "system", "tool"]) | values,
        "content": st.text(max_size=9) | st.lists(_part | values, max_size=3) | odd,
        "call_id": st.just("call_1") | values,
        "name": _names,
        "arguments": _json | values,
        "output": st.text(max_size=9) | st.lists(_part | values, max_size=3) | odd,
    },
)
_flat_tool = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["function", "custom"]) | values,
        "name": _names,
        "description": values,
        "parameters": values,
        "input_schema": values,
        "strict": values,
    },
)
_more = {
    "tools": st.lists(_flat_tool, max_size=3) | st.lists(odd, max_size=2) | odd,
    "stream": st.booleans(),
}
responses = st.one_of(
    _objects({"model": "tiny", "input": "hi"}, RESPONSES_FIELDS),
    st.fixed_dictionaries(
        {"model": st.just("tiny"), "input": st.lists(_item | values, max_size=4) | odd},
        optional={
            **_more,
            "tool_choice": st.sampled_from(["auto", "none", "required"]) | odd,
            "text": st.fixed_dictionaries({}, optional={"format": st.fixed_dictionaries({"type": values}) | values}),
        },
    ).map(lambda drawn: json.dumps(drawn).encode()),
)
turns = st.one_of(
    _objects({"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}, TURN_FIELDS),
    st.fixed_dictionaries(
        {
            "model": st.just("tiny"),
            "max_tokens": st.just(5),
            "messages": st.lists(
                st.fixed_dictionaries(
                    {"role": st.sampled_from(["user", "assistant"]) | values},
                    optional={"content": st.text(max_size=9) | st.lists(_block | values, max_size=4) | odd},
                )
                | values,
                max_size=4,
            ),
        },
        optional={
            **_more,
            "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "none", "any"]) | values}) | odd,
            "system": st.text(max_size=9) | st.lists(_block | values, max_size=3) | odd,
        },
    ).map(lambda drawn: json.dumps(drawn).encode()),
)
"""Of ``/v1/messages``."""
text = st.one_of(
    _objects({"model": "tiny", "prompt": "a"}, TEXT_FIELDS),
    odd.map(lambda drawn: json.dumps({"model": "tiny", "prompt": drawn}).encode()),
)
tokenize = st.one_of(
    _objects({"model": "tiny", "prompt": "a"}, TOKENIZE_FIELDS),
    _objects({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}, TOKENIZE_FIELDS),
)
detokenize = st.one_of(
    _objects({"model": "tiny", "tokens": [1]}, ["model", "tokens"]),
    st.lists(st.integers(min_value=-1, max_value=310), max_size=20).map(
        lambda drawn: json.dumps({"model": "tiny", "tokens": drawn}).encode()
    ),
)
SETTINGS = ["min_instances", "max_instances", "slo_ttft_s", "slo_tbt_s", "keep_alive_s"]
SETTINGS += ["served_as", "weight", "advise", "no_room_timeout_s"]
set_model = _objects({"min_instances": 0}, SETTINGS)
add_model = _objects({"path": "/m"}, ["path", "name", "engine", "engine_args", *SETTINGS])
scale = _objects({"instances": 1}, ["instances", "hold_s", "live", "role"])


def hostile(bodies: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Those bodies, the same broken, and bytes that are none."""
    return st.one_of(bodies, bodies, _broken(bodies), _RAW).map(lambda body: body[:_MAX_BODY_BYTES])


paths = st.text(st.characters(codec="ascii", exclude_categories=["Cc", "Zs"]), max_size=30).map(
    lambda drawn: "/" + drawn.replace("#", "").replace("?", "")
)
queries = st.text(st.characters(codec="ascii", exclude_categories=["Cc", "Zs"]), max_size=20).map(
    lambda drawn: drawn.replace("#", "")
)
