"""Prepares grammars in llguidance's Lark syntax: embedded schemas and names of control tokens.

The compiler gets control tokens without their texts (see `library_tokenizer`), so a grammar refers to them by id.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.text.grammar.errors import invalid
from kvferry.text.grammar.json_schema import LAYOUT, enforced, with_layout


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """Tokens that a grammar refers to by their text."""

    by_id: Mapping[str, int] = field(default_factory=dict)
    """Ids by text of control tokens and of markers of answers. Control tokens are matched by id, never by text."""
    ordinary: tuple[str, ...] = ()
    """Texts of those that are no control tokens: their text is a part of the output."""


_TOKEN = re.compile(
    r"""
      (?P<name> ^ [ \t]* [?!]? [^\W\d] \w* (?: \. -? \d+ )? [ \t]* (?= [\[:] ) )
    | (?P<colon> : )
    | (?P<literal> (?: // | \# ) [^\n]* | " (?: \\. | [^"\\\n] )* "? | / (?: \\. | [^/\\] )+ /? )
    | (?P<json> %json \b \s* )
    | (?P<control> < [^<>\s]+ > )
    | (?P<temperature> \b temperature \s* = )
    """,
    re.VERBOSE | re.MULTILINE,
)
"""Tokens of the compiler's lexer: the name of a rule, before its attributes; the colon after them; a literal, which is
a comment, a string, or a regex, which may have line breaks. A string or regex that is not closed, which the compiler
rejects, is read to its end only once."""
_JSON = "%json"


def prepared_lark(text: str, tokens: NamedTokens) -> str:
    """Return a grammar whose `%json` schemas the compiler enforces exactly, and which refers to tokens by id.

    A string in a rule that has an ordinary marker permits the marker's token as well as its text. Names of terminals
    are in capitals; they cannot refer to tokens.

    Args:
        text: a grammar in Lark syntax; the compiler reports its errors.
        tokens: the tokens that have names.

    Raises:
        InvalidRequest: an embedded schema has a part that cannot be enforced, or a rule has a temperature, which the
            sampler does not apply.
    """
    made: list[str] = []
    copied = at = 0
    is_rule = in_rule = False
    while found := _TOKEN.search(text, at):
        at = found.end()
        if found["name"]:
            is_rule, in_rule = found["name"].islower(), False
        elif found["colon"]:
            in_rule = is_rule
        if found["temperature"]:
            raise invalid("the temperature of a grammar's rule is not supported; set the request's temperature")
        if found["literal"] and _JSON in found["literal"]:  # the compiler's lexer may read it as a schema
            raise invalid(f"{_JSON} in a string, a regex or a comment is not supported; write \\x25json")
        if found["control"] in tokens.by_id:
            made += (text[copied : found.start()], f"<[{tokens.by_id[found['control']]}]>")
            copied = at
        elif in_rule and found["literal"] and (spelled := _with_tokens(found["literal"], tokens)):
            made += (text[copied : found.start()], spelled)
            copied = at
        elif found["json"]:
            try:
                schema, end = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError):
                raise invalid(f"{_JSON} is not followed by a valid JSON schema") from None
            try:
                prepared = json.dumps(with_layout(enforced(schema, LAYOUT)), ensure_ascii=False)
            except RecursionError:
                raise invalid(f"the schema after {_JSON} is nested too deeply") from None
            made += (text[copied:at], prepared)
            copied = at = end
    return "".join((*made, text[copied:]))


def quoted(text: str) -> str:
    """Quote a string for Lark, whose lexer rejects control characters; a `%` could begin `%json`."""
    return json.dumps(text).replace("\x7f", "\\u007f").replace("%", "\\u0025")


def _with_tokens(literal: str, tokens: NamedTokens) -> str:
    """Return a string as a group in which ordinary markers may be their tokens; empty if it has none."""
    if not tokens.ordinary or not literal.startswith('"'):
        return ""
    if any(f"\\{marker}" in literal for marker in tokens.ordinary):
        return ""
    parts = re.split("(" + "|".join(map(re.escape, tokens.ordinary)) + ")", literal[1:-1])
    if len(parts) == 1:
        return ""
    texts, markers = parts[::2], parts[1::2]
    group = [f'"{texts[0]}"' if texts[0] else ""]
    for marker, after in zip(markers, texts[1:], strict=True):
        group += [f'(<[{tokens.by_id[marker]}]> | "{marker}")', f'"{after}"' if after else ""]
    return f"({' '.join(filter(None, group))})"
