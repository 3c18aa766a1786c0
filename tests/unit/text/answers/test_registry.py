import json
from typing import Any

import pytest
from harness.fakes.answers import NAMES, split

from kvferry.text.answers.marks import MARKERS, Marks
from kvferry.text.answers.registry import CallFormat, recognized

H, L, M, P = CallFormat.HERMES, CallFormat.LLAMA3_JSON, CallFormat.MISTRAL, CallFormat.PYTHONIC
D, R, G = CallFormat.DEEPSEEK_V31, CallFormat.DEEPSEEK_V3, CallFormat.GRANITE
F, A, E = CallFormat.PHI4, CallFormat.OLMO3, CallFormat.FUNCTIONGEMMA
BEGIN, END, CALL, STOP, SEP, *_ = MARKERS[8:]
BLOCK = f"{CALL}function{SEP}%s\n```json\n%s\n```{STOP}"
Expected = tuple[str, list[tuple[str, Any]]]

CASES: list[tuple[CallFormat, str, Expected]] = [
    # One call or several, with content around them, in the forms that models write.
    (H, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', ("", [("f", {"a": 1})])),
    (H, '<tool_call>{"name":"f","arguments":{}}</tool_call>', ("", [("f", {})])),
    (H, '<tool_call>{"arguments": {"a": "}"}, "name": "f"}</tool_call>', ("", [("f", {"a": "}"})])),
    (H, '<tool_call>{"name": "f"}</tool_call>', ("", [("f", {})])),
    (H, '<tool_call>{"type": "function", "name": "f", "parameters": {"a": []}}</tool_call>', ("", [("f", {"a": []})])),
    (
        H,
        'Wait.\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n',
        ("Wait.", [("f", {}), ("g", {})]),
    ),
    (H, 'a\n<tool_call>{"name": "f"}</tool_call>\n\nb', ("a\nb", [("f", {})])),
    (H, '  \n<tool_call>{"name": "f"}</tool_call>', ("", [("f", {})])),
    (H, '<tool_call>{"name": "f", "arguments": {"t": "a\nb\tc"}}</tool_call>', ("", [("f", {"t": "a\nb\tc"})])),
    (H, '<tool_call>{"name": "f", "arguments": {"t": "<tool_call>"}}', ("", [("f", {"t": "<tool_call>"})])),
    (E, "<start_function_call>call:f{}<end_function_call>", ("", [("f", {})])),
    (
        E,
        (
            '<start_function_call>call:f{a:<escape>x, {y}: "z\\<escape>,b:[1,-2.5e3,true,null],'
            "c:{d:<escape><escape>}}<end_function_call>"
        ),
        ("", [("f", {"a": 'x, {y}: "z\\', "b": [1, -2500.0, True, None], "c": {"d": ""}})]),
    ),
    (
        E,
        (
            "Wait. <start_function_call>call:f{ a : 1 , b: [ ] }<end_function_call>"
            "<start_function_call>call:g{<escape>a:b<escape>:2}<end_function_call>"
        ),
        ("Wait.", [("f", {"a": 1, "b": []}), ("g", {"a:b": 2})]),
    ),
    (E, "<start_function_call>call:x{}<end_function_call>", ("<start_function_call>call:x{}<end_function_call>", [])),
    (L, '{"name": "f", "parameters": {"a": [1, -2.5e3, true, null]}}', ("", [("f", {"a": [1, -2500.0, True, None]})])),
    (L, '\n{"name": "f", "parameters": {}};{"name": "g", "parameters": {}}', ("", [("f", {}), ("g", {})])),
    (L, '{"name": "f", "parameters": {}} ; \n {"name": "g", "parameters": {}}', ("", [("f", {}), ("g", {})])),
    (L, 'I call.<|python_tag|>{"name": "f", "parameters": {}}', ("I call.", [("f", {})])),
    (
        L,
        '<|python_tag|> {"type": "function", "name": "f", "parameters": {"x": {"y": 0}}}',
        ("", [("f", {"x": {"y": 0}})]),
    ),
    (M, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', ("", [("f", {"a": 1})])),
    (
        M,
        '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abc"}, {"name": "g", "arguments": {}}]',
        ("", [("f", {}), ("g", {})]),
    ),
    (M, 'ok[TOOL_CALLS]f{"a": 1}', ("ok", [("f", {"a": 1})])),
    (M, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}', ("", [("f", {"a": 1}), ("g", {})])),
    (M, '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', ("", [("f", {"a": 1})])),
    (P, "[f(a=1)]", ("", [("f", {"a": 1})])),
    (P, "[f(), g()]", ("", [("f", {}), ("g", {})])),
    (P, "[ f ( a = 'x' , b = \"y\" , ) , g() , ]", ("", [("f", {"a": "x", "b": "y"}), ("g", {})])),
    (P, "[f(a=[1, 2,], b={'k': None, \"l\": True})]", ("", [("f", {"a": [1, 2], "b": {"k": None, "l": True}})])),
    (P, r"""[f(a='it\'s', b="\u00e9\x41\n\q", c='"')]""", ("", [("f", {"a": "it's", "b": "éA\n\\q", "c": '"'})])),
    (P, "[f(a=true, b=false, c=null)]", ("", [("f", {"a": True, "b": False, "c": None})])),
    (P, "See [1, 2], then [get_weather(city='Oslo')]", ("See [1, 2], then", [("get_weather", {"city": "Oslo"})])),
    (
        D,
        f'Wait.{BEGIN}{CALL}f{SEP}{{"a": 1}}{STOP}{CALL}g{SEP}{{}}{STOP}{END}',
        ("Wait.", [("f", {"a": 1}), ("g", {})]),
    ),
    (D, f"{BEGIN}\n{CALL} f\n{SEP} {{}} {STOP}\n{CALL}g{SEP}{{}}{STOP} {END}\n", ("", [("f", {}), ("g", {})])),
    (D, f"{CALL}f{SEP}{{}}{STOP}{END}", ("", [("f", {})])),
    (D, f"{CALL}f{SEP}{{}}{STOP}", ("", [("f", {})])),
    (D, f"{CALL}function{SEP}f\n```json\n{{}}\n```{STOP}{END}", ("", [("f", {})])),
    (
        R,
        f"a{BEGIN}{BLOCK % ('f', '{}')}\n{BLOCK % ('g', '{}')}{END}",
        ("a", [("f", {}), ("g", {})]),
    ),
    (R, f"{CALL}f{SEP}{{}}{STOP}", ("", [("f", {})])),
    (G, '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]', ("", [("f", {"a": 1}), ("g", {})])),
    (G, '<|tool_call|> {"name": "f", "arguments": {}}', ("", [("f", {})])),
    (G, 'Ok <tool_call>[{"name": "f", "arguments": {}}]</tool_call>\n', ("Ok", [("f", {})])),
    (G, '<|tool_call|>[{"name": "f", "arguments": {}}]\n\nDone.', ("Done.", [("f", {})])),
    (F, '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', ("", [("f", {"a": 1})])),
    (F, 'functools[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', ("", [("f", {}), ("g", {})])),
    (
        A,
        "<function_calls>f(a=1)\ng(b='x', c=null)</function_calls>",
        ("", [("f", {"a": 1}), ("g", {"b": "x", "c": None})]),
    ),
    (A, "Ok.\n<function_calls>\nf()\n</function_calls>\nDone.", ("Ok.\nDone.", [("f", {})])),
    # Text that is not a call is content, without loss.
    (D, f"{BEGIN}no", (f"{BEGIN}no", [])),
    (D, f"{CALL}unknown{SEP}{{}}{STOP}", (f"{CALL}unknown{SEP}{{}}{STOP}", [])),
    (D, f"{CALL}{'f' * 200}{SEP}{{}}", (f"{CALL}{'f' * 200}{SEP}{{}}", [])),
    (D, f"{CALL}f{SEP}{{}}{STOP} more", ("more", [("f", {})])),
    (D, f"{CALL}f{SEP}{{}} more", ("more", [("f", {})])),
    (R, f"{CALL}function{SEP}f\n```python\n", (f"{CALL}function{SEP}f\n```python\n", [])),
    (R, f"{CALL}function{SEP}f\n```json\n[]", (f"{CALL}function{SEP}f\n```json\n[]", [])),
    (R, f"{CALL}function{SEP}f\n```json\n{{}}\n{STOP}", (STOP, [("f", {})])),
    (G, "<|tool_call|>[]", ("<|tool_call|>[]", [])),
    (G, "<|tool_call|>none", ("<|tool_call|>none", [])),
    (F, "import functools\nfunctools[1]", ("import functools\nfunctools[1]", [])),
    (A, "<function_calls></function_calls>", ("<function_calls></function_calls>", [])),
    (A, "<function_calls>f(1)</function_calls>", ("<function_calls>f(1)</function_calls>", [])),
    (A, "<function_calls>f()</function>", ("</function>", [("f", {})])),
    (H, "no call", ("no call", [])),
    (H, " <tool_call>junk", (" <tool_call>junk", [])),
    (
        H,
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', []),
    ),
    (
        H,
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', []),
    ),
    (H, '<tool_call>{"name": "f", "name": "g"}', ('<tool_call>{"name": "f", "name": "g"}', [])),
    (H, '<tool_call>{"arguments": {}}</tool_call>', ('<tool_call>{"arguments": {}}</tool_call>', [])),
    (H, '<tool_call>no<tool_call>{"name": "f"}</tool_call>', ("<tool_call>no", [("f", {})])),
    (H, "a <tool_cal", ("a <tool_cal", [])),
    (H, "\n\n", ("\n\n", [])),
    (L, '{"answer": 42}', ('{"answer": 42}', [])),
    (L, 'The call {"name": "f", "parameters": {}}', ('The call {"name": "f", "parameters": {}}', [])),
    (L, '{{"name": "f", "parameters": {}}', ('{{"name": "f", "parameters": {}}', [])),
    (L, '{"name": "f", "parameters": {}} and so on', ("and so on", [("f", {})])),
    (L, "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    (M, "[TOOL_CALLS]unknown{}", ("[TOOL_CALLS]unknown{}", [])),
    (M, "[TOOL_CALLS][1]", ("[TOOL_CALLS][1]", [])),
    (P, "[f(x) for x in y]", ("[f(x) for x in y]", [])),
    (P, "[]", ("[]", [])),
    (P, "[f(a=(1, 2))]"[:3], ("[f(", [])),
]


@pytest.mark.parametrize(("call_format", "text", "expected"), CASES, ids=[f"{c[0]}: {c[1][:40]}" for c in CASES])
def test_calls_and_content(call_format: CallFormat, text: str, expected: Expected) -> None:
    for pieces in ([text], list(text)):
        content, _, calls = split(call_format, pieces)
        assert (content, [(name, json.loads(arguments)) for _, name, arguments in calls]) == expected


def test_arguments_that_turn_out_malformed_end_the_call() -> None:
    content, _, calls = split(H, ['<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>'])
    assert calls == [("call_1", "f", '{"a": 1,')]
    assert content == "}}</tool_call>"


def test_an_answer_that_is_cut_off_keeps_its_beginning() -> None:
    content, _, calls = split(H, ['<tool_call>{"name": "f", "arguments": {"a": 1'])
    assert (content, calls) == ("", [("call_1", "f", '{"a": 1')])
    assert split(H, ['<tool_call>{"name": "f"']) == ('<tool_call>{"name": "f"', "", [])


def test_arguments_stream_before_the_call_is_complete() -> None:
    _, _, calls = split(P, ["[f(a='xy"])
    assert calls == [("call_1", "f", '{"a": "xy')]


def test_further_calls_are_dropped_if_only_one_is_wanted() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>end'
    assert split(H, [text], max_calls=1) == ("end", "", [("call_1", "f", "{}")])


def test_ids_have_the_form_that_the_templates_expect() -> None:
    assert split(H, ['<tool_call>{"name": "f"}</tool_call>'])[2][0][0] == "call_1"
    assert split(M, ["[TOOL_CALLS]f{}"])[2][0][0] == "1"


def test_control_tokens_count_only_as_tokens() -> None:
    marks = Marks.of({"[TOOL_CALLS]": 7, "[ARGS]": 8})
    mark = marks.by_token[7]
    assert split(M, [f'a{mark}f{marks.by_token[8]}{{"a": 1}}'], marks=marks)[2] == [("1", "f", '{"a": 1}')]
    assert split(M, ["[TOOL_CALLS]f{}"], marks=marks) == ("[TOOL_CALLS]f{}", "", [])
    assert split(M, [f"a{mark}nothing"], marks=marks) == ("anothing", "", [])
    assert split(M, [f'{mark}f{{"a": "{mark}"}}'], marks=marks)[2] == [("1", "f", '{"a": "')]


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [("a:oslo}", "oslo}", '{"a": '), ("a:1,a:2}", ":2}", '{"a": 1'), ("a:<escape>x", "", '{"a": "x')],
)
def test_a_call_of_functiongemma_ends_where_it_is_malformed(text: str, content: str, arguments: str) -> None:
    assert split(E, [f"<start_function_call>call:f{{{text}"]) == (content, "", [("call_1", "f", arguments)])


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        ("... <tool_call> ...", (), H),
        ("<tool_call>\n<function=f>\n<parameter=a>", (), CallFormat.QWEN3_CODER),
        ("<parameter=a>", ("<tool_call>",), H),
        ("{{ '[TOOL_CALLS]' }}", (), M),
        ("[func_name1(params_name1=params_value1)]", ("<|python_tag|>",), P),
        ("<|python_tag|>", (), L),
        (f"{BEGIN}{CALL}' + tool['type'] + '{SEP}' + tool['function']['name'] + '\n```json'", (), R),
        (f"{BEGIN}{CALL}' + tool['function']['name'] + '{SEP}'", (), D),
        ("", (BEGIN, SEP), D),
        ("write <|tool_call|> followed by a JSON list", ("<|tool_call|>",), G),
        ("", ("<|tool_call|>", "<|/tool_call|>"), F),
        ("<function_calls>", (), A),
        ("{{ '<start_function_call>call:' }}", (), E),
        ("", ("<start_function_call>", "<escape>"), E),
        ("", ("<|python_tag|>",), L),
        ("", ("[TOOL_CALLS]",), M),
        ("", ("<tool_call>", "<think>"), H),
        ("plain", (), H),
    ],
)
def test_a_format_is_recognized(template: str, tokens: tuple[str, ...], expected: CallFormat) -> None:
    assert recognized(template, tokens.__contains__) is expected


def test_the_names_of_these_tests_are_settings() -> None:
    assert {"f", "g", "get_weather"} == set(NAMES)


def json_call(arguments: str) -> str:
    return f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    "arguments",
    [
        *('{"a": 01}', '{"a": 1.}', '{"a": .5}', '{"a": -}', '{"a": 1e}', '{"a": +1}', '{"a": nul}', '{"a": nan}'),
        *('{"a" 1}', "{a: 1}", '{"a": 1 "b": 2}', '{"a": 1,}', '{"a": [1 2]}', '{"a": [1,]}', '{"a": "\\x"}'),
        *('{"a": "\\u12g4"}', '{"a": ]}', '{"a": "\ud800"}'),
    ],
)
def test_malformed_json_ends_the_call_at_the_first_wrong_character(arguments: str) -> None:
    content, _, ((_, name, streamed),) = split(H, [json_call(arguments)])
    assert name == "f"
    assert content
    assert not is_json(streamed)
    assert arguments.startswith(streamed)


@pytest.mark.parametrize(
    "literal",
    [
        *("[1 2]", "{'a' 1}", "{1: 2}", "{'a': 1 'b'}", "Tru(", "nope", "(1)", "1_000", "'\\xg0'", "'\\U00110000'"),
        *("'\ud800'", "'\\\ud800'", "[" * 70, "{'a': " * 70),
    ],
)
def test_a_malformed_literal_ends_the_call_at_the_first_wrong_character(literal: str) -> None:
    content, _, ((_, name, streamed),) = split(P, [f"[f(a={literal})]"])
    assert name == "f"
    assert content
    assert not is_json(streamed)


@pytest.mark.parametrize(
    "text",
    [
        *("[f(1a=2)]", "[f(a=1, a=2)]", "[f(a b)]", "[f(a=1 b=2)]", "[f() g()]", "[f x()]", "[fu()]"),
        f"[f({'a' * 300}=1)]",
    ],
)
def test_malformed_python_calls_never_raise(text: str) -> None:
    content, _, _ = split(P, [text])
    assert content


def test_closing_tags_that_are_misspelled_are_content() -> None:
    assert split(H, ['<tool_call>{"name": "f"}</tool_cult>'])[0] == "</tool_cult>"
    assert split(M, ["[TOOL_CALLS]" + "f" * 300 + "{}"]) == ("[TOOL_CALLS]" + "f" * 300 + "{}", "", [])


def test_white_space_inside_of_json_is_kept() -> None:
    _, _, ((_, _, arguments),) = split(H, [json_call('{ "a" : [ 1 , { } ] }')])
    assert arguments == '{ "a" : [ 1 , { } ] }'


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
