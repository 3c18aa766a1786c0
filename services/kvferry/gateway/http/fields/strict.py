"""Reads a JSON body into a model: the base class of all bodies and of their objects, and the checks before validation.

Fields without implementation are handled by the rules in `field_policy`, before validation; types are not converted,
and the schema describes all of it. Sizes of arrays and objects and the types of prompts are checked first and stop at
the first error: validation reports every error in a value and would take minutes for a large value.
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    ValidationError,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, from_json

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.core.sampling import MAX_PRIORITY, RANGES, Range
from kvferry.gateway.http.fields.field_policy import Effect, FieldRule, Rules
from kvferry.serving.prompts import MAX_MESSAGES

_Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Priority = Annotated[
    _Priority, BeforeValidator(lambda value: 0 if value is None else value, json_schema_input_type=_Priority | None)
]
"""Priority of a request; null selects 0, as leaving it out does."""
MAX_FIELDS = 64
"""Maximum number of fields per object; OpenAI's requests have fewer."""
MAX_IGNORED = 64
"""Maximum number of fields without effect that are named per request."""
MAX_NAME_CHARS = 256
"""Maximum length of the name of a field without effect."""
MAX_ITEMS = 1024
"""Maximum length of an array or object other than `prompt` and `messages`; `tools` has a separate limit."""
MAX_PARTS = 256
"""Maximum number of content parts per message."""
Prompt = str | list[str] | list[int] | list[list[int]]
_JSON_TYPES: Mapping[type, str] = {str: "string", list: "array", dict: "object"}
_OBJECT = re.compile(r"a valid dictionary or (?:instance of \w+|object to extract fields from)")
_NUMBER = re.compile(r"\d+")
_TYPE_ERROR = "object_type"
"""Pydantic's name of the error of an object whose `type` selects no class."""


def is_no_op(value: object, accepted: Iterable[object]) -> bool:
    """Return whether a JSON value is one of `accepted`. `False` is not 0, and 1 is not 1.0: equal values of different
    types are different."""
    return any(_is_same(value, no_op) for no_op in accepted)


def _is_same(value: object, other: object) -> bool:
    if type(value) is not type(other) or value != other:
        return False
    if isinstance(value, dict) and isinstance(other, dict):
        return all(_is_same(item, other[name]) for name, item in value.items())
    if isinstance(value, list) and isinstance(other, list):
        return all(map(_is_same, value, other))
    return True


def type_of(value: object) -> object:
    """Return the field `type` of an object of a body, or of its parsed form, which selects one of several classes."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def by_type(default: str, *others: str) -> Discriminator:
    """Return a discriminator that selects the class with the tag `<TYPE>` by the field `type` of an object.

    Args:
        default: type of the class that reports a `type` that is missing.
        others: types of the other classes.
    """
    kinds = (default, *others)

    def tag(value: object) -> str | None:
        kind = type_of(value)
        if kind is None:
            return f"<{default}>"
        return f"<{kind}>" if isinstance(kind, str) and kind in kinds else None

    *before, last = map(repr, kinds)
    message = f"Input should be {', '.join(before)} or {last}"
    return Discriminator(tag, custom_error_type=_TYPE_ERROR, custom_error_message=message)


class Strict(BaseModel):
    """A part of a request; types are not converted. `kept_fields` handles fields that the class does not have."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)

    RULES: ClassVar[Rules] = {}
    """What happens to fields that are not implemented."""
    _ignored: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the fields of a body that had no effect, as in `kept_fields`; empty for parts of a body."""
        return self._ignored

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON Schema of accepted objects: the fields, those in `RULES`, and any others."""
        schema = handler(core)
        resolved = handler.resolve_ref_schema(schema)
        resolved.pop("additionalProperties", None)
        resolved["maxProperties"] = MAX_FIELDS
        properties = resolved.setdefault("properties", {})
        for name, rule in cls.RULES.items():
            if rule.effect is Effect.ACCEPTED:
                properties[name] = {"description": "Accepted without effect."}
            else:
                properties[name] = {"enum": list(rule.neutral), "description": f"Not supported: {rule.reason}."}
        return schema


class SamplingFields(Strict):
    """A body with fields of `SamplingParams`, whose ranges are part of the schema."""

    LIMITS: ClassVar[Mapping[str, Range]] = RANGES
    """Ranges of the numeric fields."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON Schema with the ranges that `SamplingParams` checks."""
        schema = super().__get_pydantic_json_schema__(core, handler)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, limits in cls.LIMITS.items():
            for kind in _alternatives(properties.get(name, {})):
                if kind.get("type") in ("integer", "number") and "minimum" not in kind:
                    kind["exclusiveMinimum" if limits.is_open_below else "minimum"] = limits.low
                    kind["maximum"] = limits.high
        return schema


def _alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = schema.get("anyOf", [schema])
    return found


def check_sizes(fields: Mapping[str, Any]) -> None:
    """Check the sizes of a request's arrays and objects.

    Raises:
        InvalidRequest: an array or object is too large; the message contains its path.
    """
    _at_most("the body", fields, MAX_FIELDS, "fields", field=None)
    for name, value in fields.items():
        if name == "messages":
            _check_messages(value)
        elif name != "prompt":
            _at_most(shortened(name), value, MAX_ITEMS, "items")


def check_prompt(value: object) -> Prompt:
    """Check the types of a prompt; token ids are checked against the vocabulary later.

    Raises:
        InvalidRequest: an item has the wrong type; the message contains its path.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _no_prompt("prompt", value)
    if len(value) > MAX_ITEMS and type(value[0]) is not int:
        raise InvalidRequest(f"prompt has {len(value)} prompts; at most {MAX_ITEMS} are accepted", field="prompt")
    kinds = set(map(type, value))
    if kinds <= {str} or kinds == {int}:
        return value
    if kinds == {list}:
        for number, ids in enumerate(value):
            if not set(map(type, ids)) <= {int}:
                raise _no_prompt(f"prompt.{number}.{_first_other(ids, int)}", ids[_first_other(ids, int)])
        return value
    wanted = type(value[0]) if type(value[0]) in (str, int, list) else str
    wrong = _first_other(value, wanted)
    raise _no_prompt(f"prompt.{wrong}", value[wrong])


def shown(value: object) -> str:
    """Describe a value for an error message. Numbers and booleans are shown; strings are not, since they may be
    prompts."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return shortened(str(value)) if value.bit_length() < 1 << 10 else "a number of more than 300 digits"
    if isinstance(value, float):
        return repr(value)
    return f"a JSON {_JSON_TYPES.get(type(value), 'value')}"


def _check_messages(messages: object) -> None:
    _at_most("messages", messages, MAX_MESSAGES, "messages")
    if not isinstance(messages, list):
        return
    for number, message in enumerate(messages):
        _at_most(f"messages.{number}", message, MAX_FIELDS, "fields")
        content = message.get("content") if isinstance(message, dict) else None
        _at_most(f"messages.{number}.content", content, MAX_PARTS, "parts")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            _at_most(f"messages.{number}.content.{index}", part, MAX_FIELDS, "fields")


def _at_most(name: str, value: object, limit: int, unit: str, *, field: str | None = "") -> None:
    if isinstance(value, list | dict) and len(value) > limit:
        where = name if field == "" else field
        raise InvalidRequest(f"{name} has {len(value)} {unit}; at most {limit} are accepted", field=where)


def _first_other(items: Iterable[object], kind: type) -> int:
    return next(number for number, item in enumerate(items) if type(item) is not kind)


def _no_prompt(field: str, value: object) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: a prompt must be a string, a list of strings, a list of token ids (integers) or a list of such "
        f"lists, not {shown(value)}",
        field=field,
    )


def json_object(body: bytes) -> dict[str, Any]:
    """Parse a body that is one JSON object.

    Raises:
        InvalidRequest: the body is not JSON, or not an object.
    """
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", reason="INVALID_JSON") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return fields


S = TypeVar("S", bound=Strict)


def parse_fields(
    kind: type[S], fields: dict[str, Any], *, is_strict: bool = False, also_ignored: Sequence[str] = ()
) -> S:
    """Validate the fields of a body.

    Args:
        kind: type of the body.
        fields: the JSON object.
        is_strict: whether unknown fields are refused.
        also_ignored: names of further values without effect.

    Raises:
        InvalidRequest: a field is invalid, not supported or refused; the error describes the most specific one.
    """
    kept, ignored = kept_fields(kind, fields, is_strict=is_strict)
    try:
        made = kind.model_validate(kept)
    except ValidationError as error:
        raise _refusal(kind, error.errors(include_url=False, include_context=False)) from None
    made._ignored = (*ignored, *also_ignored)
    return made


def kept_fields(
    kind: type[Strict], fields: dict[str, Any], *, is_strict: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return an object with its implemented fields, and the names of up to `MAX_IGNORED` others that are not neutral:
    paths without the numbers of items, such as `messages.id`, each once.

    Args:
        kind: class of the object.
        fields: the object, as parsed from JSON.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest: a field is refused, or an object has more than `MAX_FIELDS` fields.
    """
    sorter = _Sorter(is_strict)
    return sorter.kept(kind, fields, "", ""), tuple(sorter.ignored)


def effects(kind: type[Strict], place: str = "") -> dict[str, Effect | FieldRule]:
    """Return what happens to each field of an object and of the objects in it, by path without numbers of items: it is
    honoured, or has a rule.

    Args:
        kind: class of the object.
        place: beginning of the paths.
    """
    found: dict[str, Effect | FieldRule] = {f"{place}{name}": rule for name, rule in kind.RULES.items()}
    for name, inner in _parts(kind).items():
        found[f"{place}{name}"] = Effect.HONOURED
        for part in inner:
            found.update(effects(part, f"{place}{name}."))
    return found


class _Sorter:
    """Drops the fields of a body that have no effect, and collects their names."""

    def __init__(self, is_strict: bool) -> None:
        self._is_strict = is_strict
        self.ignored: dict[str, None] = {}

    def kept(self, kind: type[Strict], fields: dict[str, Any], where: str, place: str) -> dict[str, Any]:
        """Return the implemented fields of an object at the path `where`, which is `place` without numbers."""
        own = where.rstrip(".")
        _at_most(own or "the body", fields, MAX_FIELDS, "fields", field=own or None)
        parts, found = _parts(kind), {}
        for name, value in fields.items():
            if name in parts:
                found[name] = self._inner(parts[name], value, where + name, place + name) if parts[name] else value
                continue
            rule = kind.RULES.get(name)
            if rule is not None and is_no_op(value, rule.neutral):
                continue
            field = where + shortened(name)
            if len(name) > MAX_NAME_CHARS:
                raise InvalidRequest(
                    f"{field} is a name of {len(name)} characters; at most {MAX_NAME_CHARS} are accepted", field=field
                )
            if rule is not None and rule.effect is Effect.REFUSED:
                raise _not_supported(field, rule, value)
            if rule is None and self._is_strict:
                raise InvalidRequest(f"{field} is an unknown field; leave it out", field=field)
            if len(self.ignored) < MAX_IGNORED:
                self.ignored[place + name] = None
        return found

    def _inner(self, kinds: tuple[type[Strict], ...], value: Any, where: str, place: str) -> Any:
        if isinstance(value, list):
            return [self._inner(kinds, item, f"{where}.{number}", place) for number, item in enumerate(value)]
        kind = _kind_of(kinds, value) if isinstance(value, dict) else None
        if kind is None:  # an object of another type, such as a tool that is left out
            _at_most(where, value, MAX_FIELDS, "fields")
            return value
        return self.kept(kind, value, f"{where}.", f"{place}.")


def _not_supported(field: str, rule: FieldRule, value: object) -> InvalidRequest:
    remedy = " or ".join(json.dumps(neutral) for neutral in rule.neutral if neutral is not None) or "null"
    kinds = (type(neutral) for neutral in rule.neutral)
    given = (
        f"another {_JSON_TYPES[type(value)]}" if type(value) in _JSON_TYPES and type(value) in kinds else shown(value)
    )
    return InvalidRequest(
        f"{field} is not supported: {rule.reason}; leave it out or set it to {remedy}, not {given}", field=field
    )


@functools.cache
def _parts(kind: type[Strict]) -> Mapping[str, tuple[type[Strict], ...]]:
    """Return the classes of objects in each field of a class, by the field's name in JSON."""
    return {
        info.alias or name: tuple(part for part in _models_of(info.annotation) if issubclass(part, Strict))
        for name, info in kind.model_fields.items()
    }


def _kind_of(kinds: tuple[type[Strict], ...], value: dict[str, Any]) -> type[Strict] | None:
    """Return the class of an object: the only one, or the one whose `type` the object has; `None` for another type."""
    if len(kinds) == 1:
        return kinds[0]
    for kind in kinds:
        info = kind.model_fields["type"]
        if value.get("type", info.default) in get_args(info.annotation):
            return kind
    return None


def _refusal(kind: type[Strict], errors: list[ErrorDetails]) -> InvalidRequest:
    # A union reports an error per alternative; the error deepest in the value is the most specific.
    names = _names(kind)
    first = errors[0]
    same = [error for error in errors if error["loc"][:1] == first["loc"][:1]]

    def depth(error: ErrorDetails) -> tuple[int, list[int]]:
        is_in_type = error["type"] == _TYPE_ERROR
        return len(error["loc"]) + is_in_type, [part for part in error["loc"] if isinstance(part, int)]

    worst = max(same, key=depth)
    # Locations include the names of union alternatives, such as `<text>`, which are meaningless to clients.
    field = ".".join(str(part) for part in worst["loc"] if isinstance(part, int) or part in names)
    if worst["type"] == "missing":
        return InvalidRequest(f"{field} is missing", field=field)
    if worst["type"] == "too_short":
        return InvalidRequest(f"{field} is empty; send at least one item", field=field)
    if worst["type"] == "string_too_long":
        most = _NUMBER.findall(worst["msg"])[0]
        return InvalidRequest(f"{field} has {len(worst['input'])} characters; at most {most} are accepted", field=field)
    if worst["type"] == _TYPE_ERROR:
        kind_given = type_of(worst["input"])
        value = repr(shortened(kind_given)) if isinstance(kind_given, str) else shown(kind_given)
        return InvalidRequest(f"{field}.type{_expectation(worst['msg'])}, not {value}", field=f"{field}.type")
    expected = _expectation(worst["msg"])
    for error in same:  # a fixed value beside another type, such as `bool | Literal["never"]`
        if error is not worst and error["type"] == "literal_error" and error["loc"][:-1] == worst["loc"][:-1]:
            expected += f" or {_expectation(error['msg']).removeprefix(' must be ')}"
    given = worst["input"]
    is_choice = worst["type"] == "literal_error" and isinstance(given, str)  # contains no text of a prompt
    value = repr(shortened(given)) if is_choice else shown(given)
    return InvalidRequest(f"{field}{expected}, not {value}", field=field)


def _expectation(message: str) -> str:
    """Convert pydantic's message about a value, such as `Input should be a valid integer, got a number with a
    fractional part`, to ` must be a valid integer`."""
    text = _OBJECT.sub("an object", message.split(", got ")[0].split(", unable ")[0])
    return text.replace("Input should", " must", 1) if text.startswith("Input should") else f": {text.lower()}"


@functools.cache
def _names(kind: type[BaseModel]) -> frozenset[str]:
    """Return the names of all fields of a model and of its nested models."""
    models = {kind}
    open_models = [kind]
    while open_models:
        for info in open_models.pop().model_fields.values():
            inner = set(_models_of(info.annotation)) - models
            models |= inner
            open_models += inner
    return frozenset(info.alias or name for model in models for name, info in model.model_fields.items())


def _models_of(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_of(part)
