"""The admission of `kvferry operator plan`: the verdicts of the API server, by the chart's definition."""

import json
import re
from collections.abc import Iterator
from typing import Any

import cel
import pytest
import yaml
from click.testing import CliRunner
from unit.operator.admission_cases import ALLOWED, BAD, CHANGES, GOOD, NAMES, pool, prefill
from unit.operator.definitions import schema

from kvferry.bench.commit import ROOT
from kvferry.cli.commands.operator import command
from kvferry.core.errors import UsageError
from kvferry.operator.preview import definition
from kvferry.operator.preview.admission import refusals
from kvferry.operator.preview.preview import read_change


def rules(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each validation rule as (path of its errors, rule); entries of lists are `[]` and of maps `[*]`."""
    for rule in node.get("x-kubernetes-validations", ()):
        yield (path + rule.get("fieldPath", "")).removeprefix(".") or "object", rule
    for name, part in node.get("properties", {}).items():
        yield from rules(part, f"{path}.{name}")
    if isinstance(node.get("additionalProperties"), dict):
        yield from rules(node["additionalProperties"], f"{path}[*]")
    if "items" in node:
        yield from rules(node["items"], f"{path}[]")


def named(name: Any) -> dict[str, Any]:
    return {**pool(), "metadata": {"name": name}}


def files(folder, old: dict[str, Any], new: dict[str, Any] | str):
    for name, found in (("old.yaml", old), ("new.yaml", new)):
        (folder / name).write_text(found if isinstance(found, str) else yaml.safe_dump(found))
    return folder / "old.yaml", folder / "new.yaml"


@pytest.mark.parametrize("case", GOOD)
def test_a_good_value_is_accepted(case):
    assert refusals(pool(**GOOD[case])) == []


@pytest.mark.parametrize("case", BAD)
def test_a_bad_value_is_refused_by_name(case):
    spec, expected_message = BAD[case]
    assert expected_message in "\n".join(refusals(pool(**spec)))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_service_could_have(name):
    assert NAMES[name] in "\n".join(refusals(named(name)))


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_of_what_is_immutable_is_refused(case):
    before, after, expected_message = CHANGES[case]
    assert expected_message in "\n".join(refusals(pool(**after), pool(**before)))
    assert refusals(pool(**after)) == []


@pytest.mark.parametrize("case", ALLOWED)
def test_other_changes_are_accepted(case):
    before, after = ALLOWED[case]
    assert refusals(pool(**after), pool(**before)) == []


def test_a_case_breaks_each_rule():
    said = [line for spec, _ in BAD.values() for line in refusals(pool(**spec))]
    said += [line for name in NAMES for line in refusals(named(name))]
    said += [line for before, after, _ in CHANGES.values() for line in refusals(pool(**after), pool(**before))]
    lines = [
        re.sub(r"^(\S*[.](?:requests|limits))(?:[.]\w+|\[[^]]*\]): ", r"\1[*]: ", re.sub(r"\[\d+\]", "[]", line))
        for line in said
    ]
    unbroken = [
        (path, rule["message"])
        for path, rule in rules(schema())
        if not any(line.startswith(f"{path}: ") and line.endswith(rule["message"]) for line in lines)
    ]
    assert unbroken == []


def test_the_rules_use_only_what_is_evaluated():
    for _, rule in rules(schema()):
        assert rule.keys() <= {"rule", "message", "fieldPath"}
        cel.compile(rule["rule"])


@pytest.mark.parametrize(
    ("metadata", "expected_message"),
    [
        ({}, "metadata.name: Required value"),
        ({"name": 5}, "metadata.name: Invalid value: 5"),
        ({"name": "chat", "namespace": "Team A"}, 'metadata.namespace: Invalid value: "Team A"'),
        ({"name": "chat", "label": {}}, 'unknown field "metadata.label": did you mean "metadata.labels"?'),
        ({"name": "chat", "labels": {"team": 5}}, "put numbers in quotes"),
        ("chat", "metadata: Required value"),
    ],
)
def test_metadata_is_checked(metadata, expected_message):
    assert expected_message in "\n".join(refusals({**pool(), "metadata": metadata}))


@pytest.mark.parametrize(
    ("spec", "expected_message"),
    [
        (prefill(replica=2), 'unknown field "spec.roles[0].replica": did you mean "spec.roles[0].replicas"?'),
        (prefill(engine={"windowPages": "keep"}), 'did you mean "spec.model.windowPages"?'),
        (prefill(replicas=-2), "spec.roles[0].replicas: Invalid value: -2: must be greater than or equal to 0"),
        (prefill(resources={"limits": {"cpu": "512MB"}}), 'spec.roles[0].resources.limits.cpu: Invalid value: "512MB"'),
        (prefill(engine={"kvMemory": "512X"}), 'spec.roles[0].engine.kvMemory: Invalid value: "512X": must be auto or'),
        ({"model": {"name": "m", "reasoningParser": False}}, "must be of type string; put it in quotes"),
        ({"model": {}}, "spec.model.name: Required value: Model name in API requests"),
    ],
)
def test_an_error_has_field_value_and_remedy(spec, expected_message):
    assert expected_message in "\n".join(refusals(pool(**spec)))


def test_every_error_is_reported_at_once():
    found = refusals(pool(**prefill(replicas=-2, replica=1, engine={"threads": -1})))
    assert [line.split(": ")[0] for line in found] == [
        'unknown field "spec.roles[0].replica"',
        "spec.roles[0].engine.threads",
        "spec.roles[0].replicas",
    ]


def test_a_change_is_read(tmp_path):
    stored = {**pool(), "status": {"url": "http://chat"}}
    old, new = read_change(*files(tmp_path, stored, pool(image="kvferry:2")))
    assert (old.spec.image, new.spec.image) == ("", "kvferry:2")


def test_a_pool_is_read_as_the_api_server_stores_it(tmp_path):
    plain = pool(**prefill(scaling={"scaleUp": {}}, resources={"limits": {"cpu": None}, "requests": {"cpu": 1.0}}))
    _, new = read_change(*files(tmp_path, pool(), plain))
    assert new.spec.roles[0].resources == {"limits": {}, "requests": {"cpu": 1}}


def test_an_error_of_the_old_pool_is_its_own(tmp_path):
    with pytest.raises(UsageError, match=r"OLD \(.*old.yaml\) is not a valid pool.*:\n  spec.image"):
        read_change(*files(tmp_path, pool(image="A"), pool()))
    with pytest.raises(UsageError, match=r"NEW \(.*new.yaml\) would be refused by the API server:\n  spec.image"):
        read_change(*files(tmp_path, pool(), pool(image="A")))


def test_a_manifest_without_a_namespace_is_for_that_of_the_stored_pool(tmp_path):
    stored = pool()
    stored = {**stored, "metadata": {**stored["metadata"], "namespace": "team"}}
    new = pool()
    new["metadata"].pop("namespace", None)
    assert [one.namespace for one in read_change(*files(tmp_path, stored, new))] == ["team", "team"]


def test_two_pools_are_no_change(tmp_path):
    other = {**pool(model={"name": "other"}), "metadata": {"name": "other"}}
    with pytest.raises(UsageError, match="describe different pools, default/chat and default/other"):
        read_change(*files(tmp_path, pool(), other))


@pytest.mark.parametrize(
    ("text", "expected_message"),
    [
        ("kind: Deployment\n", "exactly one object of kind InferencePool, not 0"),
        ("{", "expected the node content"),
        (f"{json.dumps(pool())}\n---\n{json.dumps(pool())}", "not 2"),
        ("kind: InferencePool\nkind: InferencePool\n", "the key 'kind' stands twice"),
        (
            "kind: InferencePool\napiVersion: kvferry.dev/v2\nmetadata: {name: chat}\nspec: {}\n",
            'values: "kvferry.dev/v1alpha1"',
        ),
        (
            "kind: InferencePool\napiVersion: v1\nmetadata: {name: chat}\nspec: {}\n",
            "apiVersion must be kvferry.dev/v1alpha1",
        ),
    ],
)
def test_a_file_must_hold_one_pool(tmp_path, text, expected_message):
    with pytest.raises(UsageError, match=re.escape(expected_message)):
        read_change(*files(tmp_path, pool(), text))


def test_dates_are_text(tmp_path):
    text = "metadata: {annotations: {since: 2026-01-01}}"
    new = pool(**prefill(template=yaml.safe_load("metadata: {annotations: {since: '2026-01-01'}}")))
    plain = yaml.safe_dump(new).replace("'2026-01-01'", "2026-01-01")
    assert "'" not in plain, text
    read_change(*files(tmp_path, pool(), plain))


def test_a_wheel_has_the_definition(tmp_path, monkeypatch):
    """The build copies the folder of the chart to `crds` of the package, which is read where there is no chart."""
    (tmp_path / "crds").mkdir()
    (tmp_path / "crds/inferencepools.kvferry.dev.yaml").write_text(
        (definition._FOLDERS[0] / "inferencepools.kvferry.dev.yaml").read_text()
    )
    monkeypatch.setattr(definition, "_FOLDERS", (tmp_path / "charts", tmp_path / "crds"))
    assert definition.pool_schema.__wrapped__() == schema()


def test_the_pools_of_the_documentation_are_accepted():
    example = yaml.safe_load((ROOT / "docs/examples/pool.yaml").read_text())
    overlay = yaml.safe_load((ROOT / "tests/cluster/overlay/pool.yaml").read_text())
    assert refusals(example) == []
    merged = example["spec"] | overlay["spec"]
    merged["model"] = example["spec"]["model"] | overlay["spec"]["model"]
    assert refusals(example | {"spec": merged}) == []


def test_the_command_refuses_with_the_status_of_a_usage_error(tmp_path):
    old, new = files(tmp_path, pool(), pool(**prefill(replica=2)))
    found = CliRunner().invoke(command, ["plan", str(old), str(new)])
    assert (found.exit_code, "spec.roles[0].replicas" in found.stderr) == (2, True)
    assert CliRunner().invoke(command, ["plan", str(old), str(old)]).exit_code == 0
