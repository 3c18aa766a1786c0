"""Admission of a pool as the API server performs it: the schema of the definition, its defaults and its validation
rules."""

import difflib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cel
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

from kvferry.operator.pool import names
from kvferry.operator.pool.quantities import is_quantity
from kvferry.operator.pool.spec import Json
from kvferry.operator.preview.definition import pool_schema, with_defaults

_Path = tuple[str | int, ...]
_Keyword = Callable[[Any, Any, Any, Json], Iterator[ValidationError]]

_METADATA = frozenset(
    {
        "annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers",
        "generateName", "generation", "labels", "managedFields", "name", "namespace", "ownerReferences",
        "resourceVersion", "selfLink", "uid",
    }
)  # fmt: skip
"""Fields of every object's metadata."""
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_INTEGERS = {"int32": 1 << 31, "int64": 1 << 63}
_MAX_SHOWN = 80
_MISSING = object()


def refusals(body: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> list[str]:
    """Return why the API server refuses an InferencePool: one line for each error, with field, value and remedy.

    Args:
        body: the object, as read from a file.
        old: the object before the change, for rules about changes; `None` if the object is created.
    """
    schema = pool_schema()
    # Users cannot write the status: the API server drops it.
    plain = {name: part for name, part in body.items() if name != "status"}
    stored = with_defaults(plain, schema)
    found = [*_kind(body), *_metadata(body.get("metadata")), *_unknown(plain, schema, ())]
    found += [_described(error) for error in sorted(_validator().iter_errors(stored), key=_order)]
    if found:  # The rules expect values of the types in the schema, so that the API server does not evaluate them.
        return list(dict.fromkeys(found))
    before = _MISSING if old is None else with_defaults({n: p for n, p in old.items() if n != "status"}, schema)
    return list(dict.fromkeys(_broken(stored, before, schema, ())))


def _kind(body: Mapping[str, Any]) -> Iterator[str]:
    for field, expected in (("apiVersion", names.API_VERSION), ("kind", "InferencePool")):
        if body.get(field) != expected:
            yield f'{field}: Unsupported value: {_shown(body.get(field))}: supported values: "{expected}"'


def _metadata(metadata: Any) -> Iterator[str]:
    if not isinstance(metadata, dict):
        yield "metadata: Required value: set at least metadata.name"
        return
    for field in metadata.keys() - _METADATA:
        yield _unknown_field(("metadata", field), sorted(_METADATA), ())
    name, namespace = metadata.get("name"), metadata.get("namespace", "default")
    if not name:
        yield "metadata.name: Required value: name the pool"
    elif not isinstance(name, str):
        yield f"metadata.name: Invalid value: {_shown(name)}: must be of type string; put it in quotes"
    if not isinstance(namespace, str) or len(namespace) > 63 or not _LABEL.fullmatch(namespace):
        yield (
            f"metadata.namespace: Invalid value: {_shown(namespace)}: must be at most 63 characters of a-z, 0-9 and -, "
            "and begin and end with a letter or digit"
        )
    for field in ("labels", "annotations"):
        entries = metadata.get(field) or {}
        if not isinstance(entries, dict) or not all(isinstance(value, str) for value in entries.values()):
            yield f"metadata.{field}: Invalid value: {_shown(entries)}: must be a map of text; put numbers in quotes"


# Unknown fields ------------------------------------------------------------------------------------------------------


def _unknown(value: Any, schema: Json, path: _Path) -> Iterator[str]:
    if isinstance(value, list):
        for i, entry in enumerate(value):
            yield from _unknown(entry, schema.get("items", {}), (*path, i))
    if not isinstance(value, dict) or path == ("metadata",):
        return
    known, more = schema.get("properties", {}), schema.get("additionalProperties")
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or more or schema.get("type") != "object"
    for name, part in value.items():
        if name in known:
            yield from _unknown(part, known[name], (*path, name))
        elif isinstance(more, dict):
            yield from _unknown(part, more, (*path, name))
        elif not is_open:
            yield _unknown_field((*path, name), list(known), _elsewhere(str(name)))


def _unknown_field(path: _Path, known: list[str], elsewhere: _Path) -> str:
    name, parent = str(path[-1]), path[:-1]
    by_lower = {field.lower(): field for field in known}
    close = difflib.get_close_matches(name.lower(), by_lower, 1, 0.6)
    if elsewhere:
        remedy = f'did you mean "{_dotted(elsewhere)}"?'
    elif close:
        remedy = f'did you mean "{_dotted((*parent, by_lower[close[0]]))}"?'
    else:
        remedy = f"known fields are {', '.join(known)}"
    return f'unknown field "{_dotted(path)}": {remedy}'


def _elsewhere(name: str) -> _Path:
    """Return the path of a field of the spec with this name; empty if there is none, or several."""
    found = [p for p in _fields(pool_schema()["properties"]["spec"], ("spec",)) if p[-1] == name]
    return found[0] if len(found) == 1 else ()


def _fields(schema: Json, path: _Path) -> Iterator[_Path]:
    for name, part in schema.get("properties", {}).items():
        yield (*path, name)
        if not part.get("x-kubernetes-preserve-unknown-fields"):
            yield from _fields(part, (*path, name))
    if "items" in schema:
        yield from _fields(schema["items"], (*path[:-1], f"{path[-1]}[]"))


# Schema --------------------------------------------------------------------------------------------------------------


def _bound(*, is_lower: bool) -> _Keyword:
    def check(validator: Any, limit: float, value: Any, schema: Json) -> Iterator[ValidationError]:
        if not validator.is_type(value, "number"):
            return
        is_open = schema.get("exclusiveMinimum" if is_lower else "exclusiveMaximum", False)
        inside = value > limit if is_lower else value < limit
        if not (inside or (value == limit and not is_open)):
            than = f"{'greater' if is_lower else 'less'} than"
            yield ValidationError(f"must be {than} {'' if is_open else 'or equal to '}{limit}")

    return check


def _pattern(_: Any, pattern: str, value: Any, schema: Json) -> Iterator[ValidationError]:
    # The language of the rules has the regular expressions of the API server; Python's `$` accepts a line break.
    if isinstance(value, str) and not _evaluate("self.matches(pattern)", {"self": value, "pattern": pattern}):
        yield ValidationError(
            f"must match {pattern}" + (f"; {schema['description']}" if "description" in schema else "")
        )


def _format(_: Any, name: str, value: Any, __: Json) -> Iterator[ValidationError]:
    limit = _INTEGERS.get(name)
    if limit and isinstance(value, int) and not -limit <= value < limit:
        yield ValidationError(f"must be an integer of {name[3:]} bits")


def _list_type(_: Any, kind: str, value: Any, schema: Json) -> Iterator[ValidationError]:
    if kind not in ("map", "set") or not isinstance(value, list):
        return
    seen: list[Any] = []
    for i, entry in enumerate(value):
        key = _key(entry, schema)
        if key in seen:
            yield ValidationError("Duplicate value", path=[i], instance=key)
        seen.append(key)


def _key(entry: Any, schema: Json) -> Any:
    keys = schema.get("x-kubernetes-list-map-keys")
    return {key: entry.get(key) for key in keys} if keys and isinstance(entry, dict) else entry


def _ignored(*_: Any) -> Iterator[ValidationError]:
    return iter(())


@functools.cache
def _validator() -> Any:
    keywords: dict[str, _Keyword] = {
        "minimum": _bound(is_lower=True),
        "maximum": _bound(is_lower=False),
        "exclusiveMinimum": _ignored,
        "exclusiveMaximum": _ignored,
        "pattern": _pattern,
        "format": _format,
        "x-kubernetes-list-type": _list_type,
    }
    return extend(Draft202012Validator, keywords)(pool_schema())  # type: ignore[no-untyped-call]


def _order(error: ValidationError) -> tuple[str, ...]:
    return tuple(map(str, error.absolute_path))


def _described(error: ValidationError) -> str:
    path, value = tuple(error.absolute_path), _shown(error.instance)
    limit: Any = error.validator_value
    schema: Any = error.schema
    instance: Any = error.instance
    match error.validator:
        case "required":
            missing = next(name for name in limit if name not in instance)
            part = schema["properties"][missing]
            return f"{_dotted((*path, missing))}: Required value: {part.get('description', 'set it')}"
        case "x-kubernetes-list-type":
            return f"{_dotted(path)}: Duplicate value: {value}: remove one of the entries"
        case "enum":
            return f"{_dotted(path)}: Unsupported value: {value}: supported values: {', '.join(map(json.dumps, limit))}"
        case "type":
            remedy = f"must be of type {limit}"
            if limit == "string" and not isinstance(instance, dict | list):
                remedy += "; put it in quotes, since YAML reads 1 as a number and off as a boolean"
        case "anyOf":
            remedy = "must be an integer or text"
        case "minLength" | "maxLength":
            remedy = f"must have at {_least(error)} {limit} characters"
        case "minItems" | "maxItems":
            remedy = f"must have at {_least(error)} {limit} items"
        case "minProperties" | "maxProperties":
            remedy = f"must have at {_least(error)} {limit} entries"
        case _:
            remedy = error.message
    return f"{_dotted(path)}: Invalid value: {value}: {remedy}"


def _least(error: ValidationError) -> str:
    return "least" if str(error.validator).startswith("min") else "most"


# Rules ---------------------------------------------------------------------------------------------------------------


def _broken(value: Any, old: Any, schema: Json, path: _Path) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        is_transition = re.search(r"\boldSelf\b", rule["rule"]) is not None
        if is_transition and old is _MISSING:
            continue
        variables = {"self": value, **({"oldSelf": old} if is_transition else {})}
        if not _evaluate(rule["rule"], variables):
            where = _dotted(path) + rule.get("fieldPath", "")
            shown = "" if isinstance(value, dict | list) else f"Invalid value: {_shown(value)}: "
            yield f"{where or 'object'}: {shown}{rule['message']}"
    if isinstance(value, dict):
        parts, more = schema.get("properties", {}), schema.get("additionalProperties") or {}
        for name, part in value.items():
            before = old.get(name, _MISSING) if isinstance(old, dict) else _MISSING
            yield from _broken(part, before, parts.get(name, more), (*path, name))
    if isinstance(value, list):
        for i, entry in enumerate(value):
            yield from _broken(entry, _counterpart(entry, old, schema), schema.get("items", {}), (*path, i))


def _counterpart(entry: Any, old: Any, schema: Json) -> Any:
    """Return the earlier entry of a list with the same key; only lists of type map have keys."""
    if schema.get("x-kubernetes-list-type") != "map" or not isinstance(old, list):
        return _MISSING
    return next((other for other in old if _key(other, schema) == _key(entry, schema)), _MISSING)


@functools.cache
def _program(rule: str) -> Any:
    return cel.compile(rule)


def _evaluate(rule: str, variables: Mapping[str, Any]) -> bool:
    """Evaluate a rule; it is broken too if it cannot be evaluated with these values, as for the API server."""
    context = cel.Context(dict(variables))
    context.add_function("isQuantity", is_quantity)
    try:
        return _program(rule).execute(context) is True
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return False


# Text ----------------------------------------------------------------------------------------------------------------


def _dotted(path: _Path) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if re.fullmatch(r"\w+(\[\])?", part) else f"[{part}]"
    return text.removeprefix(".")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
