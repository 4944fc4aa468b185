"""Chats whose reading would cost much, and what each of them costs, in a process of its own, when run as a program."""

from __future__ import annotations

import itertools
import json
import os
import resource
import string
import sys
from typing import Any

from services.gateway.request_bodies.body import read_body
from services.gateway.request_bodies.chat_request import ChatBody, read_chat_request
from services.gateway.request_bodies.grammar_check import check_grammar
from shared.errors import BlitzError

MAX_CPU_S = 10
"""A process that takes more is ended."""


def _chat(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({"model": "m", "messages": messages, **fields}, separators=(",", ":")).encode()


def _schema(**keywords: Any) -> bytes:
    return _chat(guided_json=keywords)


def _told_apart(count: int, num_shared: int) -> list[dict[str, Any]]:
    """Objects that differ in one member, and have others in common."""
    shared = {f"e{i}": {"$ref": "#/$defs/e"} for i in range(num_shared)}
    return [
        {"type": "object", "required": [*shared, "k"], "properties": {**shared, "k": {"const": i}}}
        for i in range(count)
    ]


def _names(count: int) -> list[str]:
    return ["".join(pair) for pair in itertools.islice(itertools.product(string.ascii_letters, repeat=2), count)]


def _tagged(num_names: int, num_alternatives: int) -> bytes:
    shared = {"required": _names(num_names), "properties": {"k": {}}}
    tag = {"propertyName": "k"}
    return _schema(**{"$defs": {"a": shared}, "oneOf": [{"$ref": "#/$defs/a"}] * num_alternatives}, discriminator=tag)


def _all_of(*keywords: dict[str, Any]) -> bytes:
    return _schema(allOf=list(keywords))


_CONSTANTS = {f"d{i}": {"const": i} for i in range(64)}
_ANY_CONSTANT = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in _CONSTANTS]}

BOMBS = {
    "alternatives that share constants": _schema(oneOf=_told_apart(60, 5), **{"$defs": {"e": {"enum": [1] * 4000}}}),
    "many alternatives in all": _schema(anyOf=[_ANY_CONSTANT] * 12, **{"$defs": _CONSTANTS}),
    "a shared alternative of many names": _tagged(2700, 800),
    "braces that do not end": _chat(guided_regex="\\p{" * 20_000),
    "blanks in braces": _chat(guided_regex="a{" + " " * 60_000),
    "blanks in braces of a rule": _chat(guided_grammar="start: a{" + " " * 16_000),
    "definitions on one line": _chat(guided_grammar="." * 15_000 + ":a" * 256),
    "brackets": _chat(guided_regex="[" * 30_000),
    "parentheses": _chat(guided_regex="(" * 30_000),
    "many members that may come": _schema(properties={f"p{i}": {"type": "string"} for i in range(240)}),
    "multiples of several": _all_of(*({"type": "integer", "multipleOf": m} for m in (127, 113, 109))),
    "multiples of several, inside": _all_of(*({"items": {"multipleOf": m}} for m in (127, 113, 109))),
    "expressions that must all hold": _all_of(*({"pattern": f"(.*{chr(97 + i)}.{{{9 + i}}}).*"} for i in range(16))),
    "constants with a format": _schema(enum=[f"a{i}@b.com" for i in range(4000)], format="email"),
    "what is not in an expression": _chat(
        guided_grammar="start: A\nA: ~(/x/ ~/(.|\\n)*c(.|\\n){400}/ ~/(.|\\n)*d(.|\\n){400}/)"
    ),
    "what is in three expressions": _chat(guided_grammar="start: A\nA: /.*a.{12}/ & /.*b.{11}/ & /.*c.{13}/"),
    "a wide expression": _schema(type="string", pattern="(.*a){30}"),
}
"""By what they are made of."""


def read(raw: bytes) -> None:
    """All that the gateway does with it before it has a prompt. Raises ``BlitzError``."""
    request = read_chat_request(raw, read_body(raw, ChatBody), vocab_size=256, max_prompt_bytes=2**20)
    grammar = request.options.sampling.grammar
    if grammar is not None:
        check_grammar(grammar, request.options.guide_param)


def _cost(raw: bytes) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF)
    refused = ""
    try:
        read(raw)
    except BlitzError as error:
        refused = error.message
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"refused": refused, "cpu_s": cpu_s, "grown_bytes": 1024 * (after.ru_maxrss - before.ru_maxrss)}


def main() -> None:
    """A line of JSON for each."""
    # What is made with the first request is no request's cost.
    read(_schema(type="string", pattern="a"))
    for name, raw in BOMBS.items():
        child = os.fork()
        if not child:
            spent_s = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
            resource.setrlimit(resource.RLIMIT_CPU, (spent_s + MAX_CPU_S,) * 2)
            sys.stdout.write(json.dumps({"name": name, **_cost(raw)}) + "\n")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    sys.exit(main())
