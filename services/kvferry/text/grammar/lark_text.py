"""Prepares grammars in llguidance's Lark syntax: embedded schemas and names of control tokens.

The compiler gets control tokens without their texts (see `library_tokenizer`), so a grammar refers to them by id.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from kvferry.text.grammar.errors import invalid
from kvferry.text.grammar.json_schema import OPTIONS, WHITESPACE, enforced

_LAYOUT = ("item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern")
"""Options of the compiler that an embedded schema may set: the layout of its JSON. Others change what it enforces."""
_TOKEN = re.compile(
    r"""
      (?P<literal> (?: // | \# ) [^\n]* | " (?: \\. | [^"\\\n] )* " | / (?: \\. | [^/\\] )+ / )
    | (?P<json> %json \b \s* )
    | (?P<control> < [^<>\s]+ > )
    | (?P<temperature> \b temperature \s* = )
    """,
    re.VERBOSE,
)
"""Tokens of the compiler's lexer: a literal is a comment, a string, or a regex, which may have line breaks."""
_JSON = "%json"


def prepared_lark(text: str, control_ids: Mapping[str, int]) -> str:
    """Return a grammar whose `%json` schemas the compiler enforces exactly, and which refers to control tokens by id.

    Args:
        text: a grammar in Lark syntax; the compiler reports its errors.
        control_ids: ids of the tokenizer's control tokens by text.

    Raises:
        InvalidRequest: an embedded schema has a part that cannot be enforced, or a rule has a temperature, which the
            sampler does not apply.
    """
    made: list[str] = []
    copied = at = 0
    while found := _TOKEN.search(text, at):
        at = found.end()
        if found["temperature"]:
            raise invalid("the temperature of a grammar's rule is not supported; set the request's temperature")
        if found["literal"] and _JSON in found["literal"]:  # the compiler's lexer may read it as a schema
            raise invalid(f"{_JSON} in a string, a regex or a comment is not supported; write \\x25json")
        if found["control"] in control_ids:
            made += (text[copied : found.start()], f"<[{control_ids[found['control']]}]>")
            copied = at
        elif found["json"]:
            try:
                schema, end = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError):
                continue  # the compiler reports it
            made += (text[copied:at], json.dumps(_with_layout(enforced(schema, _LAYOUT)), ensure_ascii=False))
            copied = at = end
    return "".join((*made, text[copied:]))


def _with_layout(schema: Any) -> Any:
    """Return a schema that limits whitespace, unless it sets it."""
    layout = schema.get(OPTIONS, {}) if isinstance(schema, dict) else None
    if layout is None or "whitespace_pattern" in layout or layout.get("whitespace_flexible") is False:
        return schema
    return {**schema, OPTIONS: {**layout, "whitespace_pattern": WHITESPACE}}
