"""Schemas, patterns and grammars that are large, deep or costly to compile, as bodies of completions."""

import json
from collections.abc import Mapping


def _doubling(levels: int) -> str:
    """Return a short schema that expands to `2 ** levels` values."""
    pairs = {
        f"d{level}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{level + 1}"}] * 2, "items": False}
        for level in range(levels)
    }
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**pairs, f"d{levels}": {"type": "null"}}})


def _product(factors: int, terms: int) -> str:
    """Return an intersection of unions with `terms ** factors` cases."""
    unions = [[{"type": "object", "properties": {f"p{i}": {"const": j}}} for j in range(terms)] for i in range(factors)]
    return json.dumps({"allOf": [{"anyOf": union} for union in unions]})


def _completion(field: str) -> bytes:
    return f'{{"prompt": "x", "max_tokens": 16{field}}}'.encode()


def _schema(text: str) -> bytes:
    return _completion(f', "structured_outputs": {{"json": {text}}}')


def _other(kind: str, text: str) -> bytes:
    return _completion(f', "structured_outputs": {json.dumps({kind: text})}')


REFUSED: Mapping[str, bytes] = {
    "product of unions": _schema(_product(12, 12)),
    "1,200 optional properties": _schema(
        json.dumps({"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1200)}})
    ),
    "1 MB of choices": _schema(json.dumps({"enum": [f"value {i:012}" for i in range(50_000)]})),
    "10,000 levels": _schema('{"items":' * 10_000 + "{}" + "}" * 10_000),
    "large integers": _schema(
        json.dumps({"type": "integer", "minimum": -(10**300), "maximum": 10**301, "multipleOf": 7919})
    ),
    "classes of Unicode": _other("regex", r"(\p{L}{1,500}\w{1,500}){1,500}"),
}
"""By name: bodies of `/v1/completions` whose constraint exceeds a limit."""

COSTLY: Mapping[str, bytes] = {
    "doubling references": _schema(_doubling(60)),
    "200 KB of choices": _schema(json.dumps({"enum": [f"value {i:012}" for i in range(9_000)]})),
    "large bounds": _schema(
        json.dumps({"type": "array", "minItems": 10**9, "items": {"type": "string", "minLength": 10**9}})
    ),
    "nested repetitions": _other("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "ambiguous grammar": _other("grammar", 'start: s\ns: s s | s s s | "a" | ""'),
}
"""By name: bodies whose constraint takes long to compile or has costly masks, within the limits."""

ORDINARY: Mapping[str, bytes] = {"no constraint": _completion("")}
"""A request of the same length for comparison."""
