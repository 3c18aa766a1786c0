"""Prepares grammars in llguidance's Lark syntax: embedded schemas and names of control tokens.

The compiler gets control tokens without their texts (see `library_tokenizer`), so a grammar refers to them by id.
"""

import json
import re
from collections.abc import Mapping

from kvferry.model.grammar.json_schema import enforced

_LAYOUT = ("item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern")
"""Options of the compiler that an embedded schema may set: the layout of its JSON. Others change what it enforces."""
_TOKEN = re.compile(
    r"""
      (?P<comment> (?: // | \# ) [^\n]* )
    | (?P<string> " (?: \\. | [^"\\\n] )* " )
    | (?P<regex> / (?: \\. | [^/\\\n] )+ / )
    | (?P<json> %json \b \s* )
    | (?P<control> < [^<>\s]+ > )
    """,
    re.VERBOSE,
)


def prepared_lark(text: str, control_ids: Mapping[str, int]) -> str:
    """Return a grammar whose `%json` schemas the compiler enforces exactly, and which refers to control tokens by id.

    Args:
        text: a grammar in Lark syntax; the compiler reports its errors.
        control_ids: ids of the tokenizer's control tokens by text.

    Raises:
        InvalidRequest: an embedded schema has a part that cannot be enforced.
    """
    made: list[str] = []
    copied = at = 0
    while found := _TOKEN.search(text, at):
        at = found.end()
        if found["control"] in control_ids:
            made += (text[copied : found.start()], f"<[{control_ids[found['control']]}]>")
            copied = at
        elif found["json"]:
            try:
                schema, end = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError):
                continue  # the compiler reports it
            made += (text[copied:at], json.dumps(enforced(schema, _LAYOUT), ensure_ascii=False))
            copied = at = end
    return "".join((*made, text[copied:]))
