"""What templates of pools may contain."""

from typing import Any

import pytest
from unit.operator.pools import IMAGE, pool

from kvferry.core.errors import UsageError
from kvferry.operator.plan.pool_plan import verify
from kvferry.operator.plan.template_policy import TemplatePolicy, check_templates
from kvferry.operator.pool.spec import InferencePool


def with_template(template: dict[str, Any], *, of_gateway: bool = False) -> InferencePool:
    if of_gateway:
        return pool(gateway={"template": template})
    return pool(roles=[{"name": "prefill", "template": template}, {"name": "decode"}])


PERMITTED: dict[str, Any] = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"x/y": "z"}},
    "spec": {
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "containers": [{"name": "worker", "resources": {"limits": {"cpu": 4}}, "env": [{"name": "A", "value": "b"}]}],
    },
}


def test_placement_resources_and_env_values_are_permitted() -> None:
    verify(with_template(PERMITTED), IMAGE, TemplatePolicy.RESTRICTED)
    of_gateway = {**PERMITTED, "spec": {**PERMITTED["spec"], "containers": [{"name": "gateway", "resources": {}}]}}
    verify(with_template(of_gateway, of_gateway=True), IMAGE, TemplatePolicy.RESTRICTED)
    verify(pool(), IMAGE, TemplatePolicy.RESTRICTED)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"hostPID": True}, "hostPID"),
        ({"serviceAccountName": "admin"}, "serviceAccountName"),
        ({"securityContext": None}, "securityContext"),
        ({"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}, "volumes"),
        ({"initContainers": []}, "initContainers"),
        ({"containers": [{"name": "worker", "image": "other"}]}, "containers[0].image"),
        ({"containers": [{"name": "worker", "command": ["sh"]}]}, "containers[0].command"),
        (
            {"containers": [{"name": "worker", "securityContext": {"privileged": True}}]},
            "containers[0].securityContext",
        ),
        ({"containers": [{"name": "worker", "volumeMounts": []}]}, "containers[0].volumeMounts"),
        (
            {"containers": [{"name": "worker", "env": [{"name": "A", "valueFrom": {"secretKeyRef": {}}}]}]},
            "containers[0].env[0].valueFrom",
        ),
        ({"containers": [{"name": "worker", "envFrom": []}]}, "containers[0].envFrom"),
    ],
)
@pytest.mark.parametrize("of_gateway", [False, True])
def test_other_fields_are_refused_by_their_paths(spec: dict[str, Any], field: str, of_gateway: bool) -> None:
    found = with_template({"spec": spec}, of_gateway=of_gateway)
    check_templates(found, TemplatePolicy.ANY)
    with pytest.raises(UsageError, match="not permitted: this operator runs with --template Restricted") as caught:
        check_templates(found, TemplatePolicy.RESTRICTED)
    where = "gateway" if of_gateway else "roles[prefill]"
    assert caught.value.field == f"{where}.template.spec.{field}"


@pytest.mark.parametrize("entry", [{"name": "sidecar"}, {}, "worker", {"name": "gateway"}])
def test_no_container_is_added(entry: object) -> None:
    with pytest.raises(UsageError, match="may change the container 'worker' only"):
        check_templates(with_template({"spec": {"containers": [entry]}}), TemplatePolicy.RESTRICTED)
