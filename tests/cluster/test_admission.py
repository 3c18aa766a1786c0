"""Admission of pools by the API server: every invalid value is refused by name, with a remedy."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from unit.operator.admission_cases import ALLOWED, BAD, CHANGES, GOOD, NAMES, pool, prefill

from kvferry.bench.commit import ROOT
from kvferry.core.errors import Unavailable

DEFINITIONS: Path = ROOT / "charts/kvferry/files/crds"

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def defined(kube) -> Iterator[Any]:
    kube.kubectl("apply", "--server-side", "-f", DEFINITIONS)
    kube.kubectl("wait", "--for=condition=Established", "-f", DEFINITIONS, "--timeout=30s")
    return kube


@pytest.mark.parametrize("case", GOOD)
def test_a_good_value_is_accepted(defined, case):
    text = json.dumps(pool(**GOOD[case]))
    defined.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", input=text)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_value_is_refused_by_name(defined, case):
    spec, expected_message = BAD[case]
    with pytest.raises(Unavailable) as refused:
        defined.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", input=json.dumps(pool(**spec)))
    assert expected_message in refused.value.message


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_service_could_have(defined, name):
    named = pool()
    named["metadata"]["name"] = name
    with pytest.raises(Unavailable, match=NAMES[name]):
        defined.kubectl("create", "--dry-run=server", "-f", "-", input=json.dumps(named))


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_of_what_is_immutable_is_refused(defined, namespace, case):
    before, after, expected_message = CHANGES[case]
    defined.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(pool(**before)))
    with pytest.raises(Unavailable, match=expected_message):
        defined.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(pool(**after)))


@pytest.mark.parametrize("case", ALLOWED)
def test_other_changes_are_accepted(defined, namespace, case):
    before, after = ALLOWED[case]
    defined.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(pool(**before)))
    defined.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(pool(**after)))


def test_the_stored_defaults_are_those_of_the_code(defined, namespace):
    from kvferry.operator.pool.spec import parse_pool

    plain = pool()
    defined.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(plain))
    stored = json.loads(defined.kubectl("get", "kvpool", "chat", "-n", namespace, "-o", "json"))
    assert stored["spec"] != plain["spec"]
    assert parse_pool(stored).spec == parse_pool(plain).spec


def test_a_template_of_300_kilobytes_is_kept_and_can_be_deleted(defined, namespace):
    big = pool(**prefill(template={"metadata": {"annotations": {"note": "x" * 250_000, "more": "y" * 50_000}}}))
    defined.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(big))
    changed = copy.deepcopy(big)
    changed["spec"]["roles"][0]["replicas"] = 2
    defined.kubectl(
        "apply", "--server-side", "--force-conflicts", "-n", namespace, "-f", "-", input=json.dumps(changed)
    )
    defined.kubectl("delete", "kvpool", "chat", "-n", namespace, "--timeout=10s")


def test_users_cannot_write_the_status(defined, namespace):
    forged = {**pool(), "status": {"url": "http://elsewhere"}}
    defined.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(forged))
    stored = json.loads(defined.kubectl("get", "kvpool", "chat", "-n", namespace, "-o", "json"))
    assert "status" not in stored


def test_explain_is_a_manual(defined):
    expected_message = defined.kubectl("explain", "kvpool.spec.rollout")
    assert "Both roles are updated together" in expected_message
    assert "Number of old revisions to keep for rollbackTo" in expected_message
    assert "<no description>" not in defined.kubectl("explain", "kvpool.spec")


@pytest.mark.parametrize("replicas", [0, 1000])
def test_a_scaler_scales(defined, namespace, replicas):
    scaler = {
        "apiVersion": "kvferry.dev/v1alpha1",
        "kind": "PoolRoleScaler",
        "metadata": {"name": "chat-decode"},
        "spec": {"pool": "chat", "role": "decode"},
    }
    defined.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(scaler))
    defined.kubectl("scale", "kvscale/chat-decode", "-n", namespace, f"--replicas={replicas}")
    got = defined.kubectl("get", "kvscale", "chat-decode", "-n", namespace, "-o", "jsonpath={.spec.replicas}")
    assert got == str(replicas)


@pytest.mark.parametrize(
    ("change", "expected_message"),
    [
        ({"role": "prefill"}, "role is immutable"),
        ({"pool": "other"}, "pool is immutable"),
        ({"replicas": 1001}, "less than or equal to 1000"),
    ],
)
def test_the_pool_and_role_of_a_scaler_cannot_change(defined, namespace, change, expected_message):
    scaler = {
        "apiVersion": "kvferry.dev/v1alpha1",
        "kind": "PoolRoleScaler",
        "metadata": {"name": "chat-decode"},
        "spec": {"pool": "chat", "role": "decode"},
    }
    defined.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(scaler))
    with pytest.raises(Unavailable, match=expected_message):
        defined.kubectl(
            "patch", "kvscale", "chat-decode", "-n", namespace, "--type=merge", "-p", json.dumps({"spec": change})
        )
