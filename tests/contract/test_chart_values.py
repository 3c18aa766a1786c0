"""The chart's values are explained one by one and admitted one by one."""

import json
from typing import Any

import pytest
import yaml

from kvferry.testing.machine import ROOT

CHART = ROOT / "charts/kvferry"
TEXT = (CHART / "values.yaml").read_text()
VALUES = yaml.safe_load(TEXT)
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
FREE = {"resources", "spec", "labels", "env", "annotations", "podAnnotations", "podLabels", "nodeSelector", "affinity"}


def fields(schema: dict[str, Any], values: Any, path: str = "") -> list[tuple[str, bool, bool]]:
    """(path, is in the schema, is in the values) of every field of either."""
    known, given = set(schema.get("properties", {})), set(values) if isinstance(values, dict) else set()
    found = []
    for name in sorted(known | given):
        below = f"{path}.{name}".lstrip(".")
        found.append((below, name in known, name in given))
        part = schema.get("properties", {}).get(name, {})
        if name not in FREE and "properties" in part:
            found += fields(part, (values or {}).get(name), below)
    return found


@pytest.mark.parametrize(("path", "is_admitted", "has_default"), fields(SCHEMA, VALUES))
def test_schema_and_values_know_the_same_fields(path, is_admitted, has_default):
    assert is_admitted
    assert has_default or path == "global"  # which helm itself passes to every chart


def test_no_object_of_the_schema_is_open_by_mistake():
    def open_ones(schema: dict[str, Any], path: str) -> list[str]:
        found = [path] if "properties" in schema and schema.get("additionalProperties") is not False else []
        for name, part in schema.get("properties", {}).items():
            found += open_ones(part, f"{path}.{name}")
        return found

    assert open_ones(SCHEMA, "") == []


def test_every_value_has_a_word_before_it():
    """A comment above the line, or above the group that the line belongs to when that group is one idea."""
    silent = []
    lines = TEXT.splitlines()
    for number, line in enumerate(lines):
        name = line.strip().split(":")[0]
        if line.startswith("#") or not line.strip() or ":" not in line or line.strip().startswith(("#", "-")):
            continue
        indent = len(line) - len(line.lstrip())
        above = number - 1
        while above >= 0 and lines[above].strip() and not lines[above].strip().startswith("#"):
            above -= 1
        if not (above >= 0 and lines[above].strip().startswith("#")) and indent:
            silent.append(name)
    assert silent == []


def test_the_chart_speaks_of_this_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("version"))
    assert f'"{chart["appVersion"]}"' in version
    assert chart["version"] == chart["appVersion"]
