"""A template that does too much ends, soon, with an error, and the gateway goes on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

from services.gateway.chat_template import ChatTemplate
from services.gateway.template_sandbox import RenderingTooLarge
from shared.errors import BadRequest
from tests.services.gateway.checkpoint import model_record, write_checkpoint
from tests.services.gateway.conftest import StackFactory
from tests.services.gateway.http.test_refusals import CHAT, MESSAGES, check

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TOO_MUCH = [
    ENDLESS,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% for x in range(99999) recursive %}{% if loop.depth < 4 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "{% for i in range(99999) %}" + "x" * 100 + "{% endfor %}",
    "{% set t %}{% for i in range(99999) %}" + "x" * 100 + "{% endfor %}{% endset %}{{ t | length }}",
    "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{{ ([1] * 10**9) | length }}",
    "{{ 2 ** (10 ** 9) }}",
    "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ 'a'.ljust(999999999) }}",
    "{{ 'a' | indent(999999999) }}",
    "{{ messages | tojson(indent=999999999) }}",
    "{{ (['x' * 1000000] * 1000) | join }}",
    "{{ ''.join(['x' * 1000000] * 1000) }}",
    "{{ ('x' * 100000).replace('x', 'y' * 1000) }}",
    "{{ ('x' * 100000) | replace('x', 'y' * 1000) }}",
]


@pytest.mark.parametrize("source", TOO_MUCH)
def test_what_would_take_too_much_time_or_memory_is_stopped(source: str) -> None:
    with pytest.raises(RenderingTooLarge):
        ChatTemplate(source, {}).render(MESSAGES, max_operations=100_000)


def test_a_rendering_ends_at_its_deadline() -> None:
    with pytest.raises(RenderingTooLarge, match="too long"):
        ChatTemplate(ENDLESS, {}).render(MESSAGES, max_operations=10**12, max_time_s=0.05)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}", "1/1True"),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", "role=user;content=hi;"),
        ("{% for m in messages if m.role == 'x' %}{% else %}none{% endfor %}", "none"),
        ("{% for x in absent %}{% else %}none{% endfor %}", "none"),
        ("{{ 'a' ~ 1 ~ none }}{{ ['a', 'b'] | join('-') }}{{ ','.join(['a', 'b']) }}", "a1Nonea-ba,b"),
        ("{{ messages | map(attribute='role') | join(',') }}{{ messages | join('-', attribute='role') }}", "useruser"),
        ("{{ 'abc' | replace('b', 'x') }}{{ 'abc'.replace('b', '') }}{{ 'a' * 3 }}{{ '%s!' % 'a' }}", "axcacaaaa!"),
        (
            "{% for x in [[1, [2, 3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}"
            "{% endfor %}",
            "(1(23))",
        ),
    ],
)
def test_what_templates_do_is_done_as_ever(source: str, text: str) -> None:
    assert ChatTemplate(source, {}).render(MESSAGES) == text


def test_a_template_that_is_not_iterable_is_refused_in_its_own_words() -> None:
    with pytest.raises(BadRequest, match="not iterable"):
        ChatTemplate("{% for x in 3 %}{% endfor %}", {}).render(MESSAGES)


async def test_the_gateway_goes_on_while_a_template_does_not_end(
    make_stack: StackFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, render = 0, ChatTemplate.render

    def until_some_are_answered(self: ChatTemplate, *arguments: Any, **keywords: Any) -> str:
        """In its thread again and again: a machine that stands still may let its time run out in one go."""
        while threading.current_thread() is not threading.main_thread() and answered <= 3:
            with contextlib.suppress(RenderingTooLarge):
                render(self, *arguments, **keywords)
        return render(self, *arguments, **keywords)

    monkeypatch.setattr(ChatTemplate, "render", until_some_are_answered)
    stack = await make_stack(record=model_record(write_checkpoint(tmp_path / "endless", chat_template=ENDLESS)))
    refused = asyncio.create_task(stack.http.post(CHAT, json={"model": "tiny", "messages": MESSAGES}))
    while not refused.done():
        assert (await stack.http.get("/live")).status_code == 200
        answered += 1
    message = check(await refused, 400, "invalid_request_error", "bad_request", "messages")
    assert "stopped" in message
    assert answered > 3
    assert (await stack.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})).status_code == 200
