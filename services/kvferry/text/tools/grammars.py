"""Grammars of answers that consist of tool calls, for constrained decoding: one for each format of calls.

A grammar is text in llguidance's dialect of Lark, with the schemas of the arguments inline. The parser of the same
format reads every output that the grammar accepts, with arguments that match their schemas. Separators follow the
models' training data (one space after a comma or colon), and no whitespace is optional, since small models repeat it
endlessly.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvferry.core.errors import InvalidRequest
from kvferry.core.inference.tools import Tool
from kvferry.text.answers import gemma_calls, json_calls, pythonic
from kvferry.text.answers.marks import HARMONY, Marks
from kvferry.text.answers.reasoning import OPENER
from kvferry.text.answers.registry import CallFormat
from kvferry.text.tools.argument_schemas import check_arguments, closed
from kvferry.text.tools.gemma_grammar import gemma_call
from kvferry.text.tools.pythonic_grammar import pythonic_call
from kvferry.text.tools.xml_grammar import xml_call

MAX_CALLS = 16
"""Maximum number of calls in an answer that must have calls, since a small model may never stop."""
_SPACING: Mapping[str, object] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def calls_grammar(
    call_format: CallFormat, tools: Sequence[Tool], marks: Marks, *, is_single: bool = False, thought: str = ""
) -> str:
    """Return the grammar of an answer with at least one call.

    Args:
        call_format: the model's format of calls.
        tools: tools that may be called, at least one.
        marks: markers that are control tokens of the model.
        is_single: whether the answer has exactly one call.
        thought: rules for text before the calls, from `thought_rules`; empty if no text may come before them.

    Raises:
        InvalidRequest: a schema cannot be expressed in the format.
    """
    more = 0 if is_single else MAX_CALLS - 1
    return _with_thought("answer", thought, _FORMATS[call_format](tools, marks, more))


def answer_frame(
    call_format: CallFormat, tools: Sequence[Tool], marks: Marks, *, is_single: bool = False, thought: str = ""
) -> str:
    """Return the grammar of an answer that is calls or the text for which `@body` stands.

    Args:
        call_format: the model's format of calls.
        tools: tools that may be called; without tools, the answer is the text.
        marks: markers that are control tokens of the model.
        is_single: whether the answer has at most one call.
        thought: rules for text before the answer, from `thought_rules`; empty if no text may come before it.
    """
    final = "final: @body"
    if call_format is CallFormat.HARMONY:
        channel, message, constrain, *_ = (_terminal(marker, marks) for marker in HARMONY)
        final = f'final: {channel} "final" (" " {constrain} "json")? {message} @body'
    if not tools:
        return _with_thought("final", thought, [final])
    made = {**_FORMATS, CallFormat.LLAMA3_JSON: _llama3_json_beside_text}[call_format]
    rules = made([_offered(tool) for tool in tools], marks, 0 if is_single else MAX_CALLS - 1)
    return _with_thought("(answer | final)", thought, [*rules, final])


def _offered(tool: Tool) -> Tool:
    """Return a tool that may be called but need not be: with any arguments if its schema cannot be enforced, as in an
    answer without a grammar."""
    try:
        check_arguments(tool, closed(tool.schema))
    except InvalidRequest:
        return replace(tool, parameters={"type": "object", "additionalProperties": True})
    return tool


def _with_thought(answer: str, thought: str, rules: Sequence[str]) -> str:
    lines = [f"start: thought {answer}", thought] if thought else [f"start: {answer}"]
    return "\n".join([*lines, *rules]) + "\n"


def free_answer(call_format: CallFormat, marks: Marks, *, thought: str, is_open: bool) -> str:
    """Return the grammar of reasoning before an answer of any tokens.

    Args:
        call_format: the model's format of calls.
        marks: markers that are control tokens of the model.
        thought: rules of the reasoning, from `thought_rules`.
        is_open: whether the prompt has opened the reasoning.
    """
    if is_open and call_format is not CallFormat.HARMONY:
        return _with_thought("rest", thought, ["rest: <[*]>*"])
    return _with_thought("rest", thought, _free_rest(call_format, marks))


def _free_rest(call_format: CallFormat, marks: Marks) -> list[str]:
    """Return the rule `rest` of an answer of any tokens that has no reasoning, neither by the token of its opener nor
    by its text, and also not after whitespace, which `answers.reasoning` skips."""
    if call_format is CallFormat.HARMONY:
        channel, message, constrain, *_ = (_terminal(marker, marks) for marker in HARMONY)
        head = f'{channel} ("final" | "commentary") / [^<]*/? ({constrain} /[a-z]*/)? {message}'
        return ["rest: message+", f"message: {head} <[^{marks.token_ids[HARMONY[0]]}]>*"]
    opener = marks.token_ids["<think>"]
    others = sorted({token for text, token in marks.token_ids.items() if text != "<think>"})
    # Text that is not the opener: another character at one of its places.
    places = "|".join(f"{re.escape(OPENER[:n])}[^{OPENER[n]}{'' if n else chr(92) + 's'}]" for n in range(len(OPENER)))
    first = [f"/(?s:\\s*({places}))/", *(f"/\\s*/ <[{token}]>" for token in others)]
    return [f"rest: (({' | '.join(first)}) <[^{opener}]>*)? | /\\s+/"]


def textual_marks(call_format: CallFormat, marks: Marks, *, is_open: bool = False) -> list[str]:
    """Return the marks of the reasoning that are text and no tokens of the model, so that a grammar cannot enforce its
    end after a number of tokens.

    Args:
        call_format: the model's format of calls.
        marks: markers that are control tokens of the model.
        is_open: whether the prompt has opened the reasoning.
    """
    ends = ("</think>",) if is_open else ("<think>", "</think>")
    needed = (HARMONY[0], HARMONY[1], HARMONY[3], HARMONY[4]) if call_format is CallFormat.HARMONY else ends
    return [mark for mark in needed if mark not in marks.token_ids]


def check_budget(call_format: CallFormat, marks: Marks, *, is_open: bool) -> None:
    """Check that the length of the reasoning can be limited.

    Raises:
        InvalidRequest: its marks are text.
    """
    if missing := textual_marks(call_format, marks, is_open=is_open):
        raise InvalidRequest(
            f"the length of the reasoning cannot be limited for this model, since {', '.join(missing)} is text and no "
            "token; leave thinking_token_budget out and use max_tokens",
            field="thinking_token_budget",
        )


def thought_rules(
    marks: Marks, *, is_open: bool, call_format: CallFormat = CallFormat.HERMES, max_tokens: int | None = None
) -> str:
    """Return the rules of reasoning before the answer, which may have none unless the prompt has opened it.

    Args:
        call_format: the model's format of calls; harmony's reasoning is a separate message.
        marks: markers that are control tokens of the model.
        is_open: whether the prompt has opened the reasoning.
        max_tokens: maximum number of tokens between the marks, which must be tokens (`check_budget`); `None` for no
            limit.
    """
    limit = "" if max_tokens is None else f"[max_tokens={max_tokens}]"
    if call_format is CallFormat.HARMONY:
        return _harmony_thought(marks, limit)
    closer = marks.token_ids.get("</think>")
    body = f"thought_text <[{closer}]>" if closer is not None else "thought_text"
    ending = limit if closer is not None else '[suffix="</think>"]'
    whole = f'{body} "\\n"{{0,2}}'
    rule = whole if is_open else f"({_terminal('<think>', marks)} {whole})?"
    return f"thought: {rule}\nthought_text{ending}: /(?s:.*)/"


def _harmony_thought(marks: Marks, limit: str) -> str:
    channel, message, _, start, end, *_ = (_terminal(marker, marks) for marker in HARMONY)
    is_token = HARMONY[4] in marks.token_ids
    ending = limit if is_token else f"[suffix={end}]"
    body = f"thought_text {end}" if is_token else "thought_text"
    opening = f'thought: ({channel} "analysis" {message} {body} {start} "assistant")?'
    return f"{opening}\nthought_text{ending}: /(?s:.*)/"


def _terminal(marker: str, marks: Marks) -> str:
    """Return a marker as it is written in a rule: as a control token, or as its text."""
    token_id = marks.token_ids.get(marker)
    return json.dumps(marker) if token_id is None else f"<[{token_id}]>"


def _arguments(tool: Tool) -> dict[str, Any]:
    arguments = closed(tool.schema)
    check_arguments(tool, arguments)
    return {**arguments, "type": "object"}


def _schema(tool: Tool) -> str:
    whole = {**_arguments(tool), "x-guidance": _SPACING}
    return f"%json {json.dumps(whole, ensure_ascii=False)}"


def _json_calls(tools: Sequence[Tool]) -> list[str]:
    """Return the rule `call` of a call as a JSON object, and the rules that it refers to."""
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        rules += [f'call_{number}: {head} arguments_{number} "}}"', f"arguments_{number}: {_schema(tool)}"]
    return rules


def _hermes(tools: Sequence[Tool], marks: Marks, more: int) -> list[str]:
    tagged = f'{_terminal("<tool_call>", marks)} "\\n" call "\\n" {_terminal("</tool_call>", marks)}'
    rules = [f'answer: tagged ("\\n" tagged){{0,{more}}}' if more else "answer: tagged", f"tagged: {tagged}"]
    return rules + _json_calls(tools)


def _llama3_json(tools: Sequence[Tool], _marks: Marks, more: int) -> list[str]:
    rules = [f'answer: call ("; " call){{0,{more}}}' if more else "answer: call"]
    rules += ["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "parameters": ')
        rules += [f'call_{number}: {head} arguments_{number} "}}"', f"arguments_{number}: {_schema(tool)}"]
    return rules


def _llama3_json_beside_text(tools: Sequence[Tool], _marks: Marks, more: int) -> list[str]:
    """Return the rules of calls beside a constrained text, which may begin like a call. The lexer then reads both in
    parallel only if a call is JSON with the same whitespace."""
    rules = [f'answer: call ("; " call){{0,{more}}}' if more else "answer: call"]
    rules += ["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        members = {"name": {"const": tool.name}, "parameters": {"$ref": "#/$defs/arguments"}}
        whole = {
            "type": "object",
            "properties": members,
            "required": list(members),
            "additionalProperties": False,
            "$defs": {"arguments": _moved(_arguments(tool), "#/$defs/arguments")},
        }
        rules += [f"call_{number}: %json {json.dumps(whole, ensure_ascii=False)}"]
    return rules


def _moved(schema: Any, place: str) -> Any:
    """Return a schema for another place: its references begin there."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: value if key in ("const", "enum") else _moved(value, place) for key, value in schema.items()}
    reference = made.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        made["$ref"] = place + reference[1:]
    return made


def _mistral(tools: Sequence[Tool], marks: Marks, more: int) -> list[str]:
    return _list_of_calls(_terminal(json_calls.MISTRAL_TAG, marks), "", tools, more)


def _granite(tools: Sequence[Tool], marks: Marks, more: int) -> list[str]:
    return _list_of_calls(_terminal(json_calls.LIST_OPENER, marks), "", tools, more)


def _phi4(tools: Sequence[Tool], marks: Marks, more: int) -> list[str]:
    opener, closer = (_terminal(marker, marks) for marker in (json_calls.LIST_OPENER, json_calls.LIST_CLOSER))
    return _list_of_calls(opener, closer, tools, more)


def _list_of_calls(opener: str, closer: str, tools: Sequence[Tool], more: int) -> list[str]:
    several = f' (", " call){{0,{more}}}' if more else ""
    return [f'answer: {opener} "[" call{several} "]" {closer}', *_json_calls(tools)]


def _deepseek_v3(tools: Sequence[Tool], marks: Marks, more: int) -> list[str]:
    separator = _terminal(json_calls.SEPARATOR, marks)
    rules = _deepseek('"\\n"', tools, marks, more)
    for number, tool in enumerate(tools):
        head = json.dumps(f"{tool.name}\n{json_calls.FENCE}\n")
        end = json.dumps(f"\n{json_calls.FENCE_END}")
        rules.append(f'call_{number}: "function" {separator} {head} arguments_{number} {end}')
        rules.append(f"arguments_{number}: {_schema(tool)}")
    return rules


def _deepseek_v31(tools: Sequence[Tool], marks: Marks, more: int) -> list[str]:
    separator = _terminal(json_calls.SEPARATOR, marks)
    rules = _deepseek("", tools, marks, more)
    for number, tool in enumerate(tools):
        rules.append(f'call_{number}: "{tool.name}" {separator} arguments_{number}')
        rules.append(f"arguments_{number}: {_schema(tool)}")
    return rules


def _deepseek(between: str, tools: Sequence[Tool], marks: Marks, more: int) -> list[str]:
    """Return the rules around the calls, which have `between` between them."""
    begin, end = _terminal(json_calls.CALLS, marks), _terminal(json_calls.CALLS_END, marks)
    several = f" ({between} tagged){{0,{more}}}" if more else ""
    return [
        f"answer: {begin} tagged{several} {end}",
        f"tagged: {_terminal(json_calls.CALL, marks)} call {_terminal(json_calls.CALL_END, marks)}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(tools))),
    ]


def _pythonic(tools: Sequence[Tool], _marks: Marks, more: int) -> list[str]:
    several = f' (", " call){{0,{more}}}' if more else ""
    return [f'answer: "[" call{several} "]"', *_python_calls(tools)]


def _olmo3(tools: Sequence[Tool], marks: Marks, more: int) -> list[str]:
    several = f' ("\\n" call){{0,{more}}}' if more else ""
    opener, closer = (_terminal(marker, marks) for marker in (pythonic.OLMO3_OPENER, pythonic.OLMO3_CLOSER))
    return [f"answer: {opener} call{several} {closer}", *_python_calls(tools)]


def _python_calls(tools: Sequence[Tool]) -> list[str]:
    """Return the rule `call` of a Python call, and the rules that it refers to."""
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        rules += pythonic_call(tool, f"call_{number}", _SPACING)
    return rules


def _qwen3_coder(tools: Sequence[Tool], marks: Marks, more: int) -> list[str]:
    tagged = f'{_terminal("<tool_call>", marks)} "\\n" call "\\n" {_terminal("</tool_call>", marks)}'
    rules = [f'answer: tagged ("\\n" tagged){{0,{more}}}' if more else "answer: tagged", f"tagged: {tagged}"]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    for number, tool in enumerate(tools):
        rules += xml_call(tool, f"call_{number}", _SPACING)
    return rules


def _functiongemma(tools: Sequence[Tool], marks: Marks, more: int) -> list[str]:
    opener, closer = (_terminal(marker, marks) for marker in (gemma_calls.OPENER, gemma_calls.CLOSER))
    rules = [f"answer: tagged{{1,{more + 1}}}", f"tagged: {opener} call {closer}"]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    is_spelled = gemma_calls.QUOTE not in marks.by_text
    for number, tool in enumerate(tools):
        rules += gemma_call(
            tool, f"call_{number}", _SPACING, _terminal(gemma_calls.QUOTE, marks), is_spelled=is_spelled
        )
    return rules


def _harmony(tools: Sequence[Tool], marks: Marks, more: int) -> list[str]:
    channel, message, constrain, start, _, _, call = (_terminal(marker, marks) for marker in HARMONY)
    several = f' ({call} {start} "assistant" call){{0,{more}}}' if more else ""
    rules = [f"answer: call{several}", "call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        head = f'{channel} {json.dumps(f"commentary to=functions.{tool.name} ")} {constrain} "json" {message}'
        rules += [f"call_{number}: {head} arguments_{number}", f"arguments_{number}: {_schema(tool)}"]
    return rules


_FORMATS: Mapping[CallFormat, Callable[[Sequence[Tool], Marks, int], list[str]]] = {
    CallFormat.DEEPSEEK_V3: _deepseek_v3,
    CallFormat.DEEPSEEK_V31: _deepseek_v31,
    CallFormat.FUNCTIONGEMMA: _functiongemma,
    CallFormat.GRANITE: _granite,
    CallFormat.HERMES: _hermes,
    CallFormat.HARMONY: _harmony,
    CallFormat.LLAMA3_JSON: _llama3_json,
    CallFormat.MISTRAL: _mistral,
    CallFormat.OLMO3: _olmo3,
    CallFormat.PHI4: _phi4,
    CallFormat.PYTHONIC: _pythonic,
    CallFormat.QWEN3_CODER: _qwen3_coder,
}
