"""The base class of all bodies and of their objects: no unknown fields, no type conversion, and a schema that describes
both."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from kvferry.core.sampling import MAX_PRIORITY, RANGES, Range

Accepted = Mapping[str, tuple[object, ...]]
"""The values at which a field has no effect and is accepted, by the field's name."""

_Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Priority = Annotated[
    _Priority, BeforeValidator(lambda value: 0 if value is None else value, json_schema_input_type=_Priority | None)
]
"""Priority of a request; null selects 0, as leaving it out does."""


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


class Strict(BaseModel):
    """A part of a request; unknown fields and type conversions are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    NO_OPS: ClassVar[Accepted] = {}
    """Fields that are not supported, with the values at which they have no effect and are accepted."""

    @model_validator(mode="before")
    @classmethod
    def _drop_no_ops(cls, value: object) -> object:
        """Return an object without the fields in `NO_OPS` that have an accepted value. Other such fields stay, and are
        unknown."""
        if not isinstance(value, dict) or not cls.NO_OPS.keys() & value.keys():
            return value
        return {name: item for name, item in value.items() if not is_no_op(item, cls.NO_OPS.get(name, ()))}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON Schema of accepted objects: the fields, and the fields in `NO_OPS` with their accepted
        values."""
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema).setdefault("properties", {})
        for name, values in cls.NO_OPS.items():
            properties[name] = {"enum": list(values), "description": "Not supported; these values have no effect."}
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
