"""Constructs of chat templates: each has the text of the installed transformers or is refused, never another text."""

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from kvferry.core.errors import InvalidRequest
from kvferry.text.templates.chat_template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "<&> \u00e9"},
]

EQUAL: dict[str, str] = {
    "none": "{{ none }}|{{ None }}",
    "booleans": "{{ true }}|{{ False }}|{{ not true }}",
    "numbers": "{{ 1.0 }}|{{ 10 }}|{{ 1e3 }}|{{ -0.5 }}",
    "list": "{{ [1, 'a', none, [true]] }}",
    "mapping": "{{ {'a': 1, 'b': {'c': 'd'}} }}",
    "tuple": "{{ (1, 'a') }}|{{ (1,) }}",
    "quotes": '{{ ["it\'s", \'say "x"\'] }}',
    "unknown name": "<{{ unknown }}>",
    "unknown member": "<{{ messages[0].unknown }}>{{ messages[0].unknown is defined }}",
    "division": "{{ 7 / 2 }}|{{ 7 // 2 }}|{{ -7 // 2 }}",
    "remainder": "{{ -7 % 3 }}|{{ 7 % -3 }}",
    "chained comparison": "{{ 1 < 2 <= 2 }}|{{ 1 < 3 < 2 }}",
    "logic": "{{ 0 or 'x' }}|{{ '' and 'x' }}|{{ 1 and 2 }}",
    "membership": "{{ 'ell' in 'hello' }}|{{ 3 not in [1, 2] }}|{{ 'a' in {'a': 1} }}",
    "concatenation": "{{ 1 ~ 'a' ~ none ~ 2.0 }}",
    "repetition": "{{ 'ab' * 3 }}|{{ [0] * 2 }}",
    "case": "{{ 'aBc'.upper() }}{{ 'aBc'.lower() }}{{ 'ab cd'.title() }}{{ 'ab'.capitalize() }}",
    "strip": "[{{ '  a '.strip() }}][{{ '--a-'.strip('-') }}][{{ ' a '.lstrip() }}][{{ ' a '.rstrip() }}]",
    "split": (
        "{{ 'a,b,c'.split(',') }}|{{ ' a  b '.split() }}|{{ 'a,b,c'.split(',', 1) }}|{{ 'a,b'.rsplit(',', 1)[0] }}"
    ),
    "find": ("{{ 'hello'.find('l') }}|{{ 'hello'.rfind('l') }}|{{ 'hello'.find('z') }}|{{ 'hello'.count('l') }}"),
    "prefix": (
        "{{ 'abc'.startswith('ab') }}|{{ 'abc'.endswith(('x', 'c')) }}|{{ 'abc'.removeprefix('a') }}"
        "|{{ 'abc'.removesuffix('c') }}"
    ),
    "partition": "{{ 'k=v=w'.partition('=') }}|{{ 'k=v=w'.rpartition('=')[2] }}",
    "replace": "{{ 'aaa'.replace('a', 'b', 2) }}|{{ 'aXb' | replace('X', '-') }}",
    "kinds of text": "{{ '12'.isdigit() }}|{{ 'a1'.isalnum() }}|{{ 'ab'.isalpha() }}|{{ ' '.isspace() }}",
    "lines": "{{ 'a\\nb\\r\\nc'.splitlines() }}",
    "slices": "{{ 'hello'[1:3] }}|{{ 'hello'[::-1] }}|{{ [1, 2, 3][-2:] }}|{{ 'abc'[-1] }}",
    "escapes": "{{ 'a\\tb\\\\c' }}|{{ '\\u00e9' }}",
    "format method": "{{ '{} {x}'.format(1, x=2) }}|{{ '{:>4}'.format('a') }}",
    "format operator": "{{ '%s %05.1f %d' % ('a', 2.25, 3) }}|{{ '%d%%' | format(5) }}",
    "trim, length": "[{{ ' a ' | trim }}]{{ 'abc' | length }}{{ [1] | count }}",
    "first, last": "{{ [1, 2, 3] | first }}{{ [1, 2, 3] | last }}<{{ [] | first }}>",
    "join": "{{ [1, 'a'] | join('-') }}|{{ messages | join(',', attribute='role') }}",
    "default": "{{ unknown | default('d') }}|{{ '' | default('d', true) }}|{{ none | d('x') }}",
    "map": "{{ messages | map(attribute='role') | list }}|{{ ['a', 'b'] | map('upper') | join }}",
    "select": (
        "{{ [1, 2, 3] | select('odd') | list }}|{{ [0, 1, none] | select | list }}|{{ [1, 2] | reject('odd') | list }}"
    ),
    "selectattr": (
        "{{ messages | selectattr('role', 'eq', 'user') | list | length }}"
        "|{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='role') | join }}"
    ),
    "sort": (
        "{{ [3, 1, 2] | sort }}|{{ ['b', 'A'] | sort }}|{{ [1, 2] | sort(reverse=true) }}"
        "|{{ messages | sort(attribute='role') | map(attribute='role') | list }}"
    ),
    "dictsort, items": "{{ {'b': 1, 'a': 2} | dictsort }}|{{ {'a': 1} | items | list }}|{{ {'a': 1}.items() | list }}",
    "numbers by filters": (
        "{{ 2.567 | round(1) }}|{{ 2.5 | int }}|{{ '7' | int + 1 }}|{{ 'x' | int(3) }}"
        "|{{ '1.5' | float }}|{{ -3 | abs }}"
    ),
    "json": "{{ {'b': [1, 2.0, none, true], 'a': 'é<&>\\'\"\\n'} | tojson }}",
    "json, indented": "{{ {'a': [1], 'b': {}} | tojson(indent=2) }}",
    "list of text": "{{ 'abc' | list }}|{{ 'abc' | reverse }}|{{ [1, 1, 2] | unique | list }}",
    "tests of type": (
        "{{ 'a' is string }}|{{ 1 is number }}|{{ {} is mapping }}|{{ [] is iterable }}"
        "|{{ 'a' is sequence }}|{{ true is boolean }}|{{ 1.0 is float }}|{{ 1 is integer }}"
    ),
    "tests of value": (
        "{{ none is none }}|{{ x is undefined }}|{{ 4 is even }}|{{ 6 is divisibleby 3 }}"
        "|{{ 'a' is in ['a'] }}|{{ 1 is eq 1 }}|{{ 2 is gt 1 }}|{{ 'a' is lower }}|{{ false is false }}"
    ),
    "loop variables": (
        "{% for x in 'abc' %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}"
        "{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('p', 'q') }}"
        ";{% endfor %}"
    ),
    "loop changed": "{% for m in [1, 1, 2] %}{{ loop.changed(m) }}{% endfor %}",
    "loop filter, else": "{% for m in messages if m.role == 'tool' %}x{% else %}none{% endfor %}",
    "nested loops": (
        "{% for a in [1, 2] %}{% set outer = loop %}{% for b in [3, 4] %}{{ outer.index }}"
        "{{ loop.index }},{% endfor %}{% endfor %}"
    ),
    "loop scope": "{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{% endfor %}{{ x }}",
    "unpacking": (
        "{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}{% set p, q = 1, 2 %}{{ p }}{{ q }}"
    ),
    "break, continue": (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}"
        "{% endif %}{{ i }}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0, seen=[]) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}"
        "{% set ns.seen = ns.seen + [i] %}{% endfor %}{{ ns.n }}{{ ns.seen }}"
    ),
    "set block": "{% set t %}a{{ 1 + 1 }}{% endset %}[{{ t }}]{% set u | upper %}b{% endset %}{{ u }}",
    "macro": (
        "{% macro f(a, b='d', c=none) %}{{ a }}{{ b }}{{ c }}{{ varargs }}{{ kwargs }}{% endmacro %}"
        "{{ f(1) }}|{{ f(1, c=2) }}|{{ f(1, 2, 3, 4, e=5) }}"
    ),
    "call block": "{% macro f(n) %}<{{ caller(n) }}>{% endmacro %}{% call(v) f(3) %}{{ v + 1 }}{% endcall %}",
    "macro scope": "{% set x = 1 %}{% macro f() %}{{ x }}{% endmacro %}{% set x = 2 %}{{ f() }}",
    "with": "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a is defined }}",
    "conditions": (
        "{% if messages | length > 5 %}a{% elif messages %}b{% else %}c{% endif %}{{ 'x' if false }}"
        "{{ 'x' if true else 'y' }}"
    ),
    "comment, raw": "a{# {{ x }} #}b{% raw %}{{ x }}{% endraw %}",
    "white space": "a\n{%- if true -%}\n b \n{%- endif %}\n  {% if true %}\nc\n  {% endif %}\nd {{- 'e' -}} f\n",
    "white space kept": "  {%+ if true %}a{% endif %}\nb{% if true +%}\nc{% endif %}",
    "filter block": "{% filter trim | upper %}  a  {% endfilter %}",
    "generation": "{% generation %}{{ messages[0].role }}{% endgeneration %}!",
    "member or index": (
        "{{ messages[0]['role'] }}{{ messages[0].role }}{{ messages[-1].content }}{{ messages[0].get('x', 'd') }}"
    ),
    "methods before members": (
        "{% set d = {'items': 1, 'x': 2} %}{{ d['items'] }}{{ d.x }}{{ d.keys() | list }}{{ d.values() | list }}"
    ),
    "range": "{{ range(3) | list }}{{ range(1, 7, 3) | list }}{{ range(3, 0, -1) | list }}",
    "loop over a mapping": (
        "{% for k in {'a': 1, 'b': 2} %}{{ k }}{% endfor %}{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}"
    ),
    "tojson of tools": "{% for t in tools or [] %}{{ t | tojson(indent=4) }}{% endfor %}{{ tools is none }}",
    "ensure_ascii": (
        "{{ 'é' | tojson(ensure_ascii=true) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}"
    ),
    "e filter": "{{ '<&>' | e }}|{{ '<&>' | safe }}|{{ '<b>' | escape }}",
    "center": (
        "[{{ 'ab' | center(6) }}][{{ 'ab'.center(6, '*') }}][{{ 'ab'.ljust(4) }}][{{ 'ab'.rjust(4) }}"
        "][{{ '7'.zfill(3) }}]"
    ),
    "indent": "{{ 'a\\nb\\n\\nc' | indent(2) }}|{{ 'a\\nb' | indent(2, true) }}|{{ 'a\\nb' | indent('> ') }}",
    "strftime": "{{ strftime_now('%Y') | length }}",
    "line statement": "## not a statement\n# nor this",
    "trailing newline": "a\n",
    "implicit concatenation": "{{ 'a' 'b' }}",
    "precedence of operators": "{{ 2 + 3 * 4 }}|{{ (2 + 3) * 4 }}|{{ -2 * 2 }}",
    "text of values": "{{ 5 | string + 'a' }}|{{ 'AbC' | lower | capitalize }}",
}

REFUSED_BY_BOTH: dict[str, str] = {
    "do": "{% do messages %}",
    "list append": "{{ [1].append(2) }}",
    "namespace underscore": "{% set n = namespace(_n=1) %}{{ n._n }}",
    "set item": "{% set d = {} %}{% set d.x = 1 %}",
}

REFUSED: dict[str, str] = {
    "power": "{{ 2 ** 5 }}",
    "sum, min, max": "{{ [1, 2, 3] | sum }}{{ [1, 3] | max }}{{ [1, 3] | min }}",
    "batch, slice": "{{ [1, 2, 3] | batch(2) | list }}|{{ [1, 2, 3] | batch(2, 0) | list }}",
    "groupby": "{% for role, group in messages | groupby('role') %}{{ role }}{{ group | length }};{% endfor %}",
    "dict": "{{ dict(a=1, b='c') }}{{ dict([('k', 1)]) }}",
    "joiner": "{% set sep = joiner('; ') %}{{ sep() }}a{{ sep() }}b",
    "cycler": "{% set c = cycler('x', 'y') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}",
    "fromkeys": "{{ dict.fromkeys(['a', 'b'], 1) }}",
    "truncate": (
        "{{ 'hello big world' | truncate(10) }}|{{ 'hello' | truncate(3, true, '') }}|{{ 'a b c' | wordwrap(3) }}"
    ),
    "pprint, xmlattr": "{{ {'a': 1} | pprint }}",
    "bytes": "{{ 'é'.encode() }}",
    "attr filter": "{{ messages[0] | attr('role') }}|{{ 'a' | attr('upper') is defined }}",
    "random": "{{ [1] | random }}",
    "urlize": "{{ 'http://a.b' | urlize }}",
    "filesizeformat": "{{ 1500 | filesizeformat }}",
    "striptags": "{{ '<b>x</b>' | striptags }}",
    "urlencode": "{{ 'a b&c' | urlencode }}",
}

"""Constructs that transformers renders and the sandbox does not support."""


def by_transformers(source: str) -> str:
    copies = [dict(message) for message in MESSAGES]
    template = _compile_jinja_template(source)
    return str(template.render(messages=copies, tools=None, documents=None, add_generation_prompt=True))


@pytest.mark.parametrize("construct", list(EQUAL))
def test_a_construct_has_the_text_of_transformers(construct: str) -> None:
    assert ChatTemplate(EQUAL[construct]).render(MESSAGES) == by_transformers(EQUAL[construct])


@pytest.mark.parametrize("construct", list(REFUSED_BY_BOTH))
def test_a_construct_that_transformers_refuses_is_refused(construct: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011  of several types
        by_transformers(REFUSED_BY_BOTH[construct])
    with pytest.raises(InvalidRequest):
        ChatTemplate(REFUSED_BY_BOTH[construct]).render(MESSAGES)


@pytest.mark.parametrize("construct", list(REFUSED))
def test_a_construct_that_is_not_supported_is_refused_and_has_no_other_text(construct: str) -> None:
    assert by_transformers(REFUSED[construct])
    with pytest.raises(InvalidRequest):
        ChatTemplate(REFUSED[construct]).render(MESSAGES)
