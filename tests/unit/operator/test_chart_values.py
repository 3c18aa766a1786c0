"""The chart's values, their schema and their comments have the same names."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[3] / "charts/kvferry"
TEXT = (CHART / "values.yaml").read_text()
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
FREE = {
    "operator.resources": "as in a container",
    "operator.podAnnotations": "any",
    "operator.podLabels": "any",
    "operator.nodeSelector": "any",
    "operator.affinity": "as in a pod",
    "serviceAccount.annotations": "any",
    "metrics.podMonitor.labels": "any",
    "metrics.dashboards.labels": "any",
    "metrics.alerts.labels": "any",
    "picker.resources": "as in a container",
    "picker.objectives": "any",
    "valkey.resources": "as in a container",
    "examplePool.spec": "as in a pool",
}
"""Maps whose entries are not values of the chart, with the reason."""


def of_values(found: Any, path: str = "") -> Iterator[str]:
    if isinstance(found, dict) and path not in FREE:
        for name, part in found.items():
            yield from of_values(part, f"{path}.{name}".strip("."))
    else:
        yield path


def of_schema(node: dict[str, Any], path: str = "") -> Iterator[str]:
    if "properties" in node:
        assert node["additionalProperties"] is False, f"{path or 'the top'} accepts names that no template reads"
        for name, part in node["properties"].items():
            yield from of_schema(part, f"{path}.{name}".strip("."))
    else:
        yield path


def test_the_schema_has_the_values_and_no_other() -> None:
    helms_own = {"global", "enabled"}
    assert set(of_schema(SCHEMA)) - helms_own == set(of_values(yaml.safe_load(TEXT)))


@pytest.mark.parametrize("path", sorted(of_values(yaml.safe_load(TEXT))))
def test_a_value_has_the_type_of_the_schema(path: str) -> None:
    value, node = yaml.safe_load(TEXT), SCHEMA
    for name in path.split("."):
        value, node = value[name], node["properties"][name]
    names = {str: "string", bool: "boolean", int: "integer", list: "array", dict: "object"}
    wanted = node["type"] if isinstance(node["type"], list) else [node["type"]]
    assert names[type(value)] in wanted
    assert "enum" not in node or value in node["enum"]
    assert "pattern" not in node or re.search(node["pattern"], value)


def test_every_value_has_a_comment_of_its_own() -> None:
    lines = TEXT.splitlines()
    silent, folders = [], []
    for i, line in enumerate(lines):
        found = re.match(r"( *)([A-Za-z]+):", line)
        if not found:
            continue
        del folders[len(found[1]) // 2 :]
        folders.append(found[2])
        path = ".".join(folders)
        is_value = path in set(of_values(yaml.safe_load(TEXT)))
        if is_value and not lines[i - 1].strip().startswith("#"):
            silent.append(path)
    assert silent == []
