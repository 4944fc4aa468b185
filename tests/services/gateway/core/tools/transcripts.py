# ruff: noqa: E501 - texts as they come
"""What models of each family write, and what it is: text for the client, and calls (name, arguments' JSON).

An argument string that is no JSON is that of a call that broke behind its beginning.
"""

from __future__ import annotations

Transcript = tuple[str, str, list[tuple[str, str]]]

NESTED = '{"to": ["a", "b"], "body": {"x": {"y": [1, -2.5e3, true, false, null, {}, []]}}}'
STRINGS = r'{"to": "say \"hi\" \\ \/ \n \u00e9 } ] { [ </tool_call", "n": ""}'

HERMES: list[Transcript] = [
    ("Hello.", "Hello.", []),
    ("", "", []),
    (" \n ", " \n ", []),
    ('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', "", [("weather", '{"city": "Oslo"}')]),
    (
        '<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>\n<tool_call>{"name":"now","arguments":{}}</tool_call>\n',
        "",
        [("add", '{"a":1,"b":2}'), ("now", "{}")],
    ),
    (
        'I look.\n<tool_call>{"name": "now", "arguments": {}}</tool_call> And\n<tool_call>{"name": "now", "arguments": {}}'
        "</tool_call>\nDone.",
        "I look.\n And\n\nDone.",
        [("now", "{}"), ("now", "{}")],
    ),
    (f'<tool_call>{{"name": "send_mail", "arguments": {NESTED}}}</tool_call>', "", [("send_mail", NESTED)]),
    (f'<tool_call>{{"name": "send_mail", "arguments": {STRINGS}}}</tool_call>', "", [("send_mail", STRINGS)]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
    (
        '<tool_call>{"id": "c1", "type": "function", "name": "add", "parameters": {"a": 1}, "id": {"x": []}}</tool_call>x',
        "x",
        [("add", '{"a": 1}')],
    ),
    (
        '<tool_call>{"name": "weather", "arguments": {"city": "Tromsø 日本 😀"}}</tool_call>',
        "",
        [("weather", '{"city": "Tromsø 日本 😀"}')],
    ),
    (
        '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\tc"}}</tool_call>',
        "",
        [("weather", '{"city": "a\\nb\\tc"}')],
    ),
    # Without its end, and without its last brace.
    ('<tool_call>{"name": "now", "arguments": {}}', "", [("now", "{}")]),
    ('<tool_call>{"name": "now", "arguments": {}</tool_call>ok', "ok", [("now", "{}")]),
    # None of the request's functions; and one that is, behind it.
    (
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [("now", "{}")],
    ),
    # No JSON, arguments that are no object, fields that no call has, nothing at all.
    ("<tool_call>now()</tool_call>", "<tool_call>now()</tool_call>", []),
    ('<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', []),
    ('<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "now"}</tool_call>', []),
    ('<tool_call>{"func": "now"}</tool_call>', '<tool_call>{"func": "now"}</tool_call>', []),
    ("<tool_call>", "<tool_call>", []),
    ("a <tool_ca", "a <tool_ca", []),
    ("<<tool_<tool_call><tool_call>{'", "<<tool_<tool_call><tool_call>{'", []),
    # Broken, or cut off, behind the beginning of its arguments.
    ('<tool_call>{"name": "add", "arguments": {"a": tru}}</tool_call>', "}}</tool_call>", [("add", '{"a": tru')]),
    ('<tool_call>{"name": "add", "arguments": {"a": 01}}</tool_call>', "1}}</tool_call>", [("add", '{"a": 0')]),
    ('<tool_call>{"name": "weather", "arguments": {"city": "Os', "", [("weather", '{"city": "Os')]),
    ('<tool_call>{"name": "now", "arguments": {}}</tool_c', "", [("now", "{}")]),
]  # fmt: skip

LLAMA: list[Transcript] = [
    ("Hello {name}, {\"a\": 1}; {", "Hello {name}, {\"a\": 1}; {", []),
    ('{"name": "weather", "parameters": {"city": "Oslo"}}', "", [("weather", '{"city": "Oslo"}')]),
    ('<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}', "", [("weather", '{"city": "Oslo"}')]),
    ('<|python_tag|> {"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', "", [("now", "{}")] * 2),
    ('{"name": "now", "parameters": {}}; {"name": "add", "parameters": {"a": 1}}', "", [("now", "{}"), ("add", '{"a": 1}')]),
    ('{"name": "now", "arguments": {}}\n{"name": "now", "parameters": {}};', "", [("now", "{}")] * 2),
    ('{"type": "function", "name": "now", "parameters": {}}', "", [("now", "{}")]),
    ('So:\n{"name": "now", "parameters": {}}; and that is it', "So:\n; and that is it", [("now", "{}")]),
    ('\n\n{"name": "now", "parameters": {}}', "", [("now", "{}")]),
    (f'{{"name": "send_mail", "parameters": {NESTED}}}', "", [("send_mail", NESTED)]),
    (f'{{"name": "send_mail", "parameters": {STRINGS}}}', "", [("send_mail", STRINGS)]),
    ('{"parameters": {"a": "é😀"}, "name": "add"}', "", [("add", '{"a": "é😀"}')]),
    ('{ {"name": "now", "parameters": {}} }', "{  }", [("now", "{}")]),
    ('{"name": "rm", "parameters": {}}', '{"name": "rm", "parameters": {}}', []),
    ('{"name": "now", "parameters": null}', '{"name": "now", "parameters": null}', []),
    ('{"name": "now", "parameters": []}', '{"name": "now", "parameters": []}', []),
    ('{"name": now}', '{"name": now}', []),
    ("{}{{}}", "{}{{}}", []),
    ('<|python_tag|>print("{}")', '<|python_tag|>print("{}")', []),
    ("a <|python_t", "a <|python_t", []),
    ('{"name": "add", "parameters": {"a": 1.}}', "}}", [("add", '{"a": 1.')]),
    ('{"name": "add", "parameters": {"a": 1,}}', "}}", [("add", '{"a": 1,')]),
    ('{"name": "add", "parameters": {"a"', "", [("add", '{"a"')]),
    ('{"na\\u006de": "\\u006eow", "parameters": {"\\u0061": "\\ud83d\\ude00"}}', "", [("now", '{"\\u0061": "\\ud83d\\ude00"}')]),
]  # fmt: skip

PYTHONIC: list[Transcript] = [
    ("Hello [x](y), [now], [1, 2].", "Hello [x](y), [now], [1, 2].", []),
    ("[now()]", "", [("now", "{}")]),
    ('[weather(city="Oslo")]', "", [("weather", '{"city": "Oslo"}')]),
    ("[add(a=1, b=-2.5e3), now( )]", "", [("add", '{"a": 1, "b": -2.5e3}'), ("now", "{}")]),
    ("[add(a=True, b=False, c=None, d=true, e=null)]", "", [("add", '{"a": true, "b": false, "c": null, "d": true, "e": null}')]),
    ("[weather(city='It\\'s \"x\" \\\\ \\n \\d \\x41 \\u00e9 \\U0001f600')]", "",
     [("weather", '{"city": "It\'s \\"x\\" \\\\ \\n \\\\d A \\u00e9 \\ud83d\\ude00"}')]),
    ('[weather(city="日本 😀 ø")]', "", [("weather", '{"city": "日本 😀 ø"}')]),
    ("[send_mail(to=['a', \"b\",], body={'x': {'y': [1, [], {}]},},)]", "",
     [("send_mail", '{"to": ["a", "b"], "body": {"x": {"y": [1, [], {}]}}}')]),
    ('Let me see. [now()]\n[add(a = 1)] Done', "Let me see.  Done", [("now", "{}"), ("add", '{"a": 1}')]),
    ("[ now(), \n now()]", "", [("now", "{}")] * 2),
    ("[geo.find(q='x)]')]", "", [("geo.find", '{"q": "x)]"}')]),
    ("[weather(city='a\nb')]", "", [("weather", '{"city": "a\\nb"}')]),
    ("[rm(a=1)]", "[rm(a=1)]", []),
    ("[add(1, 2)]", "[add(1, 2)]", []),
    ("[add(a, b)]", "[add(a, b)]", []),
    ("[now(", "[now(", []),
    ("[now", "[now", []),
    ("[[now()]]", "[]", [("now", "{}")]),
    ("[now(), rm()]", ", rm()]", [("now", "{}")]),
    ("[now(), [1]", ", [1]", [("now", "{}")]),
    ("[add(a=b)]", "b)]", [("add", '{"a": ')]),
    ("[add(a=(1, 2))]", "(1, 2))]", [("add", '{"a": ')]),
    ("[add(a={1: 2})]", "1: 2})]", [("add", '{"a": {')]),
    ("[weather(city='Os", "", [("weather", '{"city": "Os')]),
    ("[add(a=1 b=2)]", "b=2)]", [("add", '{"a": 1')]),
    ("[now()", "", [("now", "{}")]),
]  # fmt: skip

MISTRAL: list[Transcript] = [
    ("Hello [1].", "Hello [1].", []),
    ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]', "", [("weather", '{"city": "Oslo"}')]),
    ('[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "a1b2c3d4e"}, {"name": "add", "arguments": {"a": 1}}]', "",
     [("now", "{}"), ("add", '{"a": 1}')]),
    ('[TOOL_CALLS]weather{"city": "Oslo"}', "", [("weather", '{"city": "Oslo"}')]),
    ('[TOOL_CALLS]now{}[TOOL_CALLS]add{"a": 1}', "", [("now", "{}"), ("add", '{"a": 1}')]),
    ('[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]add[ARGS]{"a": 1}', "", [("now", "{}"), ("add", '{"a": 1}')]),
    ('[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{} ', "", [("now", "{}")]),
    ('[TOOL_CALLS] geo.find [ARGS] {"q": "[ARGS]"}', "", [("geo.find", '{"q": "[ARGS]"}')]),
    ('I look. [TOOL_CALLS]now{} then [TOOL_CALLS][{"name": "now", "arguments": {}}] done', "I look.  then  done", [("now", "{}")] * 2),
    (f'[TOOL_CALLS][{{"name": "send_mail", "arguments": {NESTED}}}]', "", [("send_mail", NESTED)]),
    (f'[TOOL_CALLS]send_mail{STRINGS}', "", [("send_mail", STRINGS)]),
    ('[TOOL_CALLS]weather{"city": "日本 😀\n"}', "", [("weather", '{"city": "日本 😀\\n"}')]),
    ('[TOOL_CALLS][{"arguments": {"a": 1}, "name": "add"}]', "", [("add", '{"a": 1}')]),
    ('[TOOL_CALLS][{"name": "now", "arguments": {}}', "", [("now", "{}")]),
    ('[TOOL_CALLS]rm{"a": 1}', '[TOOL_CALLS]rm{"a": 1}', []),
    ('[TOOL_CALLS][{"name": "rm", "arguments": {}}]', '[TOOL_CALLS][{"name": "rm", "arguments": {}}]', []),
    ('[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "rm"}]', ', {"name": "rm"}]', [("now", "{}")]),
    ("[TOOL_CALLS]now()", "[TOOL_CALLS]now()", []),
    ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("[TOOL_CALLS]now[ARG", "[TOOL_CALLS]now[ARG", []),
    ("[TOOL_CALLS]now[ARGS]x", "[TOOL_CALLS]now[ARGS]x", []),
    ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ("[TOOL_[TOOL_CALLS]now{}", "[TOOL_", [("now", "{}")]),
    ('[TOOL_CALLS]add{"a": nul', "", [("add", '{"a": nul')]),
    ('[TOOL_CALLS]add{"a" 1}', "1}", [("add", '{"a" ')]),
]  # fmt: skip
