"""The CustomResourceDefinition of InferencePool: its schema and the defaults that the API server adds."""

import functools
from pathlib import Path
from typing import Any

import yaml

from kvferry.operator.pool.spec import Json

_FILE = "inferencepools.kvferry.dev.yaml"
_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE.parents[2] / "charts/kvferry/files/crds", _PACKAGE / "crds")
"""Folders with the definitions: of the chart in a checkout, and of an installed wheel, into which the build copies the
chart's."""


@functools.cache
def pool_schema() -> Json:
    """Return the OpenAPI schema of InferencePool."""
    path = next(folder / _FILE for folder in _FOLDERS if (folder / _FILE).is_file())
    (version,) = yaml.safe_load(path.read_text())["spec"]["versions"]
    found: Json = version["schema"]["openAPIV3Schema"]
    return found


def with_defaults(value: Any, schema: Json) -> Any:
    """Return `value` as the API server stores it: without nulls, which no field accepts, with the defaults of the
    schema, and with whole numbers as integers, except in fields for other numbers."""
    if isinstance(value, dict):
        known = schema.get("properties", {})
        more = schema.get("additionalProperties")
        filled = {
            name: part for name, part in value.items() if part is not None or (name not in known and more is None)
        }
        filled |= {name: part["default"] for name, part in known.items() if "default" in part and name not in filled}
        return {name: with_defaults(part, known.get(name, more or {})) for name, part in filled.items()}
    if isinstance(value, list):
        return [with_defaults(entry, schema.get("items", {})) for entry in value]
    if schema.get("type") == "number" and type(value) is int:
        return float(value)
    return int(value) if isinstance(value, float) and value.is_integer() and schema.get("type") != "number" else value
