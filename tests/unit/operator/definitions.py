"""The custom resource definitions as data, for tests that compare the code with them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[3] / "charts/kvferry/files/crds"
POOL = yaml.safe_load((FOLDER / "inferencepools.kvferry.dev.yaml").read_text())
SCALER = yaml.safe_load((FOLDER / "poolrolescalers.kvferry.dev.yaml").read_text())


def schema(definition: dict[str, Any] = POOL) -> dict[str, Any]:
    """Return the OpenAPI schema of the definition's only version."""
    (version,) = definition["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def leaves(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each field without subfields as (path, schema); the entries of a list are `name[]`."""
    if node.get("type") == "array" and "properties" in node["items"]:
        yield from leaves(node["items"], f"{path}[]")
    elif "properties" in node and not node.get("x-kubernetes-preserve-unknown-fields"):
        for name, part in node["properties"].items():
            yield from leaves(part, f"{path}.{name}" if path else name)
    else:
        yield path, node
