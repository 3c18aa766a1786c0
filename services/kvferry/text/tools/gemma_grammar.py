"""The grammar of one call in the format of FunctionGemma, from the schema of its arguments; see `answers.gemma_calls`.

Members come in the order of the schema's properties; optional ones may be left out. Strings, also those within arrays
and objects, are text between two `<escape>`, which a pattern, a length, a list of strings or a format limits.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.core.inference.tools import Tool
from kvferry.text.answers.gemma_calls import CALL, NOT_IN_KEYS, QUOTE
from kvferry.text.answers.xml_calls import KINDS, definition, kind_of, kinds_of
from kvferry.text.grammar.tagged_unions import distinguished
from kvferry.text.tools.argument_schemas import MAX_NAME_CHARS, is_list_of_names, members_in_order, separate_arguments
from kvferry.text.tools.plain_texts import IGNORED, PlainTexts, Unsuitable, check_exclusive, escaped, quoted

_MAX_RULES = 512
"""Maximum number of values in the schemas of one call."""
_MAX_CONSTANT_DEPTH = 16
_NUMBERS = frozenset({"integer", "number"})
_NUMBER_LIMITS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"})
_STRING_LIMITS = frozenset({"pattern", "minLength", "maxLength", "format"})
_ARRAY_LIMITS = frozenset({"items", "minItems", "maxItems"})
_OBJECT_LIMITS = frozenset({"properties", "required", "additionalProperties"})
_MAX_ITEMS = 1024
_UNQUOTED = f"~/(?s:.*){re.escape(QUOTE)}(?s:.*)/"


def gemma_call(tool: Tool, rule: str, spacing: Mapping[str, object], quote: str, *, is_spelled: bool) -> list[str]:
    """Return the rules of a call of `tool`; the first one is named `rule`.

    Args:
        tool: the tool to call.
        rule: name of the rule, and prefix of the names of the others.
        spacing: llguidance's options for whitespace in JSON.
        quote: `<escape>` as it is written in a rule: a token, or its text.
        is_spelled: whether the text of an answer does not show if `<escape>` was the token or was spelled.

    Raises:
        InvalidRequest: the schema cannot be expressed in the format.
    """
    unsuitable = partial(_unsuitable, tool)
    values = _Values(rule, spacing, quote, unsuitable, is_spelled=is_spelled)
    arguments = ((name, distinguished(one), need) for name, one, need in separate_arguments(tool, unsuitable))
    members = [(name, values.rule_of(schema, schema, KINDS), is_required) for name, schema, is_required in arguments]
    body = values.object_of(members)
    return [f"{rule}: {json.dumps(f'{CALL}{tool.name}')} {body}", *values.rules]


class _Values:
    """Writes the rules of values."""

    def __init__(
        self, prefix: str, spacing: Mapping[str, object], quote: str, unsuitable: Unsuitable, *, is_spelled: bool
    ) -> None:
        self.rules: list[str] = []
        self._prefix, self._spacing, self._quote, self._unsuitable = prefix, spacing, quote, unsuitable
        self._is_spelled = is_spelled
        self._definitions: dict[tuple[str, frozenset[str]], str] = {}
        self._count = 0

    def rule_of(self, schema: Any, root: Mapping[str, Any], outer: frozenset[str]) -> str:
        """Write the rule of a schema's values; return its name.

        Args:
            schema: the schema.
            root: the schema that has the definitions.
            outer: the types that the schemas around it permit.

        Raises:
            InvalidRequest: the schema cannot be expressed.
        """
        name = self._new_name()
        self._write(name, schema, root, outer)
        return name

    def object_of(self, members: list[tuple[str, str, bool]]) -> str:
        """Write the rules of an object; return the name of the first one.

        Args:
            members: key, rule of the value, and whether it is required, of each member.
        """
        name = self._new_name()
        written: list[tuple[str, bool]] = []
        for key, value, is_required in members:
            is_plain = key and key == key.strip() and not NOT_IN_KEYS.intersection(key) and key[0] != QUOTE[0]
            if not is_plain or QUOTE in key or len(key) > MAX_NAME_CHARS:
                raise self._unsuitable(f"the property {shortened(key)!r} cannot be written without quotes")
            written.append((f"{quoted(key + ':')} {value}", is_required))
        self.rules += [f'{name}: "{{" {name}_first_0 "}}"', *members_in_order(name, written, '","')]
        return name

    # ------------------------------------------------------------------ internals

    def _new_name(self) -> str:
        self._count += 1
        if self._count > _MAX_RULES:
            raise self._unsuitable(f"its schema has more than {_MAX_RULES} values")
        return f"{self._prefix}_v{self._count}"

    def _write(self, name: str, schema: Any, root: Mapping[str, Any], outer: frozenset[str]) -> None:
        if not isinstance(schema, Mapping):
            raise self._unsuitable("a value without a schema could be of any type")
        self.rules.append(f"{name}: {' | '.join(self._alternatives(schema, root, outer))}")

    def _alternatives(self, schema: Mapping[str, Any], root: Mapping[str, Any], outer: frozenset[str]) -> Iterator[str]:
        """Yield the expressions of a schema's values."""
        others = schema.keys() - IGNORED
        kinds = kinds_of(schema, root) & outer
        if not kinds:
            raise self._unsuitable("a value has no possible type")
        for keyword in ("const", "enum"):
            if keyword in schema:
                values = schema[keyword] if keyword == "enum" else [schema[keyword]]
                self._only(others, {keyword, *_STRING_LIMITS})
                if not isinstance(values, list):
                    raise self._unsuitable("enum must be an array")
                yield from self._constants(values, schema, root, kinds)
                return
        if isinstance(schema.get("$ref"), str):
            self._only(others, {"$ref"})
            yield self._defined(schema["$ref"], root, kinds)
            return
        for keyword in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(keyword)
            if isinstance(branches, list):
                self._only(others, {keyword})
                if keyword == "allOf" and len(branches) != 1:
                    raise self._unsuitable("a value has allOf with several schemas")
                if keyword == "oneOf":
                    check_exclusive(branches, root, kinds, self._unsuitable)
                possible = (branch for branch in branches if kinds_of(branch, root) & kinds)
                yield from (self.rule_of(branch, root, kinds) for branch in possible)
                return
        if kinds == KINDS and "type" not in schema:
            raise self._unsuitable("a value without a type could be of any type")
        known = _of_kinds(kinds)
        self._only(others, known)
        for kind in sorted(kinds):
            if not (kind == "integer" and "number" in kinds):
                yield self._of_kind(kind, schema, root)

    def _only(self, others: frozenset[str] | set[str], known: frozenset[str] | set[str]) -> None:
        unknown = sorted(others - known)
        if unknown:
            raise self._unsuitable(f"the schema of a value has {shortened(unknown[0])!r}")

    def _of_kind(self, kind: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        match kind:
            case "string":
                return self._string(schema, root)
            case "null":
                return '"null"'
            case "boolean":
                return '"true" | "false"'
            case "array":
                return self._array(schema, root)
            case "object":
                return self._object(schema, root)
        limits = {key: value for key, value in schema.items() if key in _NUMBER_LIMITS}
        return f"%json {json.dumps({'type': kind, **limits, 'x-guidance': self._spacing})}"

    def _string(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        texts = PlainTexts(root, self._unsuitable)
        own = {key: value for key, value in schema.items() if key in _STRING_LIMITS or key == "enum"}
        return self._quoted(texts.of({"type": "string", **own}, frozenset({"string"})))

    def _quoted(self, text: str) -> str:
        """Write the rules of a string whose text matches an expression; return the name of the first one."""
        name = self._new_name()
        terminal = name.upper()
        if self._quote.startswith("<["):
            self.rules += [f"{name}: {self._quote} {name}_text {self._quote}", f"{name}_text: {terminal}"]
            self.rules.append(f"{terminal}: ({text}) & {_UNQUOTED}" if self._is_spelled else f"{terminal}: {text}")
        else:
            self.rules += [f"{name}: {self._quote} {name}_text", f"{name}_text[lazy]: {terminal}"]
            self.rules.append(f"{terminal}: (({text}) & {_UNQUOTED}) {self._quote}")
        return name

    def _array(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems", _MAX_ITEMS)
        if not all(type(one) is int and 0 <= one <= _MAX_ITEMS for one in (least, most)) or least > most:
            raise self._unsuitable(f"minItems and maxItems must be whole numbers up to {_MAX_ITEMS}")
        if not most:
            return '"[]"'
        if "items" not in schema:
            raise self._unsuitable("an array without items could have values of any type")
        item = self.rule_of(schema["items"], root, KINDS)
        more = f' ("," {item}){{{max(0, least - 1)},{most - 1}}}' if most > 1 else ""
        several = f'"[" {item}{more} "]"'
        return several if least else f'"[]" | {several}'

    def _object(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not is_list_of_names(required):
            raise self._unsuitable("properties must be an object, and required an array of strings")
        if schema.get("additionalProperties", False) is not False:
            raise self._unsuitable("an object may have members that its schema does not name")
        if set(required) - properties.keys():
            raise self._unsuitable("an object requires members that are not in its properties")
        members = [(key, self.rule_of(value, root, KINDS), key in required) for key, value in properties.items()]
        return self.object_of(members)

    def _defined(self, reference: str, root: Mapping[str, Any], kinds: frozenset[str]) -> str:
        place = (reference, kinds)
        if place not in self._definitions:
            name = self._definitions[place] = self._new_name()
            self._write(name, definition(reference, root), root, kinds)
        return self._definitions[place]

    def _constants(
        self, values: list[Any], schema: Mapping[str, Any], root: Mapping[str, Any], kinds: frozenset[str]
    ) -> Iterator[str]:
        """Yield the expressions of the constants of these types; a string must also be within its limits."""
        texts = [value for value in values if isinstance(value, str)]
        if texts and "string" in kinds:
            if any(QUOTE in value for value in texts):
                raise self._unsuitable(f"a constant contains {QUOTE}")
            yield self._string({**schema, "enum": texts}, root)
        for value in values:
            kind = kind_of(value)
            is_whole = kind == "number" and value.is_integer()
            if kind != "string" and (kind in kinds or (is_whole and "integer" in kinds)):
                yield self._constant(value, 0)

    def _constant(self, value: Any, depth: int) -> str:
        if depth > _MAX_CONSTANT_DEPTH:
            raise self._unsuitable("a constant is nested too deeply")
        if isinstance(value, str):
            if QUOTE in value:
                raise self._unsuitable(f"a constant contains {QUOTE}")
            return f"{self._quote} /{escaped(value)}/ {self._quote}" if value else f"{self._quote} {self._quote}"
        if isinstance(value, list):
            return '"[" ' + ' "," '.join(self._constant(one, depth + 1) for one in value) + ' "]"'
        if isinstance(value, Mapping):
            return self.object_of(
                [(key, self._named(self._constant(one, depth + 1)), True) for key, one in value.items()]
            )
        return json.dumps(json.dumps(value))

    def _named(self, expression: str) -> str:
        name = self._new_name()
        self.rules.append(f"{name}: {expression}")
        return name


def _of_kinds(kinds: frozenset[str]) -> frozenset[str]:
    """Return the keywords that limit values of these types."""
    found: frozenset[str] = frozenset()
    for kind, limits in (("string", _STRING_LIMITS), ("array", _ARRAY_LIMITS), ("object", _OBJECT_LIMITS)):
        found |= limits if kind in kinds else frozenset()
    return found | (_NUMBER_LIMITS if kinds & _NUMBERS else frozenset())


def _unsuitable(tool: Tool, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"the parameters of {tool.name!r} cannot be enforced in this model's call format, which writes strings without "
        f"quotes: {why}; use tool_choice auto, or an object schema with plain properties",
        field="tools",
    )
