"""Templates run in a sandbox with a budget of work, and fail as invalid requests."""

import json
import time
import tracemalloc
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.core.errors import InvalidRequest, ModelFileError
from kvferry.text.templates.chat_template import ChatTemplate
from kvferry.text.templates.template_costs import FILTERS, LIST_METHODS, MAPPING_METHODS, TESTS, TEXT_METHODS

HELLO = [{"role": "user", "content": "Hello"}]


def test_the_template_places_generation_prompt_and_tokens() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}",
        bos_token="<s>",
        eos_token="</s>",
    )
    assert template.render(HELLO) == "<s>user:Hello</s>>"
    assert template.render(HELLO, add_generation_prompt=False) == "<s>user:Hello</s>"


def test_white_space_control_is_that_of_hugging_face() -> None:
    assert ChatTemplate("{% if true %}\n  a\n{% endif %}\nb").render(HELLO) == "  a\nb"


def test_json_is_plain() -> None:
    assert ChatTemplate("{{ messages | tojson }}").render([{"role": "user", "content": "<é>"}]) == (
        '[{"role": "user", "content": "<é>"}]'
    )


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("", {"ensure_ascii": False}),
        ("ensure_ascii=true", {"ensure_ascii": True}),
        ("true", {"ensure_ascii": True}),
        ("false, 2", {"ensure_ascii": False, "indent": 2}),
        ("indent=4, ensure_ascii=false", {"ensure_ascii": False, "indent": 4}),
        ("separators=(',', ':')", {"ensure_ascii": False, "separators": (",", ":")}),
        ("sort_keys=true", {"ensure_ascii": False, "sort_keys": True}),
    ],
)
def test_json_has_the_arguments_of_transformers(arguments: str, options: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "é", "a": [1, {"z": "<b>", "b": None}]}}
    template = ChatTemplate(f"{{{{ tools[0] | tojson({arguments}) }}}}")
    assert template.render(HELLO, tools=[tool]) == json.dumps(tool, **options)


@pytest.mark.parametrize("separators", ["1", "(',',)", "(1, 2)", "('x' * 9, ':')"])
def test_separators_of_json_are_two_short_strings(separators: str) -> None:
    with pytest.raises(InvalidRequest, match="separators must be two strings"):
        ChatTemplate(f"{{{{ messages | tojson(separators={separators}) }}}}").render(HELLO)


def test_the_content_of_a_generation_tag_is_rendered() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.role }}{% if true %}!{% endif %}{% endgeneration %}\n{% endfor %}"
    )
    assert ChatTemplate(source).render(HELLO) == "user!"


RULES = [{"role": "system", "content": "A"}, {"role": "developer", "content": " B "}]
STRICT = (
    "{% for m in messages %}{% if m.role != 'user' and not loop.first %}{{ raise_exception('only first') }}{% endif %}"
    "{{ m.role }}: {{ m.content }};{% endfor %}"
)
FIRST = "{% if messages[0].role == 'system' %}{{ messages[0].content }};{% endif %}{{ messages[-1].content }}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}", "system: A;developer:  B ;user: Hello;"),
        (STRICT, "system: A\n\nB;user: Hello;"),
        (FIRST, "A\n\nB;Hello"),
    ],
    ids=["several", "strict", "first"],
)
def test_all_system_messages_reach_the_model(source: str, expected: str) -> None:
    assert ChatTemplate(source).render([*RULES, *HELLO]) == expected


def test_a_template_that_drops_a_system_message_in_any_case_refuses_several() -> None:
    with pytest.raises(InvalidRequest, match="send one system message"):
        ChatTemplate("{{ messages[0].content[:1] }}{{ messages[-1].content }}").render([*RULES, *HELLO])


def test_all_special_tokens_have_their_texts() -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}"
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    assert template.render(HELLO) == "<s></s><pad><unk>"
    assert ChatTemplate(source).render(HELLO) == ""


def test_a_key_with_an_underscore_is_data() -> None:
    assert ChatTemplate("{{ messages[0]._id }}").render([{**HELLO[0], "_id": "7"}]) == "7"


def test_a_refusal_by_the_template_is_reported() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render(HELLO)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{% set n = namespace(_n=1) %}{{ n._n }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 'x' * 100000000000 }}",
        "{{ 2 ** 1000000000 }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages | map('!spend') | list }}",
        "{{ {(1, 2): 3} }}",
        "{% set d = {'a': 1} %}{{ d[(1, 2)] }}",
        "{{ namespace(a=1) }}",
        "{{ messages[0].content.encode('utf-16') }}",
        "{{ '{:{}}'.format(1, 10) }}",
        "{{ 'x' | round(3, 'ceil') }}",
        "{{ 3.5 | round(-1000000000) }}",
        "{{ '%1000000000d' is odd }}",
        "{{ '%1000000000d' is divisibleby 7 }}",
    ],
)
def test_forbidden_operations_of_templates_are_refused(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source).render([dict(m) for m in HELLO])


LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}"
ENDS = "{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = DOUBLE %}{% endfor %}"
BIG = (
    "{% set ns = namespace(x='x') %}{% for i in range(18) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{% set x = ns.x %}"
)
HOSTILE = {
    "concat": DOUBLED.replace("DOUBLE", "ns.x ~ ns.x"),
    "add": DOUBLED.replace("DOUBLE", "ns.x + ns.x"),
    "add-list": DOUBLED.replace("'xx'", "[1]").replace("DOUBLE", "ns.x + ns.x"),
    "nested-list": DOUBLED.replace("'xx'", "[1]").replace("DOUBLE", "[ns.x, ns.x]") + "{{ ns.x }}",
    "nested-list-json": DOUBLED.replace("'xx'", "[1]").replace("DOUBLE", "[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    "nested-list-equal": DOUBLED.replace("'xx'", "[1]").replace("DOUBLE", "[ns.x, ns.x]")
    + DOUBLED.replace("ns", "other").replace("'xx'", "[1]").replace("DOUBLE", "[other.x, other.x]")
    + "{{ ns.x == other.x }}",
    "nested-tuple-key": DOUBLED.replace("'xx'", "(1, 2)").replace("DOUBLE", "(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
    "nested-tuple-get": DOUBLED.replace("'xx'", "(1, 2)").replace("DOUBLE", "(ns.x, ns.x)") + "{{ {}.get(ns.x) }}",
    "multiply": "{{ 'x' * 50000000 }}",
    "multiply-often": LOOP + "{% set y = 'x' * 7000000 %}" + ENDS,
    "multiply-list": "{{ ([0] * 7000000) | length }}",
    "multiply-int": DOUBLED.replace("'xx'", "3").replace("DOUBLE", "ns.x * ns.x"),
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent-star": "{{ '%*d' % (100000000, 1) }}",
    "percent-often": DOUBLED.replace("DOUBLE", "'%s%s' % (ns.x, ns.x)"),
    "percent-names": DOUBLED.replace("DOUBLE", "'%(a)s%(a)s' % {'a': ns.x}"),
    "format": "{{ '%500000000d' | format(1) }}",
    "format-method": "{{ '{:1000000000}'.format(1) }}",
    "format-method-often": DOUBLED.replace("DOUBLE", "'{0}{0}'.format(ns.x)"),
    "center": "{{ 'x'.center(1000000000) }}",
    "center-filter": "{{ 'x' | center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "rjust": "{{ 'x'.rjust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "expandtabs": "{{ '\\t'.expandtabs(1000000000) }}",
    "join": BIG + "{{ x.join(x) }}",
    "join-filter": BIG + "{{ x | list | join(x) }}",
    "replace": BIG + "{{ x.replace('x', x) }}",
    "replace-empty": BIG + "{{ x.replace('', x) }}",
    "replace-filter": BIG + "{{ x | replace('x', x) }}",
    "tojson": "{{ messages | tojson(indent=1000000000) }}",
    "tojson-deep": "{% set ns = namespace(x=[]) %}{% for i in range(900) %}{% set ns.x = [ns.x, 1] %}{% endfor %}"
    "{% for i in range(1000) %}{% set y = ns.x | tojson(indent=60) %}{% endfor %}",
    "indent": "{{ 'a\\nb' | indent(1000000000) }}",
    "range": "{% for i in range(100000000) %}x{% endfor %}",
    "range-list": "{% for i in range(10000) %}{% set x = range(100000) | list %}{% endfor %}",
    "loops": LOOP + "x" + ENDS,
    "loops-without-output": LOOP + ENDS,
    "loop-of-a-filter": "{% for i in range(100000) %}{% for j in range(100000) if false %}" + ENDS,
    "loop-of-select": "{% for i in range(100000) %}{% set y = range(100000) | select('none') | list %}{% endfor %}",
    "attribute-path": BIG + "{% set y = range(100000) | map(attribute=x | list | join('.')) | list %}",
    "constant-in-a-loop": "{% for i in range(100000) %}{% set y %}" + "x" * 50_000 + "{% endset %}{% endfor %}",
    "slices": BIG + LOOP + "{% set y = x[1:] %}" + ENDS,
    "split": BIG + LOOP + "{% set y = x.split('x') %}" + ENDS,
    "strip": BIG + "{% set y = x.strip(x[:-1] ~ 'y') %}{{ (x ~ 'y').strip(x) }}" * 200,
    "rfind": BIG + "{{ x.rfind('y' ~ x[:100000]) }}" * 50,
    "contains": BIG + LOOP + "{% if 'y' in x %}{% endif %}" + ENDS,
    "equal": BIG + "{% set y = x ~ 'a' %}{% set z = x ~ 'b' %}" + LOOP + "{% if y == z %}{% endif %}" + ENDS,
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "macro-text": "{% macro f(t) %}{{ t }}{{ t }}{% endmacro %}" + DOUBLED.replace("DOUBLE", "f(ns.x)"),
    "set-block": DOUBLED.replace("{% set ns.x = DOUBLE %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "call-block": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + DOUBLED.replace("{% set ns.x = DOUBLE %}", "{% set ns.x %}{% call f() %}{{ ns.x }}{% endcall %}{% endset %}"),
    "sort": BIG + LOOP + "{% set y = x | sort %}" + ENDS,
    "unique": BIG + LOOP + "{% set y = x | unique %}" + ENDS,
    "upper": BIG + LOOP + "{% set y = x | upper %}" + ENDS,
    "error": BIG + "{{ raise_exception([x] * 100) }}",
    "output": BIG + "{{ x }}{{ x }}{{ x }}{{ x }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_no_operation_evades_the_budget(source: str) -> None:
    """Each source is refused by the budget, in little memory and with no more work than an ordinary template may do."""
    template = ChatTemplate(source)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            template.render(HELLO)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 100000000 }}",
        "{{ 'x' | center(100000000) }}",
        "{{ '%100000000d' % 1 }}",
        "{{ 'x' ~ ('y' | center(100000000)) }}",
        "{{ [1] | tojson(indent=100000000) }}",
        "{{ 'x'.ljust(100000000) }}",
    ],
)
def test_constants_are_not_computed_while_a_template_compiles(source: str) -> None:
    tracemalloc.start()
    try:
        ChatTemplate(source)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ " + "9" * 5000 + " }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "1+" * 2000 + "1 }}",
        "{% if true %}" * 200 + "{% endif %}" * 200,
        "{% for x in y %}" * 30 + "{% endfor %}" * 30,
        "{% include 'other' %}",
        "{% block a %}{% endblock %}",
        "{% for x in y recursive %}{{ loop(x) }}{% endfor %}",
        "{{ x | urlize }}",
    ],
)
def test_a_template_that_cannot_be_used_costs_chat_and_not_the_model(
    source: str, caplog: pytest.LogCaptureFixture
) -> None:
    template = ChatTemplate(source)
    assert "the model's chat template does not compile" in caplog.text
    assert not template.uses_tools
    with pytest.raises(InvalidRequest, match=r"chat template does not compile: .+; use a plain prompt") as caught:
        template.render(HELLO)
    assert caught.value.field == "messages"


def test_a_template_that_is_too_long_is_a_damaged_model_file() -> None:
    with pytest.raises(ModelFileError, match="chat template has 263168 characters"):
        ChatTemplate("x" * (257 << 10))


ATOMS = st.sampled_from(
    [
        *("messages", "messages[0]", "messages[0].content", "x", "7", "100000", "'ab'", "[x, x]", "(x, 1)", "{'k': x}"),
        *("range(100000)", "ns.x", "none", "ns", "'%9999999d'", "'{:9999999}'", "undefined_name", "x.items", "1e308"),
    ]
)


def compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two, three = st.tuples(inner, inner), st.tuples(inner, inner, inner)
    operators = st.sampled_from(["~", "+", "-", "*", "/", "//", "%", "==", "<", "in", "not in", "and", "or", "**"])
    filters = st.sampled_from(sorted(name for name in FILTERS))
    tests = st.sampled_from(sorted(name for name in TESTS if name.isalpha() and name not in ("in", "none", "true")))
    methods = st.sampled_from(
        sorted({*TEXT_METHODS, *MAPPING_METHODS, *LIST_METHODS, "format", "format_map", "encode"})
    )
    return st.one_of(
        st.tuples(inner, operators, inner).map(lambda p: f"(({p[0]}) {p[1]} ({p[2]}))"),
        st.tuples(inner, filters).map(lambda p: f"(({p[0]}) | {p[1]})"),
        st.tuples(inner, filters, inner).map(lambda p: f"(({p[0]}) | {p[1]}({p[2]}))"),
        st.tuples(inner, filters, inner, inner).map(lambda p: f"(({p[0]}) | {p[1]}({p[2]}, {p[3]}))"),
        st.tuples(inner, st.sampled_from(["map", "select", "reject"]), filters, inner).map(
            lambda p: f"(({p[0]}) | {p[1]}('{p[2]}', {p[3]}))"
        ),
        st.tuples(inner, tests).map(lambda p: f"(({p[0]}) is {p[1]})"),
        st.tuples(inner, tests, inner).map(lambda p: f"(({p[0]}) is {p[1]}({p[2]}))"),
        st.tuples(inner, methods, inner).map(lambda p: f"({p[0]}).{p[1]}({p[2]})"),
        st.tuples(inner, methods, inner, inner).map(lambda p: f"({p[0]}).{p[1]}({p[2]}, {p[3]})"),
        two.map(lambda p: f"({p[0]})[{p[1]}]"),
        three.map(lambda p: f"({p[0]})[{p[1]}:{p[2]}]"),
        two.map(lambda p: f"[{p[0]}, {p[1]}]"),
        two.map(lambda p: f"{{{p[0]}: {p[1]}}}"),
        three.map(lambda p: f"(({p[0]}) if ({p[1]}) else ({p[2]}))"),
        two.map(lambda p: f"f({p[0]}, {p[1]})"),
    )


EXPRESSIONS = st.recursive(ATOMS, compound, max_leaves=6)
STATEMENTS = st.recursive(
    st.one_of(
        EXPRESSIONS.map(lambda e: "{{ " + e + " }}"),
        EXPRESSIONS.map(lambda e: "{% set ns.x = " + e + " %}"),
        EXPRESSIONS.map(lambda e: "{% set x = " + e + " %}"),
    ),
    lambda inner: st.one_of(
        st.tuples(EXPRESSIONS, inner).map(lambda p: "{% for x in " + p[0] + " %}" + p[1] + "{% endfor %}"),
        st.tuples(EXPRESSIONS, inner).map(lambda p: "{% if " + p[0] + " %}" + p[1] + "{% endif %}"),
        inner.map(lambda body: "{% for i in range(100000) %}" + body + "{% endfor %}"),
        inner.map(lambda body: "{% set ns.x %}" + body + "{% endset %}"),
        st.tuples(inner, inner).map("".join),
    ),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STATEMENTS)
def test_random_templates_stay_within_time_and_memory(body: str) -> None:
    source = "{% set ns = namespace(x='ab') %}{% macro f(a, b) %}{{ a }}{{ b }}{% endmacro %}{% set x = 'xyz' %}" + body
    tracemalloc.start()
    begun = time.process_time()
    try:
        ChatTemplate(source).render(HELLO)
    except (InvalidRequest, ModelFileError):
        pass
    finally:
        seconds, peak = time.process_time() - begun, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert seconds < 3.0  # takes 20 ms without tracing of memory and coverage
    assert peak < 32 << 20


def test_the_budget_grows_with_the_messages() -> None:
    """A template with work for each message is accepted for any number of messages; one with work for each pair is
    refused.
    """
    many = [{"role": "user", "content": "Hello, how are you?"}] * 4000
    each = "{% for m in messages %}{% if m.content.strip() | length > 3 %}{{ m.role ~ m.content | upper }}{% endif %}"
    assert len(ChatTemplate(each + "{% endfor %}").render(many)) == 4000 * 23
    pairs = "{% for m in messages %}{% for n in messages %}{% if m.content == n.content %}{% endif %}"
    with pytest.raises(InvalidRequest, match="does more work for these messages"):
        ChatTemplate(pairs + "{% endfor %}{% endfor %}").render(many)


FEATURES = """
{%- macro show(name, value='none') -%}<{{ name }}={{ value }}
{%- if caller %}{{ caller() }}{% endif %}>{%- endmacro -%}
{%- set ns = namespace(found=false, n=0) -%}
{%- for m in messages[::-1] if m.role != 'system' -%}
{%- set index = messages | length - 1 - loop.index0 -%}
{%- if not ns.found and m.role == 'user' and '</t>' not in m['content'] %}
{%- set ns.found = true %}{{ index }}{% endif -%}
{%- if loop.last %}|last{{ loop.length }}{% else %},{% endif -%}
{%- endfor -%}
{{ show('a') }}{{ show('b', value=[1, 'x', none, true, 2.5]) }}{% call show('c') %}body{% endcall %}
{%- set parts = 'a</t>b</t>c'.split('</t>') %}{{ parts[-1] ~ parts | first ~ (parts | length) }}
{%- for k, v in {'z': 1, 'y': {'w': [1, 2]}} | dictsort %}{{ k }}{{ v | tojson }}{% endfor -%}
{%- for k, v in {'q': 1}.items() %}{{ k }}{{ v }}{% endfor -%}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('+') }}
{{- 1 < 2 < 3 }}
{{- 3 < 2 < 1 }}{{ 'b' in ['a', 'b'] }}{{ 'k' in {'k': 1} }}{{ (1, 2) == (1, 2) }}
{{- 7 // 2 }}{{ -3 + 5 * 2 }}
{%- with t = ' x ' %}{{ t | trim }}{% endwith %}
{%- filter upper %}up{% endfilter %}
{%- for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}
{%- if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor -%}
{{ 'd' if false }}{{ missing is defined }}{{ missing }}{{ 'x: %s' % 'y' }}
{{- '%s-%s' | format(1, 'z') }}{{ '{}-{a}'.format(1, a=2) }}
{{- [3, 1, 2] | sort | list }}{{ [1, 2] + [3] }}{{ 'ab' * 2 }}
{{- messages[0] | tojson(indent=1) }}{{ 'a\nb' | indent(2) }}
{{- loop is defined }}{{ messages is sequence }}{{ messages[0] is mapping }}
{{- messages[0].content is string }}{{ 'abc'[1:] }}
{{- ['x', 'y'] | reverse | join }}{{ [1, 2, 2] | unique | list }}{{ {'a': 1} | items | list }}
{{- 'A'.lower().startswith('a') }}
"""


def test_ordinary_features_have_the_results_of_jinja() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "<t>Hi</t>"},
        {"role": "user", "content": "<&> \u00e9"},
    ]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    plain.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    expected = plain.from_string(FEATURES).render(messages=messages, add_generation_prompt=True, tools=None)
    assert ChatTemplate(FEATURES).render(messages) == expected


def test_no_messages_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="messages is empty"):
        ChatTemplate("x").render([])


def test_a_template_that_needs_the_date_gets_it() -> None:
    source = '{% macro head() %}{{ strftime_now("%Y-%m-%d, %-d %B") }}{% endmacro %}{{ head() }}'
    template = ChatTemplate(source, now=lambda: datetime(2025, 8, 5, tzinfo=UTC))
    assert template.render([{"role": "user", "content": "x"}]) == "2025-08-05, 5 August"


def test_a_template_that_checks_for_the_date_function_uses_its_own_date() -> None:
    source = '{% if strftime_now is defined %}{{ strftime_now("%Y") }}{% else %}26 Jul 2024{% endif %}'
    assert ChatTemplate(source).render([{"role": "user", "content": "x"}]) == "26 Jul 2024"


@pytest.mark.parametrize("form", ["%99999d", "%", "x" * 101, "%Y" * 60, "%_5d"])
def test_dates_of_any_width_are_refused(form: str) -> None:
    template = ChatTemplate(f"{{{{ strftime_now({form!r}) }}}}")
    with pytest.raises(InvalidRequest, match="the chat template uses the unsupported date format"):
        template.render([{"role": "user", "content": "x"}])
