"""Templates that would run for hours or take all memory are errors, within about a second."""

import itertools
import time

import pytest

from quill.server.errors import InvalidFieldError
from quill.server.text.chat_template import ChatTemplate
from tests.processor_time import within_s

DOUBLING = (
    "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = NEXT %}{% endfor %}"
)


def doubling(start: str, following: str, end: str = "") -> str:
    return DOUBLING.replace("START", start).replace("NEXT", following) + end


HOSTILE = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{{ 'a' * 2000000000 }}",
    "{{ [1] * 2000000000 }}",
    "{{ 9 ** 99999999 }}",
    "{{ 'a' | center(3000000000) }}",
    "{{ 'a'.ljust(3000000000) }}",
    "{{ (1).to_bytes(2000000000, 'big') }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:999999999d}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ lipsum(n=100000) }}",
    doubling("9", "ns.x * ns.x").replace("60", "19") + "{{ ns.x * ns.x // (ns.x + 1) > 0 }}",
    doubling("'aaaa'", "ns.x ~ ns.x"),
    doubling("'aaaa'", "ns.x + ns.x"),
    doubling("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    doubling("[1]", "[ns.x, ns.x]", "{{ ns.x | tojson }}"),
    "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) }}",
    "{% set x = 'a' * 1000000 %}{{ x.replace('a', x) }}",
    "{% set x = 'a' * 1000000 %}{{ range(99999) | map('string') | join(x) }}",
    "{{ range(99999) | map('center', 99999) | join }}",
    "{% set x %}{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}{% endset %}",
    "{% set a %}{{ 'a' * 4000000 }}{% endset %}{% set b %}" + "{{ a }}" * 100 + "{% endset %}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ ('\\t' * 1000000).expandtabs(100000) }}",
    "{{ 'x' | slice(2000000000) | list }}",
    "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_end_in_an_error_soon(source: str) -> None:
    template = ChatTemplate(source, {})
    with within_s(2), pytest.raises(InvalidFieldError, match="chat template"):
        template.render([{"role": "user", "content": "Hi"}])


def test_waiting_for_the_processor_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 10)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    template = ChatTemplate("{% for i in range(50) %}{% endfor %}{{ messages[0].content }}", {})
    assert template.render([{"content": "a"}]) == "a"


def test_limits_begin_anew_with_each_rendering() -> None:
    template = ChatTemplate("{% for i in range(50000) %}{% endfor %}{{ messages[0].content }}", {})
    for _ in range(6):
        assert template.render([{"content": "a" * 10}]) == "a" * 10


def test_what_templates_do_stays_as_it_is() -> None:
    source = (
        "{% macro show(m) %}{{ m.role ~ ':' ~ 1 ~ (m.content | trim) }}{% endmacro %}"
        "{% for m in messages %}{{ show(m) }}"
        "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}"
        "{{ '%s-%d' % ('a', 7) }}{{ 'x{}'.format(1700000000) }}"
        "{{ messages | map(attribute='role') | join('+') }}"
        "{{ messages[0].content.split('</think>')[-1].lstrip() * 2 }}"
        "{{ 1700000000 | string }}{{ 3 * 4 + 2 ** 5 }}"
    )
    messages = [{"role": "user", "content": "x</think> y"}, {"role": "tool", "content": " z "}]
    rendered = ChatTemplate(source, {}).render(messages)
    assert rendered == "user:1x</think> y, tool:1za-7x1700000000user+toolyy170000000044"
