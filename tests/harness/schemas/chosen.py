"""Chosen JSON Schemas: every keyword that constrained decoding supports, and schemas that clients send."""

from typing import Any

Schema = dict[str, Any]

_PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TREE: Schema = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}

CHOSEN: dict[str, Schema] = {
    "person": _PERSON,
    "tree": _TREE,
    "list of persons": {"type": "array", "items": _PERSON, "minItems": 1, "maxItems": 2},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer": {"type": "integer", "minimum": -5, "maximum": 5},
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "multiple of": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "string": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern of letters": {"type": "string", "pattern": "^[äöü]{1,4}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "address": {"type": "string", "format": "ipv4"},
    "enum": {"enum": ["red", "grün", "青", 3, None, True]},
    "const": {"const": {"a": [1, 2, "x"]}},
    "several types": {"type": ["string", "null"], "maxLength": 4},
    "any of": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}]},
    "one of, told apart by a constant": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer", "minimum": 1, "maximum": 9}},
                "required": ["kind", "lives"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "dog"}, "good": {"type": "boolean"}},
                "required": ["kind", "good"],
                "additionalProperties": False,
            },
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"], "maxProperties": 2},
        ]
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": ["x", "y"]}],
        "items": False,
        "minItems": 2,
    },
    "optional properties": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"enum": [1, 2]}},
        "additionalProperties": False,
    },
    "additional properties": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "nested": {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": _PERSON}, "required": ["b"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "quoted names": {
        "type": "object",
        "properties": {'a"b': {"type": "boolean"}, "c\\d": {"type": "null"}, "é\n": {"enum": [0]}},
        "required": ['a"b', "c\\d", "é\n"],
        "additionalProperties": False,
    },
    "definitions of draft 7": {
        "definitions": {"id": {"type": "integer", "minimum": 1, "maximum": 3}},
        "type": "object",
        "properties": {"id": {"$ref": "#/definitions/id"}},
        "required": ["id"],
        "additionalProperties": False,
    },
    "no type": {"properties": {"a": {"type": "boolean"}}, "type": "object", "required": ["a"], "maxProperties": 1},
}
"""Schemas by name."""
