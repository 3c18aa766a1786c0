"""Keywords of JSON Schemas that say nothing about values.

The compiler ignores a keyword that it does not know, but combines it with a reference beside it, or in an `anyOf`
beside it, and refuses this if the reference is recursive. So Pydantic's `discriminator` of a recursive union, and
keywords of OpenAPI such as `nullable`, would have a schema refused that is enforced without them.
"""

from typing import Any
from urllib.parse import unquote

_KEYWORDS = frozenset(
    {
        "$schema",
        "$vocabulary",
        "$id",
        "$anchor",
        "$dynamicAnchor",
        "$recursiveAnchor",
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
        "$defs",
        "$comment",
        "id",
        "definitions",
        "title",
        "description",
        "default",
        "readOnly",
        "writeOnly",
        "examples",
        "format",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "type",
        "enum",
        "const",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "multipleOf",
        "maximum",
        "exclusiveMaximum",
        "minimum",
        "exclusiveMinimum",
        "maxLength",
        "minLength",
        "pattern",
        "items",
        "prefixItems",
        "additionalItems",
        "maxItems",
        "minItems",
        "uniqueItems",
        "contains",
        "maxContains",
        "minContains",
        "unevaluatedItems",
        "properties",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "required",
        "maxProperties",
        "minProperties",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedProperties",
        "x-guidance",
    }
)
"""Keywords of JSON Schema, drafts 4 to 2020-12, and the compiler's own."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
"""Keywords whose value maps names to schemas."""
_VALUES = frozenset({"const", "enum", "default", "examples", "x-guidance"})


def without_annotations(schema: Any) -> Any:
    """Return a schema without keywords that are not of JSON Schema, except those that references lead through.

    Args:
        schema: a JSON Schema; it is not modified.
    """
    return _kept(schema, _KEYWORDS | _referred(schema))


def _kept(schema: Any, names: frozenset[str]) -> Any:
    if isinstance(schema, list):
        return [_kept(each, names) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _VALUES:
            made[key] = value
        elif key in _NAMED and isinstance(value, dict):
            made[key] = {name: _kept(each, names) for name, each in value.items()}
        elif key in names:
            made[key] = _kept(value, names)
    return made


def _referred(schema: Any) -> frozenset[str]:
    """Return the parts of all references in a schema."""
    found: set[str] = set()
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
            reference = value.get("$ref")
            if isinstance(reference, str):
                parts = unquote(reference.partition("#")[2]).split("/")
                found.update(part.replace("~1", "/").replace("~0", "~") for part in parts)
    return frozenset(found)
