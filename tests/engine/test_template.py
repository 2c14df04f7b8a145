"""Chat templates: what real ones do works; what a broken or hostile one does ends soon, in one sentence."""

from __future__ import annotations

import resource

import pytest

from uncast.engine import template
from uncast.engine.template import TemplateError, render

TALK = [{"role": "user", "content": " hello\nthere "}, {"role": "assistant", "content": "hi"}]


@pytest.fixture(autouse=True)
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, the clock stops nothing here but what hangs."""
    monkeypatch.setattr(template, "MAX_SECONDS", 600.0)


def test_ordinary_templates_render() -> None:
    source = (
        "{%- set ns = namespace(last=-1, text='') -%}{%- macro turn(m) -%}<{{ m.role | upper }}>{{ m['content'] | trim }}"
        "{%- endmacro -%}{%- for m in messages if m.role != 'system' -%}{%- set ns.last = loop.index0 -%}"
        "{{ turn(m) ~ '|' ~ loop.length }}{% if loop.last %}!{% endif %}{%- set ns.text = ns.text + m.role[0] * 2 -%}"
        "{%- endfor -%}{{ ns.last }}{{ ns.text }}{{ messages | map(attribute='role') | join(',') }}"
        "{{ messages | length }}{{ 'a-b'.split('-')[1] }}{{ 'x' | replace('x', 'yy') }}{{ '%s=%d' | format('n', 3) }}"
        "{{ range(3) | list }}{{ 7 * 6 }}{{ {'a': 1} | tojson }}{{ bos_token }}{% if add_generation_prompt %}>{% endif %}"
    )
    text = render(source, TALK, add_generation_prompt=True, bos_token="<s>")
    assert text == ("<USER>hello\nthere|2<ASSISTANT>hi|2!1uuaauser,assistant2byyn=3[0, 1, 2]42" + '{"a": 1}<s>>')


def test_a_long_conversation_is_not_cut() -> None:
    talk = [{"role": "user", "content": "word " * 20_000}] * 40
    source = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content | trim + '<|end|>' + '\\n' }}{% endfor %}"
    assert len(render(source, talk)) > 3_900_000


NEST = "{% set ns = namespace(s=['ab']) %}{% for i in range(60) %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in 'x' * 90000 %}{% for b in 'x' * 90000 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{{ 'a' * 3000000000 }}",
        "{{ 3000000000 * 'a' }}",
        "{{ [1] * 3000000000 }}",
        "{{ 'a' | center(3000000000) }}",
        "{{ 'a'.ljust(3000000000) }}",
        "{{ '7'.zfill(3000000000) }}",
        "{{ 'a\\nb' | indent(3000000000) }}",
        "{{ '\\t'.expandtabs(3000000000) }}",
        "{{ ['a'] | batch(3000000000, 'x') | list }}",
        "{{ '%3000000000d' % 1 }}",
        "{{ '%*d' % (3000000000, 1) }}",
        "{{ '%3000000000d' | format(1) }}",
        "{{ '{:>3000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 3000000000) }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ (range(99999) | map('string')) | join('b' * 90000) }}",
        "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ''.join([ns.s, ns.s]) %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
        "{{ ('a' * 90000) | replace('a', 'b' * 90000) }}",
        "{{ ('a' * 90000).replace('a', 'b' * 90000) }}",
        "{{ ('a' * 90000) | join('b' * 90000) }}",
        "{% for i in range(90000) %}{{ 'a' * 900 }}{% endfor %}",
        "{% for i in range(90000) %}" + "long text " * 99 + "{% endfor %}",
        "{{ lipsum(9999999) }}",
        NEST + "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
        NEST + "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | tojson }}",
        NEST + "{% set ns.s = {1: ns.s, 2: ns.s} %}{% endfor %}{{ '%s' % ns.s }}",
    ],
)  # fmt: skip
def test_a_template_cannot_hang_or_fill_memory(source: str) -> None:
    """What it does is counted, and ends it long before the clock would."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateError, match=r"the chat template (was stopped|fails): ") as caught:
        render(source, TALK)
    assert "takes longer than" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "kilobytes"
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_slow_templates_are_stopped_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_SECONDS", 0.0)
    with pytest.raises(TemplateError, match="it takes longer than 0 s"):
        render("{% for i in range(9) %}{% endfor %}", TALK)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ 1 / 0 }}", "fails: ZeroDivisionError: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: RecursionError: "),
        ("{{ 10 ** 400 | float }}", "fails: "),
        ("{{ (1.5 * 10 ** 300) ** 2 }}", "fails: OverflowError: "),
        ("{{ messages.index('x') }}", "fails: ValueError: 'x' is not in list"),
        ("{{ messages[0].content.index('q') }}", "fails: ValueError: substring not found"),
        ("{% if %}", "fails: Expected an expression"),
        ("{% for %}" * 400, "fails: "),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "fails: RecursionError"),
        ("{{ messages.append(1) }}", "fails: "),
        ("{{ ''.__class__.__mro__ }}", "fails: "),
        ("{{ nothing.here }}", "fails: 'nothing' is undefined"),
        ("{{ raise_exception('no\nrobots') }}", "refuses these messages: no robots"),
        ("{{ raise_exception(messages) }}", "refuses these messages: "),
        ("x" * (1 << 21), "has more than 1048576 characters"),
    ],
)  # fmt: skip
def test_every_failure_is_one_sentence(source: str, sentence: str) -> None:
    with pytest.raises(TemplateError, match=sentence) as caught:
        render(source, TALK)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
