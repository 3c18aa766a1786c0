"""The custom resource definitions as data, for tests that hold the code to them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[3] / "charts/kvferry/files/crds"
POOL = yaml.safe_load((FOLDER / "inferencepools.kvferry.dev.yaml").read_text())
SCALER = yaml.safe_load((FOLDER / "poolrolescalers.kvferry.dev.yaml").read_text())


def schema(definition: dict[str, Any] = POOL) -> dict[str, Any]:
    """The OpenAPI schema of the only version."""
    (version,) = definition["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def leaves(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field without fields of its own, as (path, schema); a list's entries are `name[]`."""
    if node.get("type") == "array" and "properties" in node["items"]:
        yield from leaves(node["items"], f"{path}[]")
    elif "properties" in node and not node.get("x-kubernetes-preserve-unknown-fields"):
        for name, part in node["properties"].items():
            yield from leaves(part, f"{path}.{name}" if path else name)
    else:
        yield path, node


def with_defaults(value: Any, node: dict[str, Any]) -> Any:
    """`value` as the API server would store it."""
    if isinstance(value, dict) and "properties" in node:
        filled = dict(value)
        for name, part in node["properties"].items():
            if name not in filled and "default" in part:
                filled[name] = part["default"]
            if name in filled:
                filled[name] = with_defaults(filled[name], part)
        return filled
    if isinstance(value, list) and node.get("type") == "array":
        return [with_defaults(entry, node["items"]) for entry in value]
    return value
