"""Chat templates: as Transformers renders them, and what hostile ones get."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from swarm.client.sandbox import deadline
from swarm.client.template import ChatTemplate, TemplateError
from swarm.errors import UsageError

# The template inside SmolLM2-135M-Instruct.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Hi <there> & 'you'"}]


def test_chatml_adds_the_default_system_prompt() -> None:
    assert ChatTemplate(CHATML).render(USER) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi <there> & 'you'<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chatml_keeps_a_given_system_prompt_and_may_end_without_an_assistant() -> None:
    messages = [{"role": "system", "content": "Short."}, *USER]
    assert ChatTemplate(CHATML).render(messages, add_generation_prompt=False) == (
        "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nHi <there> & 'you'<|im_end|>\n"
    )


# The beginning and end of the target model's template, as far as reasoning is concerned.
REASONING = """[gMASK]<sop>
{%- if enable_thinking is not defined or enable_thinking %}
    {%- if reasoning_effort is defined and reasoning_effort == 'high' %}
        {{- '<|system|>Reasoning Effort: High' }}
    {%- else %}
        {{- '<|system|>Reasoning Effort: Max' }}
    {%- endif %}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}<|user|>{{ m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- endif %}"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>x<|assistant|><think>"),
        ({"reasoning_effort": None}, "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>x<|assistant|><think>"),
        ({"reasoning_effort": "high"}, "[gMASK]<sop><|system|>Reasoning Effort: High<|user|>x<|assistant|><think>"),
        ({"enable_thinking": False}, "[gMASK]<sop><|user|>x<|assistant|><think></think>"),
    ],
)
def test_variables_reach_the_template_and_none_is_undefined(variables: dict[str, Any], expected: str) -> None:
    assert ChatTemplate(REASONING).render([{"role": "user", "content": "x"}], **variables) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # Transformers' settings: a block's line break and the spaces before it go.
        ("{% if true %}\n  {% set x = 1 %}\nA\n{% endif %}\n", "A\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ('{{ {"a": "<b>", "c": "é"} | tojson }}', '{"a": "<b>", "c": "é"}'),
        ('{{ [1, {"b": 2}] | tojson(indent=1) }}', '[\n 1,\n {\n  "b": 2\n }\n]'),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ tools[0].function.name }}", "f"),
        ("{{ messages[0].content.split(' ')[0] | upper }}{{ '%s-%d' % ('a', 3) }}", "HIa-3"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
    ],
)
def test_what_templates_rely_on(source: str, expected: str) -> None:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    assert template.render(USER, tools=[{"function": {"name": "f"}}]) == expected


HOSTILE = {
    "internals": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.os }}",
    "attribute filter": "{{ (''|attr('__class__')).mro }}",
    "environment": "{{ self.__init__ }}{{ self._TemplateReference__context.environment }}",
    "changes messages": "{{ messages.append(1) }}",
    "reads files": "{% include '/etc/passwd' %}",
    "endless loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "huge output": "{% for i in range(99999) %}{{ 'a' * 10000 }}{% endfor %}",
    "huge product": "{{ 'a' * 10000000000 }}",
    "huge list": "{{ [1] * 10000000000 }}",
    "doubling": "{% set n = namespace(x='aaaa') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "adding": "{% set n = namespace(x='aaaa') %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "wide filter": "{{ 'a' | center(1000000000) }}",
    "wide method": "{{ 'a'.ljust(1000000000) }}",
    "wide format": "{{ '{:1000000000}'.format(1) }}",
    "wide percent": "{{ '%1000000000d' % 1 }}",
    "wide star": "{{ '%*d' % (1000000000, 1) }}",
    "wide format filter": "{{ '%1000000000d' | format(1) }}",
    "huge join": "{{ (['a' * 8000000] * 1000) | join }}",
    "huge glue": "{{ range(99999) | list | join('a' * 8000000) }}",
    "huge replace": "{{ ('a' * 4000000).replace('a', 'a' * 4000000) }}",
    "huge replace filter": "{{ ('a' * 4000000) | replace('a', 'a' * 4000000) }}",
    "huge indent": "{{ ('a\n' * 1000000) | indent(8000000) }}",
    "shared JSON": "{% set n = namespace(a=['x']) %}{% for i in range(30) %}{% set n.a = [n.a, n.a] %}{% endfor %}"
    "{{ n.a | tojson }}",
    "wide JSON": "{{ [1, [2, [3]]] | tojson(indent=7000000) }}",
    "huge power": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "huge date": "{{ strftime_now('%1000000000d') }}",
    "not Jinja": "{% if %}",
    "missing value": "{{ nothing.at.all }}",
    "wrong type": "{{ 1 + 'a' }}",
    "division": "{{ 1 / 0 }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_one_line(name: str) -> None:
    began = time.process_time()
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(HOSTILE[name], render_seconds=0.5).render(USER)
    assert "\n" not in str(caught.value)
    assert "--raw" in str(caught.value)
    assert time.process_time() - began < 5
    assert sys.gettrace() is None


def test_time_that_others_take_does_not_count() -> None:
    """A machine under load made prompts of some megabytes fail."""
    with deadline(0.1):
        time.sleep(0.3)
        assert ChatTemplate("{{ messages | length }}").text


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__ }}", "{{ ''|attr('__class__') }}", "{{ raise_exception.__globals__ }}"]
)
def test_internals_print_as_nothing(source: str) -> None:
    assert ChatTemplate(source).render(USER) == ""


def test_a_template_may_refuse_messages() -> None:
    template = ChatTemplate("{{ raise_exception('roles\nmust alternate') }}")
    with pytest.raises(TemplateError, match="refuses these messages: roles must alternate; change them"):
        template.render(USER)


def test_a_model_without_a_template_says_what_to_do() -> None:
    with pytest.raises(TemplateError, match=r"no chat template; .*--raw"):
        ChatTemplate(None).render(USER)


@pytest.mark.parametrize("given", [{"messages": [None]}, {"messages": USER, "tools": [None]}])
def test_what_is_no_message_or_tool_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="NoneType; give objects"):
        ChatTemplate("{{ messages }}").render(**given)
