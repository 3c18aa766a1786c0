"""Translates constraints to llguidance's grammar format.

llguidance reads JSON with a list of grammars, each in Lark's syntax or a JSON Schema, which refer to each other by name
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md). A constraint that applies after a marker becomes
two grammars: free text up to the marker, then the constraint.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import shortened
from kvferry.text.grammar.errors import invalid
from kvferry.text.grammar.json_schema import enforced, parsed_schema, with_layout
from kvferry.text.grammar.lark_text import NamedTokens, prepared_lark, quoted
from kvferry.text.grammar.tagged_formats import lark_of_format

MAX_CHOICES = 1024
MAX_TAGS = 128
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
"""A rule of GBNF; one of Lark has a single colon."""
_FREE_TEXT = r"/(?s:.*)/"
_BODY = "body"


def grammar_text(constraint: Constraint, tokens: NamedTokens) -> str:
    """Translate a constraint.

    Args:
        constraint: the constraint of a request.
        tokens: the tokens that a grammar can name.

    Raises:
        InvalidRequest: the constraint must be JSON and is not, or a list in it is too long. The compiler checks
            grammars and schemas.
    """
    text = _TRANSLATE[constraint.kind](constraint.source, tokens)
    if constraint.frame:
        return _framed(text, prepared_lark(constraint.frame, tokens))
    return _framed(text, _delay(constraint.after, tokens)) if constraint.after else text


def _framed(text: str, frame: str) -> str:
    grammars = json.loads(text)["grammars"]
    grammars[0]["name"] = _BODY
    return json.dumps({"grammars": [{"lark_grammar": frame}, *grammars]})


def _delay(after: str, tokens: NamedTokens) -> str:
    if after in tokens.by_id:
        return f"start: {_FREE_TEXT} <[{tokens.by_id[after]}]> @{_BODY}"
    return f"start: free @{_BODY}\nfree[suffix={quoted(after)}]: {_FREE_TEXT}"


def _lark(text: str, tokens: NamedTokens) -> str:
    return json.dumps({"grammars": [{"lark_grammar": prepared_lark(text, tokens)}]})


def _json_schema(source: str, _: NamedTokens) -> str:
    from llguidance import LLMatcher

    try:
        schema = parsed_schema(source)
        if isinstance(schema, bool):  # any JSON
            schema = {} if schema else {"not": {}}
        return LLMatcher.grammar_from_json_schema(json.dumps(with_layout(schema), ensure_ascii=False))
    except ValueError as error:
        raise invalid(f"json_schema is not a valid schema: {error}") from None


def _json_object(_: str, tokens: NamedTokens) -> str:
    return _json_schema('{"type": "object"}', tokens)


def _regex(source: str, _: NamedTokens) -> str:
    from llguidance import LLMatcher

    text = LLMatcher.grammar_from_regex(source)
    return text if text.startswith("{") else _lark(text, NamedTokens())  # text that begins with { is llguidance's JSON


def _choice(source: str, tokens: NamedTokens) -> str:
    items = _parsed("choice", source)
    if not isinstance(items, list) or not 0 < len(items) <= MAX_CHOICES or not all(isinstance(i, str) for i in items):
        raise invalid(f"choice must be a list of 1 to {MAX_CHOICES} strings")
    if not all(items):
        raise invalid("choice has an empty string; leave it out")
    return _lark("start: " + " | ".join(map(quoted, items)), tokens)


def _grammar(source: str, tokens: NamedTokens) -> str:
    return json.dumps({"grammars": [{"lark_grammar": _as_lark(source, tokens)}]})


def _as_lark(source: str, tokens: NamedTokens) -> str:
    """Return a grammar in Lark's syntax or in GBNF as one that the compiler reads."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if not _GBNF_RULE.search(source):
        return prepared_lark(source, tokens)
    try:
        text = gbnf_to_lark(source)
    except Exception as error:  # the converter raises plain exceptions
        raise invalid(f"grammar has rules with ::= and is not valid GBNF: {error}") from None
    return prepared_lark(text, tokens)


def _structural_tag(source: str, tokens: NamedTokens) -> str:
    from llguidance import StructTag

    value = _parsed("structural_tag", source)
    if isinstance(value, dict) and "format" in value:
        text, others = lark_of_format(value["format"], tokens, lambda source: _as_lark(source, tokens))
        return json.dumps({"grammars": [{"lark_grammar": text}, *others]})
    structures = value.get("structures") if isinstance(value, dict) else None
    triggers = value.get("triggers") if isinstance(value, dict) else None
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise invalid("structural_tag needs `format`, or the lists `structures` and `triggers`")
    if not 0 < len(structures) <= MAX_TAGS or not 0 < len(triggers) <= MAX_TAGS:
        raise invalid(f"structural_tag needs 1 to {MAX_TAGS} structures and 1 to {MAX_TAGS} triggers")
    tags: list[StructTag] = []
    for structure in structures:
        begin, schema, end = _structure(structure)
        trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
        if trigger is None:
            raise invalid(f"structural_tag has no trigger for the tag {shortened(begin)!r}; a tag starts with one")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    specials = {tag.trigger in tokens.by_id for tag in tags if tag.trigger.startswith("<")}
    if len(specials) > 1:
        raise invalid("structural_tag mixes triggers that are control tokens of the model with others in <...>")
    return _lark(StructTag.to_grammar(tags, assume_special=specials == {True}), tokens)


def _structure(structure: object) -> tuple[str, dict[str, Any], str]:
    if isinstance(structure, dict):
        begin, schema, end = structure.get("begin"), structure.get("schema"), structure.get("end", "")
        if isinstance(begin, str) and begin and isinstance(schema, dict) and isinstance(end, str):
            enforced(schema)  # checked here, prepared as part of the grammar
            return begin, schema, end
    raise invalid("a structure of structural_tag has `begin` and `end` (strings) and `schema` (an object)")


def _parsed(name: str, source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{name} is not JSON: {shortened(str(error))}") from None


_TRANSLATE: Mapping[ConstraintKind, Callable[[str, NamedTokens], str]] = {
    ConstraintKind.JSON_SCHEMA: _json_schema,
    ConstraintKind.JSON_OBJECT: _json_object,
    ConstraintKind.REGEX: _regex,
    ConstraintKind.CHOICE: _choice,
    ConstraintKind.GRAMMAR: _grammar,
    ConstraintKind.STRUCTURAL_TAG: _structural_tag,
}
