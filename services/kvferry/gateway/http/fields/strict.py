"""The base class of all bodies and of their objects: no unknown fields, no conversion of types, a schema of both."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from kvferry.core.sampling import RANGES, Range

Accepted = Mapping[str, tuple[object, ...]]
"""The values at which a field has no effect and is accepted, by the field's name."""


class Strict(BaseModel):
    """A part of a request, without unknown fields and without conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    NO_OPS: ClassVar[Accepted] = {}
    """Fields that are not implemented, with the values at which they have no effect and are accepted."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON Schema of what is accepted: the fields, and those of `NO_OPS` with their values."""
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema).setdefault("properties", {})
        for name, values in cls.NO_OPS.items():
            properties[name] = {"enum": list(values), "description": "Not implemented; these values have no effect."}
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
