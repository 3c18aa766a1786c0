"""Translates the formats of structural tags to Lark, as xgrammar 0.2 and vLLM 0.32 write them:
`{"type": "structural_tag", "format": {"type": "triggered_tags", ...}}`.

Free text ends at the first occurrence of what follows it: a trigger, the end of its tag, or the constant after it. A
marker that is a control token of the model is matched by its token alone, so free text never contains it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvferry.core.errors import shortened
from kvferry.text.grammar.errors import invalid
from kvferry.text.grammar.json_schema import LAYOUT, enforced, with_layout
from kvferry.text.grammar.lark_text import NamedTokens, quoted

MAX_FORMATS = 512
"""Maximum number of formats in a structural tag, nested ones included."""
MAX_DEPTH = 32
MAX_REPEATS = 1024
_MAX_REPEATED_CHARS = 256
"""Length from which ends that several formats share are a rule of their own."""
_TEXT = "/(?s:.*)/"
_Ends = tuple[str, ...]
"""Texts of which one follows a format; empty if nothing has to follow."""


def lark_of_format(value: object, tokens: NamedTokens, gbnf: Callable[[str], str]) -> tuple[str, list[dict[str, str]]]:
    """Translate a format; return the grammar in Lark, and further grammars that it refers to by name.

    Args:
        value: the format, as parsed from JSON.
        tokens: the tokens that a grammar can name.
        gbnf: converts a grammar in EBNF to Lark.

    Raises:
        InvalidRequest: the format is invalid, too large, or has a part that no grammar can express.
    """
    made = _Translation(tokens, gbnf)
    start = made.expression(value, (), 0, "format")
    rules = "".join(f"{name}: {body}\n" for name, body in made.rules.items())
    return f"start: {start}\n{rules}", made.grammars


class _Translation:
    """The rules of one structural tag."""

    def __init__(self, tokens: NamedTokens, gbnf: Callable[[str], str]) -> None:
        self.rules: dict[str, str] = {}
        self.grammars: list[dict[str, str]] = []
        self._tokens, self._gbnf = tokens, gbnf
        self._count = 0
        self._names = sorted(tokens.by_id, key=len, reverse=True)
        self._texts: dict[tuple[str, ...], str] = {}
        """Terminals of free text by the texts that they exclude."""
        self._untils: dict[tuple[str, str], str] = {}
        """Rules of free text up to an end, by the free text and the end."""
        self._ends: dict[_Ends, str] = {}
        """Rules of ends."""
        self._translate: Mapping[str, Callable[[dict[str, Any], _Ends, int, str], str]] = {
            "any_text": self._any_text,
            "const_string": self._const_string,
            "dispatch": self._dispatch,
            "grammar": self._grammar,
            "json_schema": self._json_schema,
            "optional": self._optional,
            "or": self._or,
            "plus": self._plus,
            "regex": self._regex,
            "repeat": self._repeat,
            "sequence": self._sequence,
            "star": self._star,
            "tag": self._tag,
            "tags_with_separator": self._tags_with_separator,
            "token": self._token,
            "triggered_tags": self._triggered_tags,
        }

    def expression(self, value: object, then: _Ends, depth: int, where: str) -> str:
        """Return a format as the right side of a rule, with one of the texts `then` at its end."""
        self._count += 1
        if self._count > MAX_FORMATS:
            raise invalid(f"structural_tag has more than {MAX_FORMATS} formats")
        if depth > MAX_DEPTH:
            raise invalid(f"structural_tag has formats in more than {MAX_DEPTH} levels")
        kind = value.get("type") if isinstance(value, dict) else None
        translate = self._translate.get(kind) if isinstance(kind, str) else None
        if translate is None or not isinstance(value, dict):
            given = f"the type {shortened(kind)!r}" if isinstance(kind, str) else "no type"
            raise invalid(
                f"structural_tag: {where} has {given}, which is not supported; use one of "
                f"{', '.join(sorted(self._translate))}"
            )
        return translate(value, then, depth, where)

    # -- basic formats -----------------------------------------------------------------------------------------------

    def _const_string(self, value: dict[str, Any], then: _Ends, _depth: int, where: str) -> str:
        return self._followed(self._literal(_text(value, "value", where)), then)

    def _json_schema(self, value: dict[str, Any], then: _Ends, _depth: int, where: str) -> str:
        if (style := value.get("style", "json")) not in (None, "json"):
            raise invalid(
                f"structural_tag: {where}.style {shortened(str(style))!r} is not supported; send the functions as "
                "`tools`, whose calls have the model's form, or use the style 'json'"
            )
        _only(value, where, excludes=[])
        schema = value.get("json_schema")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise invalid(f"structural_tag: {where}.json_schema must be a JSON Schema")
        made = with_layout(enforced(schema, LAYOUT))
        return self._followed(f"%json {json.dumps(made, ensure_ascii=False)}", then)

    def _regex(self, value: dict[str, Any], then: _Ends, _depth: int, where: str) -> str:
        return self._followed(_lark_regex(_text(value, "pattern", where)), then)

    def _grammar(self, value: dict[str, Any], then: _Ends, _depth: int, where: str) -> str:
        name = f"g{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": self._gbnf(_text(value, "grammar", where))})
        return self._followed(f"@{name}", then)

    def _token(self, value: dict[str, Any], then: _Ends, _depth: int, where: str) -> str:
        token = value.get("token")
        number = self._tokens.by_id.get(token) if isinstance(token, str) else token
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise invalid(f"structural_tag: {where}.token must be a token id or the text of a marker of the model")
        return self._followed(f"<[{number}]>", then)

    def _any_text(self, value: dict[str, Any], then: _Ends, _depth: int, where: str) -> str:
        _only(value, where, max_tokens=None, max_chars=None)
        return self._until(then, self._excludes(value, where)) if then else self._free(self._excludes(value, where))

    # -- combinations ------------------------------------------------------------------------------------------------

    def _sequence(self, value: dict[str, Any], then: _Ends, depth: int, where: str) -> str:
        elements = _list(value, "elements", where)
        last = len(elements) - 1
        made: list[str] = []
        number = 0
        while number <= last:
            place = f"{where}.elements.{number}"
            if number < last and _is_text(elements[number]):
                made.append(self.expression(elements[number], _constant(elements[number + 1], place), depth + 1, place))
                number += 1  # free text includes the constant that ends it
                if number == last and then:
                    made.append(self._any_of(then))
            else:
                made.append(self.expression(elements[number], then if number == last else (), depth + 1, place))
            number += 1
        return f"({' '.join(made)})"

    def _or(self, value: dict[str, Any], then: _Ends, depth: int, where: str) -> str:
        elements = _list(value, "elements", where)
        made = [self.expression(e, then, depth + 1, f"{where}.elements.{n}") for n, e in enumerate(elements)]
        return f"({' | '.join(made)})"

    def _optional(self, value: dict[str, Any], then: _Ends, depth: int, where: str) -> str:
        return self._repeated(value, "?", then, depth, where)

    def _star(self, value: dict[str, Any], then: _Ends, depth: int, where: str) -> str:
        return self._repeated(value, "*", then, depth, where)

    def _plus(self, value: dict[str, Any], then: _Ends, depth: int, where: str) -> str:
        return self._repeated(value, "+", then, depth, where)

    def _repeat(self, value: dict[str, Any], then: _Ends, depth: int, where: str) -> str:
        low, high = value.get("min"), value.get("max")
        if type(low) is not int or type(high) is not int or not 0 <= low <= MAX_REPEATS or high > MAX_REPEATS:
            raise invalid(
                f"structural_tag: {where} needs min and max, whole numbers up to {MAX_REPEATS}; max may be -1"
            )
        if high < -1 or -1 < high < low:
            raise invalid(f"structural_tag: {where}.max must be -1 or at least min")
        return self._repeated(value, f"{{{low},{'' if high == -1 else high}}}", then, depth, where)

    def _repeated(self, value: dict[str, Any], times: str, then: _Ends, depth: int, where: str) -> str:
        if _is_text(value.get("content")):
            raise invalid(f"structural_tag: {where} repeats any_text; use any_text alone")
        inner = self.expression(value.get("content"), (), depth + 1, f"{where}.content")
        return self._followed(f"({inner}){times}", then)

    # -- tags --------------------------------------------------------------------------------------------------------

    def _tag(self, value: dict[str, Any], then: _Ends, depth: int, where: str) -> str:
        return f"({self._begin(value, where)} {self._rest(value, then, depth, where)})"

    def _begin(self, value: dict[str, Any], where: str) -> str:
        begin = value.get("begin")
        return (
            self._token(begin, (), 0, f"{where}.begin")
            if isinstance(begin, dict)
            else self._literal(_text(value, "begin", where, can_be_empty=True))
        )

    def _rest(self, value: dict[str, Any], then: _Ends, depth: int, where: str) -> str:
        """Return the content and the end of a tag."""
        end = value.get("end", "")
        if isinstance(end, dict):
            token = self._token(end, then, 0, f"{where}.end")
            if _is_text(value.get("content")):
                return f"{self._free(self._excludes(value['content'], f'{where}.content'))} {token}"
            return f"{self.expression(value.get('content'), (), depth + 1, f'{where}.content')} {token}"
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not ends or not all(isinstance(e, str) for e in ends):
            raise invalid(f"structural_tag: {where}.end must be a string, a list of strings or a token")
        if not all(ends):  # the tag has no end of its own
            return self.expression(value.get("content"), then, depth + 1, f"{where}.content")
        inner = self.expression(value.get("content"), tuple(ends), depth + 1, f"{where}.content")
        return self._followed(inner, then)

    def _tags_with_separator(self, value: dict[str, Any], then: _Ends, depth: int, where: str) -> str:
        tags = self._alternatives(value, depth, where)
        separator = self._literal(_text(value, "separator", where, can_be_empty=True))
        made = tags if value.get("stop_after_first") is True else f"{tags} ({separator} {tags})*"
        return self._followed(f"({made}){'' if value.get('at_least_one') is True else '?'}", then)

    def _alternatives(self, value: dict[str, Any], depth: int, where: str) -> str:
        tags = _list(value, "tags", where)
        made = [self._tag(_of_type(tag, "tag", w), (), depth + 1, w) for tag, w in _numbered(tags, f"{where}.tags")]
        self._count += len(tags)
        return self._rule("tags", " | ".join(made))

    def _triggered_tags(self, value: dict[str, Any], then: _Ends, depth: int, where: str) -> str:
        triggers = _list(value, "triggers", where)
        branches: list[tuple[str, str]] = []
        firsts: list[str] = []
        for tag, place in _numbered(_list(value, "tags", where), f"{where}.tags"):
            begin = _text(_of_type(tag, "tag", place), "begin", place)
            found = [t for t in triggers if isinstance(t, str) and t and begin.startswith(t)]
            if not found:
                raise invalid(
                    f"structural_tag: {place}.begin {shortened(begin)!r} has no trigger; a tag starts with one of "
                    f"{where}.triggers"
                )
            rest = self._rule("rest", self._rest(tag, (), depth + 1, place))
            trigger = max(found, key=len)
            branches.append((trigger, f"{self._literal(begin[len(trigger) :])} {rest}"))
            firsts.append(f"{self._literal(begin)} {rest}")
        self._count += len(branches)
        return self._triggered(
            branches,
            self._excludes(value, where),
            then,
            loops=value.get("stop_after_first") is not True,
            firsts=firsts if value.get("at_least_one") is True else (),
        )

    def _dispatch(self, value: dict[str, Any], then: _Ends, depth: int, where: str) -> str:
        branches: list[tuple[str, str]] = []
        for rule, place in _numbered(_list(value, "rules", where), f"{where}.rules"):
            if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
                raise invalid(f"structural_tag: {place} must be a pattern, which is a text, and a format")
            branches.append((rule[0], self.expression(rule[1], (), depth + 1, f"{place}.1")))
        excludes = self._excludes(value, where)
        return self._triggered(branches, excludes, then, loops=value.get("loop") is not False)

    def _triggered(
        self,
        branches: Sequence[tuple[str, str]],
        excludes: tuple[str, ...],
        then: _Ends,
        *,
        loops: bool,
        firsts: Sequence[str] = (),
    ) -> str:
        """Return free text in which each trigger is followed by the rest of one of its tags.

        Args:
            branches: pairs of a trigger and the rest of a tag.
            excludes: texts that the free text does not contain.
            then: texts of which one follows.
            loops: whether further tags may follow the first.
            firsts: whole tags with one of which the text begins; empty if it may begin with free text. In
                xgrammar 0.2.8, `at_least_one` permits no text before the first tag.
        """
        first = self._rule("first", " | ".join(firsts)) if firsts else ""
        if first and not loops:
            return self._followed(first, then)
        by_trigger: dict[str, list[str]] = {}
        for trigger, rest in branches:
            by_trigger.setdefault(trigger, []).append(rest)
        made = [f"{self._until((trigger,), excludes)} ({' | '.join(rests)})" for trigger, rests in by_trigger.items()]
        tagged = self._rule("triggered", " | ".join(made))
        ending = self._until(then, excludes) if then else self._free(excludes)
        if loops:
            return f"({first} {tagged}* {ending})"
        return f"({self._followed(tagged, then)} | {ending})"

    # -- texts -------------------------------------------------------------------------------------------------------

    def _rule(self, kind: str, body: str, attributes: str = "") -> str:
        name = f"{kind}_{len(self.rules)}"
        self.rules[f"{name}{attributes}"] = body
        return name

    def _followed(self, expression: str, then: _Ends) -> str:
        return f"{expression} {self._any_of(then)}" if then else expression

    def _any_of(self, texts: _Ends) -> str:
        found = self._ends.get(texts)
        if found is None:
            made = [self._literal(text) for text in texts]
            found = made[0] if len(made) == 1 else f"({' | '.join(made)})"
            if len(found) > _MAX_REPEATED_CHARS:
                found = self._rule("ends", found)
            self._ends[texts] = found
        return found

    def _free(self, excludes: tuple[str, ...]) -> str:
        """Return free text without the excluded texts."""
        if excludes not in self._texts:
            self._texts[excludes] = self._rule("TEXT", _without(excludes))
        return self._texts[excludes]

    def _until(self, ends: _Ends, excludes: tuple[str, ...]) -> str:
        """Return free text up to and including the first of some texts."""
        excluded_ends = frozenset(ends).intersection(excludes)
        free = self._free(tuple(text for text in excludes if text not in excluded_ends))
        made = [self._until_one(end, free) for end in ends]
        return made[0] if len(made) == 1 else f"({' | '.join(made)})"

    def _until_one(self, end: str, free: str) -> str:
        name = next((name for name in self._names if end.startswith(name)), None)
        if name is None:
            return self._lazy(end, free)
        rest = self._literal(end[len(name) :])
        by_token = f"{free} <[{self._tokens.by_id[name]}]> {rest}"
        return f"({by_token} | {self._lazy(end, free)})" if name in self._tokens.ordinary else f"({by_token})"

    def _lazy(self, end: str, free: str) -> str:
        """Return the free text of a terminal that ends at the first occurrence of the text `end`."""
        first = min((place for name in self._names if (place := end.find(name)) > 0), default=len(end))
        name = self._untils.get((free, end))
        if name is None:
            name = self._untils[free, end] = self._rule("until", f"{free} {quoted(end[:first])}", "[lazy]")
        return f"{name} {self._literal(end[first:])}"

    def _literal(self, text: str) -> str:
        """Return a constant text, in which markers of the model are matched by their tokens; those that are no control
        tokens also by their texts."""
        if not text:
            return ""
        parts = re.split("(" + "|".join(map(re.escape, self._names)) + ")", text) if self._names else [text]
        return " ".join(self._marker(part) if n % 2 else quoted(part) for n, part in enumerate(parts) if part)

    def _marker(self, name: str) -> str:
        token = f"<[{self._tokens.by_id[name]}]>"
        return f"({token} | {quoted(name)})" if name in self._tokens.ordinary else token

    def _excludes(self, value: object, where: str) -> tuple[str, ...]:
        """Return the texts that free text does not contain; control tokens are never a part of it."""
        found = value.get("excludes") if isinstance(value, dict) else None
        if found is None:
            return ()
        if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
            raise invalid(f"structural_tag: {where}.excludes must be a list of texts that are not empty")
        return tuple(text for text in found if text not in self._tokens.by_id or text in self._tokens.ordinary)


def _without(excludes: Sequence[str]) -> str:
    if not excludes:
        return _TEXT
    texts = "|".join(_lark_regex(re.escape(text))[1:-1] for text in excludes)
    return f"({_TEXT} & ~/(?s:.*)({texts})(?s:.*)/)"


def _lark_regex(pattern: str) -> str:
    """Return a regex between slashes; slashes and line breaks in it are escaped."""
    made, is_escaped = [], False
    for char in pattern:
        made.append(f"\\{char}" if char == "/" and not is_escaped else {"\n": "\\n", "\r": "\\r"}.get(char, char))
        is_escaped = char == "\\" and not is_escaped
    return f"/{''.join(made)}/"


def _constant(following: object, where: str) -> _Ends:
    """Return the constant that ends free text.

    Raises:
        InvalidRequest: another format follows.
    """
    if isinstance(following, dict) and following.get("type") == "const_string":
        return (_text(following, "value", where),)
    raise invalid(
        f"structural_tag: {where} is any_text before another format than const_string; put it into a tag, whose end "
        "ends it"
    )


def _is_text(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") == "any_text"


def _text(value: dict[str, Any], name: str, where: str, *, can_be_empty: bool = False) -> str:
    found = value.get(name)
    if not isinstance(found, str) or not (found or can_be_empty):
        raise invalid(f"structural_tag: {where}.{name} must be a text{'' if can_be_empty else ' that is not empty'}")
    return found


def _list(value: dict[str, Any], name: str, where: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list) or not 0 < len(found) <= MAX_FORMATS:
        raise invalid(f"structural_tag: {where}.{name} must be a list of 1 to {MAX_FORMATS} items")
    return found


def _numbered(items: Sequence[Any], where: str) -> Iterator[tuple[Any, str]]:
    return ((item, f"{where}.{number}") for number, item in enumerate(items))


def _of_type(value: object, kind: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("type", kind) != kind:
        raise invalid(f"structural_tag: {where} must have the type {kind}")
    return value


def _only(value: dict[str, Any], where: str, **accepted: object) -> None:
    """Check fields that must have a single value.

    Raises:
        InvalidRequest: a field has another value.
    """
    for name, wanted in accepted.items():
        if value.get(name, wanted) not in (None, wanted):
            raise invalid(f"structural_tag: {where}.{name} is not supported; leave it out or set it to {wanted!r}")
