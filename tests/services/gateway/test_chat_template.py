from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from services.gateway.chat_template import ChatTemplate
from shared.errors import BadRequest

MESSAGES = [
    {"role": "system", "content": "Be brief <&>."},
    {"role": "user", "content": "hé\n  there "},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "go"},
]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n    {%- if m.role == 'system' %}\n{{ m.content | trim }}\n"
    "    {% endif %}\n["
    "{{ loop.index0 }}] {{ m['content'] }}\n{% endfor %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    "{{ tools is none }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_templates_render_as_transformers_renders_them(source: str) -> None:
    rendered: Any = render_jinja_template(
        conversations=[MESSAGES], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES) == rendered[0][0]


def test_a_templates_own_refusal_reaches_the_caller() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(BadRequest, match="roles must alternate"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ messages[99].content.x.y }}",
        "{{ 1 / 0 }}",
    ],
)
def test_escapes_mutation_and_faults_are_refused(source: str) -> None:
    with pytest.raises(BadRequest):
        ChatTemplate(source, {}).render(MESSAGES)


def test_what_is_no_template_is_refused() -> None:
    with pytest.raises(BadRequest, match="not valid"):
        ChatTemplate("{% if %}", {})


def test_arguments_cannot_replace_the_messages() -> None:
    template = ChatTemplate("{{ messages | length }}{{ mode }}", {})
    assert template.render(MESSAGES, arguments={"messages": [], "mode": "x"}) == "4x"
