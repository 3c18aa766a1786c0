"""The grammar of one call in the format of Qwen 3 Coder, from the schema of its arguments; see `answers.xml_calls`.

Arguments come in the order of the schema's properties; optional ones may be left out. A value that must be a string is
text without quotes, which a pattern, a length, a list of strings or a format limits. Every other value is JSON. No text
contains the closing tag of its argument.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.core.inference.tools import Tool
from kvferry.text.answers.xml_calls import END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER, kinds_of
from kvferry.text.tools.argument_schemas import separate_arguments
from kvferry.text.tools.plain_texts import FORMATS, IGNORED, PlainTexts, quoted

_TEXT = frozenset({"string", "null"})
_CLOSING = re.escape(END_PARAMETER).replace("/", r"\/")
_NOT_CLOSED = f"~/(?s:.*){_CLOSING}(?s:.*)/"
_MAX_LEAST = 64
"""Maximum `minLength` of values whose closing tag needs no search."""


def xml_call(tool: Tool, rule: str, spacing: Mapping[str, object]) -> list[str]:
    """Return the rules of the element of a function, with its arguments; the first rule is named `rule`.

    Args:
        tool: the tool to call.
        rule: name of the rule, and prefix of the names of the others.
        spacing: llguidance's options for whitespace in JSON.

    Raises:
        InvalidRequest: the schema cannot be expressed as separate arguments.
    """
    unsuitable = partial(_unsuitable, tool)
    rules: list[str] = []
    parts = [json.dumps(f"{FUNCTION}{tool.name}>\n")]
    for number, (name, schema, is_required) in enumerate(separate_arguments(tool, unsuitable)):
        if re.search("[<>\n]", name):
            raise unsuitable(f"the property {shortened(name)!r} has an angle bracket or a line break")
        part, end = f"{rule}_{number}", f"\n{END_PARAMETER}\n"
        parts.append(part if is_required else f"{part}?")
        opening = quoted(f"{PARAMETER}{name}>\n")
        kinds = kinds_of(schema, schema)
        if "string" in kinds and kinds <= _TEXT:
            terminal = part.upper()
            value = _of_lengths(schema, kinds)
            if not value:
                value = f'(({PlainTexts(schema, unsuitable).of(schema, kinds)}) & {_NOT_CLOSED}) "\\n"'
            rules += [f'{part}: {opening} {part}_value "\\n"', f"{part}_value[lazy]: {terminal}"]
            rules.append(f"{terminal}: ({value}) {json.dumps(END_PARAMETER)}")
        else:
            whole = json.dumps({**schema, "x-guidance": spacing}, ensure_ascii=False)
            rules += [f"{part}: {opening} {part}_value {json.dumps(end)}", f"{part}_value: %json {whole}"]
    return [f"{rule}: {' '.join(parts)} {json.dumps(END_FUNCTION)}", *rules]


def _of_lengths(schema: Mapping[str, Any], kinds: frozenset[str]) -> str:
    r"""Return the expression of a value of a string, up to its closing tag, that only its length limits; empty if the
    schema has other limits.

    The lexer is lazy: it ends a value at the first closing tag at which the expression matches. The expression matches
    at every closing tag after `minLength` characters and one more, with or without the line break, and permits none
    before. So no count of characters needs to be combined with a search for the tag, which the lexer's limits forbid
    for long texts.
    """
    own: Mapping[str, Any] = schema
    branches = schema.get("anyOf")
    if isinstance(branches, list):
        others = [one for one in branches if one != {"type": "null"}]
        own = others[0] if len(others) == 1 and isinstance(others[0], Mapping) else {}
        if "type" not in own or schema.keys() - IGNORED != {"anyOf"}:
            return ""
    least, most = own.get("minLength", 0), own.get("maxLength", "")
    is_counted = all(type(one) is int and one >= 0 for one in (least, most or 0)) and least <= _MAX_LEAST
    known = {"minLength", "maxLength"} | ({"format"} if str(own.get("format")) not in FORMATS else set())
    if not is_counted or own.keys() - IGNORED - known or (most != "" and most <= least):
        return ""
    text = rf"/(?s:.{{0,{most}}}\n?)/"
    if least:
        text = rf"/(?s:.{{{least},{most}}}\n|.{{{least + 1},{most}}})/ & ~/(?s:.{{0,{least}}}){_CLOSING}(?s:.*)/"
    return f'({text}) | "null\\n"' if "null" in kinds else text


def _unsuitable(tool: Tool, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"the parameters of {tool.name!r} cannot be enforced in this model's call format, which writes each argument "
        f"as text: {why}; use tool_choice auto, or an object schema with plain properties",
        field="tools",
    )
