"""The control plane alone: it answers, stores custom resources, and its controllers work."""

import json
from typing import Any

import pytest
from kubernetes import client

from kvferry.core.errors import Unavailable

pytestmark = pytest.mark.cluster

CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "boats.tests.kvferry.dev"},
    "spec": {
        "group": "tests.kvferry.dev",
        "scope": "Namespaced",
        "names": {"kind": "Boat", "plural": "boats", "singular": "boat"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "properties": {"seats": {"type": "integer"}, "taken": {"type": "integer"}},
                                "x-kubernetes-validations": [
                                    {"rule": "self.taken <= self.seats", "message": "taken must not exceed seats"}
                                ],
                            }
                        },
                    }
                },
            }
        ],
    },
}


def boat(seats: int, taken: int) -> str:
    return json.dumps(
        {
            "apiVersion": "tests.kvferry.dev/v1",
            "kind": "Boat",
            "metadata": {"name": "one"},
            "spec": {"seats": seats, "taken": taken},
        }
    )


def deployment(replicas: int) -> str:
    container = {"name": "main", "image": "localhost/none:1"}
    return json.dumps(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "web"},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": {"app": "web"}},
                "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [container]}},
            },
        }
    )


def test_the_api_server_reports_the_version_of_its_build(kube: Any) -> None:
    server_version = client.VersionApi(kube.client).get_code()
    assert server_version.git_version.startswith("v1.")
    assert (
        json.loads(kube.kubectl("version", "-o", "json"))["clientVersion"]["gitVersion"] == server_version.git_version
    )


def test_objects_of_a_new_kind_are_stored_and_validated(kube: Any, namespace: str) -> None:
    kube.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(CRD))
    kube.kubectl("wait", "--for=condition=Established", "crd/boats.tests.kvferry.dev", "--timeout=30s")
    kube.kubectl("apply", "-n", namespace, "-f", "-", input=boat(4, 3))
    assert kube.kubectl("get", "-n", namespace, "boat/one", "-o", "jsonpath={.spec.taken}") == "3"
    with pytest.raises(Unavailable, match="taken must not exceed seats"):
        kube.kubectl("apply", "-n", namespace, "-f", "-", input=boat(4, 5))


def test_a_deployment_makes_its_pods(kube: Any, namespace: str) -> None:
    kube.kubectl("apply", "-n", namespace, "-f", "-", input=deployment(2))
    kube.kubectl("wait", "-n", namespace, "deployment/web", "--for=jsonpath={.status.replicas}=2", "--timeout=30s")
    pods = client.CoreV1Api(kube.client).list_namespaced_pod(namespace, label_selector="app=web").items
    assert len(pods) == 2
    assert {pod.metadata.owner_references[0].kind for pod in pods} == {"ReplicaSet"}


def test_the_administrator_may_impersonate_other_users(kube: Any, namespace: str) -> None:
    with pytest.raises(Unavailable, match='User "nobody" cannot list resource "pods"'):
        kube.kubectl("get", "pods", "-n", namespace, "--as", "nobody")
    assert "nobody" in kube.kubectl("auth", "whoami", "--as", "nobody")
